"""Numbers that mean failure: a gradient of exactly 0, weights that explode, steps in which nothing moves.

Weights are told by a sample of each, which is measured on the device and read with the loss, so that nothing waits and
a step takes no longer. All ranks see the same numbers and come to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tunesmith.config.schema import Run
from tunesmith.optim.fused import local

SAMPLED = 256
"""Values of each weight, spread over it."""
MEASURED = 3
"""Numbers that `Sample.measure` gives."""
FIRST, EVERY = 3, 16
"""Measured in so many steps of a sitting, and then each so many steps: taking a sample costs the host some microseconds
for each weight."""
JUMP = 10.0
"""Weights that are so many times as large as when they were measured last have exploded. Each of AdamW's steps moves a
weight by about the learning rate: from the first three measures on, even weights that begin at 0 and only ever grow
become five times as large in sixteen steps."""
GROWN = 100.0
"""Times as large as at first: worth a warning."""
STILL = 1e-9
"""Movement relative to the weights' size that is none: fp32 keeps seven digits."""
PATIENCE = 3
"""Steps without any gradient, until which there may have been a reason."""
FOREIGN = 1.0
"""Mean difference of the log-probabilities of sampler and trainer that no rounding makes."""
ALIKE = 5
"""Steps in a row whose answers to each prompt all have the same reward, after which that is said."""
LEARNED = 1e-3
"""A loss below this may have no gradient left, since there is nothing left to learn."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the trained weights, by their sample."""

    size: float
    """Root of the mean square."""
    moved: float | None
    """Root of the mean square of how far they have moved since they were measured before."""


class Sample:
    """A few values of each trained weight (of this rank's part of it)."""

    def __init__(self, weights: Iterable[torch.Tensor]):
        self._weights = list(weights)
        self._first: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def measure(self, device: torch.device) -> torch.Tensor:
        """How many values, the sum of their squares, and that of their changes; to be summed over ranks."""
        with torch.no_grad():
            now = torch.cat(self._parts()).double()
            before, self._before = self._before, now
            self._first = now if self._first is None else self._first
            moved = (now - before).square().sum() if before is not None else now.new_full((), math.nan)
            return torch.stack([now.new_full((), now.numel()), now.square().sum(), moved]).to(device, non_blocking=True)

    def moved(self) -> list[bool | None]:
        """Of each weight, whether any of its values is another than when it was first measured; None where this rank
        has none of it. Waits for the device."""
        with torch.no_grad():
            parts = self._parts()
            if self._first is None:
                return [None] * len(parts)
            before = self._first.split([part.numel() for part in parts])
            pairs = zip(parts, before, strict=True)
            has_moved = torch.stack([(part.double() != old).any() for part, old in pairs]).tolist()
        return [is_other if part.numel() else None for is_other, part in zip(has_moved, parts, strict=True)]

    def _parts(self) -> list[torch.Tensor]:
        parts = [local(weight.detach()).reshape(-1) for weight in self._weights]
        return [part[:: max(1, part.numel() // SAMPLED)] for part in parts]


def weights_of(count: float, squares: float, moved: float) -> Weights:
    count = max(count, 1.0)
    return Weights(_root(squares / count), None if math.isnan(moved) else _root(moved / count))


class Failing(Exception):
    """Training cannot go on; why, in words."""


class Vitals:
    """Judges what was measured: says what to warn of, once each, and raises Failing."""

    def __init__(self, run: Run, peak_rate: float, *, resumes: bool):
        self.run = run
        self.peak_rate = peak_rate
        self.has_learned = resumes
        """Whether there ever was a gradient."""
        self.without_gradient = 0
        self.alike = 0
        """Steps in a row in which no two answers to a prompt had other rewards."""
        self.first: Weights | None = None
        self.last: Weights | None = None
        self.updates = 0
        """Since weights were measured last, with a rate that should move them."""
        self.said: set[str] = set()

    def see_step(self, step: int, loss: float, grad_norm: float, rate: float) -> str | None:
        """A step that was not skipped."""
        self.updates += rate >= self.peak_rate / 100
        if grad_norm != 0:
            self.has_learned, self.without_gradient = True, 0
            return None
        self.without_gradient += 1
        cause = (
            "No trained weight has any influence on the loss: weights of 0 are between them, or values too large or "
            "too small for the arithmetic; look at the model's weights, lora.targets and precision."
        )
        if self.run.objective == "embed" and loss == 0:
            cause = (
                "Each anchor is compared with what belongs to the others of the step, and here there is nothing else: "
                "one record, or the same text in all; give records that differ, `negative` texts, or raise "
                "batch_tokens."
            )
        if not self.has_learned:
            raise Failing(
                f"The gradient of step {step} is exactly 0, so nothing can be learned, and training stopped. {cause}"
            )
        if self.without_gradient >= PATIENCE and loss > LEARNED:
            raise Failing(
                f"The gradient has been exactly 0 for {PATIENCE} steps, up to step {step}, while the loss is "
                f"{loss:.4g}, so nothing is learned any more, and training stopped. {cause} {self._advice}"
            )
        if self.run.objective == "embed" and loss == 0:
            why = "it has one record, or the same text in all, with nothing to compare them with"
        elif loss > LEARNED:
            why = "if it stays so, training stops"
        else:
            why = f"with a loss of {loss:.2g} nothing is left to learn from these data"
        return self._once("gradient", f"The gradient of step {step} is exactly 0: {why}.")

    def see_rewards(self, step: int, figures: Mapping[str, float]) -> str | None:
        """What a step with the model's own answers found of them: where no reward differs, it teaches nothing."""
        if (gap := figures.get("sampler_gap", 0.0)) > FOREIGN:
            raise Failing(
                f"vLLM does not compute the model that is trained: in step {step} its log-probability of a token was "
                f"{gap:.2g} off the trainer's on average, where rounding makes it a few hundredths at most. Its log, "
                "vllm.log in the run's folder, may say what it made of the model's files; or use rollout.engine: own."
            )
        self.alike = self.alike + 1 if figures.get("no_spread") == 1 else 0
        if self.alike < ALIKE:
            return None
        cut_off = figures.get("truncated", 0.0)
        more = f" {cut_off:.0%} of them are cut off by rollout.max_answer_tokens." if cut_off >= 0.5 else ""
        return self._once(
            "rewards",
            f"In {ALIKE} steps, up to step {step}, all answers to a prompt had the same reward "
            f"({figures['reward']:.3g} in the last one), so nothing was learned from them. Look at some in "
            "rollouts.jsonl of the run's folder: the rewards may not fit, the prompts be too hard or too easy; more "
            f"rollout.answers or a higher rollout.temperature make answers differ.{more}",
        )

    def see_weights(self, measured: Weights, after: int) -> str | None:
        """What was measured when so many steps were done."""
        before, self.last = self.last, measured
        updates, self.updates = self.updates, 0
        if self.first is None:
            self.first = measured
        # Some adapters begin at exactly 0, and any size is infinitely larger.
        if before is not None and not measured.size <= (JUMP * before.size if before.size else math.inf):
            raise Failing(
                f"The trained weights have exploded: after step {after} they are about {measured.size:.2g} in size, "
                f"and were {before.size:.2g} before, so training stopped and they were not saved. {self._advice}"
            )
        if measured.size > GROWN * self.first.size > 0:
            return self._once(
                "grown",
                f"After step {after} the trained weights are more than {GROWN:.0f} times as large as at first "
                f"({measured.size:.2g}, {self.first.size:.2g} then). {self._advice}",
            )
        if updates and measured.moved is not None and measured.moved <= STILL * measured.size:
            return self._once(
                "still",
                f"The weights did not move up to step {after}: the learning rate, {self.peak_rate:g} at most, is too "
                f"small to change them, so nothing is learned; {self._usual} are usual.",
            )
        return None

    @property
    def _advice(self) -> str:
        return f"A lower learning_rate usually helps: it is {self.peak_rate:g}, and {self._usual} are usual."

    @property
    def _usual(self) -> str:
        return "2e-4 for adapters and 2e-5 for all weights" if self.run.algorithm != "sgd" else "0.01 to 1 with sgd"

    def _once(self, what: str, message: str) -> str | None:
        if what in self.said:
            return None
        self.said.add(what)
        return message


def _root(value: float) -> float:
    return math.sqrt(value) if math.isfinite(value) else math.inf
