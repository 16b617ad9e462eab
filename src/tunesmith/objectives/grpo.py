"""Learning from the model's own answers, by how much better than others to the same prompt each is: GRPO (arXiv
2402.03300) with its usual variants, and RLOO (2402.14740).

An answer's advantage is known before the loss is (`run.rollout`). The loss is that of TRL 1.16: ratios of what tokens
were given when they were sampled to what they are given now, clipped. Before the first update with some answers the two
are the same number, so every ratio is exactly 1.

Where another engine has drawn the tokens (`rollout.engine`), it did so with probabilities that are not quite the
trainer's. Then each token's loss is times how much likelier the trainer found it, at most `MOST`: truncated importance
sampling (TRL's `token_truncate`, with its cap). That weight has no gradient, and ratios still begin at 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunesmith.config.schema import Rollout
from tunesmith.objectives.base import Answers, Column, Objective

if TYPE_CHECKING:
    from torch import Tensor

SPREAD = 1e-4
"""Added to the spread of rewards that they are divided by."""
MOST = 3.0
"""The largest weight of a token, or with `rloo` of an answer, that another engine has drawn."""


@dataclass(frozen=True)
class Grpo(Objective):
    rollout: Rollout = field(default_factory=Rollout)

    name = "grpo"
    why = "each step begins with answers by the model itself; several to a prompt are compared by their rewards"
    records = "prompts"
    has_rollouts = True
    rate = 0.1

    def advantages(self, rewards_pa: Sequence[Sequence[float]]) -> list[list[float]]:
        """The advantage of each answer, from the rewards of the answers to each prompt."""
        import numpy as np

        each_pa = np.array(rewards_pa, dtype=np.float64)
        ahead_pa = each_pa - each_pa.mean(1, keepdims=True)
        scale = self.rollout.scale_rewards or "group"
        if scale == "group":
            ahead_pa /= each_pa.std(1, ddof=1, keepdims=True) + SPREAD
        elif scale == "batch":
            ahead_pa /= each_pa.std(ddof=1) + SPREAD
        return ahead_pa.tolist()

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        import torch

        sampled_n, advantages_d = _known(answers)
        ahead_n = answers.logps_n - sampled_n
        reference_n = answers.logps_n if answers.references_n is None else answers.references_n
        behind_n = reference_n - answers.logps_n
        kl_n = (behind_n.exp() - behind_n - 1) * answers.weights_n
        tokens_d = answers.by_document(answers.weights_n)
        gaps_n = _gaps(answers, sampled_n)
        drawn_n = answers.weights_n * gaps_n.exp().clamp(max=MOST)
        # The divergence is times the ratio, whose gradient makes it an unbiased one (arXiv 2512.02556).
        if self.rollout.ratios == "sequence":
            ratios_d = (answers.by_document(ahead_n * answers.weights_n) / tokens_d).exp()
            losses_d, is_clipped_d = self._clipped(ratios_d, advantages_d)
            sums_d, clipped_d = losses_d * answers.by_document(drawn_n), is_clipped_d * tokens_d
            kl_d = ratios_d * answers.by_document(kl_n)
        else:
            ratios_n, advantages_n = ahead_n.exp(), torch.repeat_interleave(advantages_d, answers.lengths_d)
            losses_n, is_clipped_n = self._clipped(ratios_n, advantages_n)
            sums_d = answers.by_document(losses_n * drawn_n)
            clipped_d = answers.by_document(is_clipped_n * answers.weights_n)
            kl_d = answers.by_document(ratios_n * kl_n)
        columns = self._loss(sums_d, tokens_d, "policy_loss" if self.rollout.beta else "loss")
        if self.rollout.beta:
            columns |= self._loss(self.rollout.beta * kl_d, tokens_d, "kl_loss")
            columns |= {"kl": Column(kl_d.detach(), "tokens")}
        columns |= {"clipped": Column(clipped_d, "tokens")}
        if self.rollout.engine != "own":
            columns |= _told(answers, gaps_n)
            capped_n = (gaps_n.exp() > MOST).double() * answers.weights_n
            columns |= {"sampler_capped": Column(answers.by_document(capped_n), "tokens")}
        return columns

    def _clipped(self, ratios: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each ratio, and whether it is clipped."""
        import torch

        low, high = 1 - self.rollout.epsilon, 1 + (self.rollout.epsilon_high or self.rollout.epsilon)
        losses = -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
        is_low, is_high = (ratios < low) & (advantages < 0), (ratios > high) & (advantages > 0)
        return losses, (is_low | is_high).detach().double()

    def _loss(self, sums_d: Tensor, tokens_d: Tensor, name: str) -> dict[str, Column]:
        """A loss whose sums over the answers' tokens are given, as a mean of the kind that is asked for."""
        kind = self.rollout.loss
        if kind in ("dapo", "bnpo"):
            return {name: Column(sums_d, "tokens", is_loss=True)}
        each_d = sums_d / (tokens_d if kind == "grpo" else float(self.rollout.max_answer_tokens))
        return {name: Column(each_d, "examples", is_loss=True)}


class Rloo(Grpo):
    """Answers as wholes: their advantage is over the mean of the others; the KL divergence is part of the reward."""

    name = "rloo"
    why = "each step begins with answers by the model itself; each is compared with the others to its prompt"

    def advantages(self, rewards_pa: Sequence[Sequence[float]]) -> list[list[float]]:
        import numpy as np

        each_pa = np.array(rewards_pa, dtype=np.float64)
        count = each_pa.shape[1]
        ahead_pa = each_pa - (each_pa.sum(1, keepdims=True) - each_pa) / (count - 1)
        if self.rollout.scale_rewards == "batch":
            ahead_pa = (ahead_pa - ahead_pa.mean()) / (ahead_pa.std(ddof=1) + SPREAD)
        return ahead_pa.tolist()

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        sampled_n, advantages_d = _known(answers)
        ratios_d = answers.by_document((answers.logps_n - sampled_n) * answers.weights_n).exp()
        losses_d, is_clipped_d = self._clipped(ratios_d, advantages_d)
        gaps_n = _gaps(answers, sampled_n)
        drawn_d = answers.by_document(gaps_n * answers.weights_n).exp()
        columns = {
            "loss": Column(losses_d * drawn_d.clamp(max=MOST), "examples", is_loss=True),
            "clipped": Column(is_clipped_d, "examples"),
        }
        if self.rollout.engine != "own":
            columns |= _told(answers, gaps_n)
            columns |= {"sampler_capped": Column((drawn_d > MOST).double(), "examples")}
        return columns


def _known(answers: Answers) -> tuple[Tensor, Tensor]:
    sampled_n = answers.logps_n.detach() if answers.sampled_n is None else answers.sampled_n
    return sampled_n, answers.values_d if answers.advantages_d is None else answers.advantages_d


def _gaps(answers: Answers, sampled_n: Tensor) -> Tensor:
    """How far the trainer's log-probability of each token, before the first update, is above that with which it was
    drawn: exactly 0 where the trainer itself has answered."""
    return sampled_n - (sampled_n if answers.sampler_n is None else answers.sampler_n)


def _told(answers: Answers, gaps_n: Tensor) -> dict[str, Column]:
    """Figures of how far the trainer is from the engine that has drawn the tokens: on average over tokens, and of each
    answer's tokens the farthest."""
    import torch

    far_n = gaps_n.abs() * answers.weights_n
    farthest_d = torch.segment_reduce(far_n, "max", lengths=answers.lengths_d, initial=0.0, unsafe=True)
    far = Column(answers.by_document(far_n), "tokens")
    return {"sampler_gap": far, "sampler_gap_largest": Column(farthest_d, "examples")}
