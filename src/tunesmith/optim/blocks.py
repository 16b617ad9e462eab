"""LISA and BAdam: full-parameter training of a few layers at a time, all of them over time.

Every so many steps a turn ends and other weights are trained: with LISA (arXiv 2403.17919) two layers drawn at random,
and always what surrounds the layers; with BAdam (arXiv 2404.02827) one block after the other: the head, each layer from
the top down, the embedding. Weights whose turn it is not are frozen: they have no gradient, no optimizer states and no
fp32 master. A weight that is in two turns in a row keeps its states; any other begins with new ones. Which weights are
trained is a function of seed and step alone, so a resumed run needs only the states of those that were trained last.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.optim.build import Optimizer, weight_of
from tunesmith.plan.model_states import LISA_LAYERS

LONGEST = {"lisa": 20, "badam": 100}
"""Steps of a turn, as the papers have them; fewer where a run is too short for all weights to be trained."""
TURN = "turn"
"""State of each weight that is trained: the number of the turn."""


@dataclass(frozen=True)
class BlockSchedule:
    """Which weights are trained in which step."""

    kind: str
    seed: int
    every: int
    """Steps of a turn."""
    layers: tuple[frozenset[str], ...]
    """Names of the weights of each layer."""
    before: frozenset[str]
    """The embedding's; empty where it is the head."""
    after: frozenset[str]
    """The head's, and all others outside the layers."""

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[nn.Module], run: Run, *, steps: int) -> BlockSchedule:
        """For a run of so many steps."""
        names = {weight: name for name, weight in model.named_parameters()}  # a tied weight once
        left = dict(names)
        found = []
        for layer in layers:
            own = frozenset(left.pop(weight) for weight in layer.parameters() if weight in left)
            found += [own] if own else []
        if not found:
            raise UserError(f"optimizer: {run.optimizer} trains some layers at a time, and this model has none.")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_apart = head is not None and not set(head.parameters()) & set(embedding.parameters())
        before = frozenset(left.pop(weight) for weight in embedding.parameters() if is_apart and weight in left)
        after = frozenset(left.values())
        every = turn_length(run.algorithm, len(found), steps, ends=bool(before) + bool(after))
        return cls(run.algorithm, run.seed, every, tuple(found), before, after)

    def turn(self, step: int) -> int:
        """Of this step (from 0)."""
        return step // self.every

    def active(self, turn: int) -> frozenset[str]:
        """The weights that are trained in it."""
        if self.kind == "badam":
            blocks = [block for block in (self.after, *reversed(self.layers), self.before) if block]
            return blocks[turn % len(blocks)]
        chance = random.Random(f"{self.seed}:{turn}")
        drawn = chance.sample(self.layers, min(LISA_LAYERS, len(self.layers)))
        return self.before.union(self.after, *drawn)


def turn_length(kind: str, layers: int, steps: int, *, ends: int = 2) -> int:
    """Steps of a turn: such that in BAdam each block has one, and in LISA each layer is likely to have two."""
    turns = layers + ends if kind == "badam" else 2 * layers / LISA_LAYERS
    return max(1, min(LONGEST[kind], int(steps // turns)))


class BlockOptimizer(Optimizer):
    """AdamW over the weights whose turn it is; to all others it is the optimizer of every weight."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        run: Run,
        schedule: BlockSchedule,
        *,
        master_weights: bool,
        accumulates: bool = False,
    ):
        self.weights = dict(named)
        self.schedule = schedule
        self.has_masters = master_weights
        self.is_in_backward = False
        self.is_prerounded = False
        self.step_hooks = []
        self._run = run.model_copy(update={"optimizer": "adamw"})
        self._options = {"master_weights": master_weights, "accumulates": accumulates}
        self._turn = 0
        self._inner = self._made(schedule.active(0))

    @property
    def masters(self) -> dict[str, nn.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What is held of each weight: its master while it is trained, else itself."""
        return {name: self._inner.masters.get(name, weight) for name, weight in self.weights.items()}

    @property
    def parameters(self) -> list[nn.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.parameters

    @property
    def parts(self) -> list[torch.optim.Optimizer]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._inner.parts

    @property
    def active(self) -> Collection[str]:
        """Names of the weights whose turn it is."""
        return self._inner.weights.keys()

    def begin(self, learning_rate: float, step: int = 0) -> None:
        turn = self.schedule.turn(step)
        if turn != self._turn or self.active != self.schedule.active(turn):
            self._switch(turn)
        self._inner.begin(learning_rate, step)

    def gradient(self, name: str) -> torch.Tensor | None:
        return self._inner.gradient(name) if name in self.active else None

    def gradient_norm(self, names: Collection[str] | None = None) -> torch.Tensor:
        return self._inner.gradient_norm(names)

    def clip(self, norm: torch.Tensor, largest: float) -> None:
        self._inner.clip(norm, largest)

    def step(self, learning_rate: float) -> None:
        for hook in self.step_hooks:
            hook()
        self._inner.step(learning_rate)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All weights, and the states of those whose turn it is."""
        found = {f"weights/{name}": weight.detach() for name, weight in self.weights.items()}
        own = self._inner.tensors()
        turns = {f"optimizer/{TURN}/{name}": torch.tensor(float(self._turn)) for name in self.active}
        return {**found, **own, **(turns if any(name.startswith("optimizer/") for name in own) else {})}

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)  # whose turn it is is known when all is read

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`. Another optimizer's states are left out: those of this one start afresh."""
        saved = {weight_of(name): value for name, value in tensors.items() if not name.startswith("optimizer/")}
        if different := sorted(self.weights.keys() ^ saved.keys()):
            raise UserError(
                f"The checkpoint was made for other trained weights: '{different[0]}' is in one of the two only."
            )
        for name, weight in self.weights.items():
            if saved[name].shape != weight.shape:
                raise UserError(
                    f"The checkpoint's '{name}' has the shape {tuple(saved[name].shape)}, and that of these settings "
                    f"is {tuple(weight.shape)}; put the model back, or choose another output."
                )
            weight.copy_(saved[name])
        turns = {weight_of(name): int(value) for name, value in tensors.items() if name.startswith(f"optimizer/{TURN}")}
        if not turns:
            return
        self._turn = next(iter(turns.values()))
        self._inner = self._made(turns.keys())
        own = {name: value for name, value in tensors.items() if weight_of(name) in turns}
        self._inner.restore({name: value for name, value in own.items() if not name.startswith(f"optimizer/{TURN}")})

    def _made(self, active: Collection[str]) -> Optimizer:
        for name, weight in self.weights.items():
            weight.requires_grad_(name in active)
            weight.grad = None
        named = [(name, weight) for name, weight in self.weights.items() if name in active]
        return Optimizer(named, self._run, **self._options)

    def _switch(self, turn: int) -> None:
        """Train what is trained in this turn; what stays keeps its master and states."""
        before, self._turn = self._inner, turn
        before.finish_update()
        self._inner = self._made(self.schedule.active(turn))
        for name in self._inner.weights.keys() & before.weights.keys():
            old, new = before.masters[name], self._inner.masters[name]
            if old is not new:
                new.data = old.data
            state = before.owner[old].state.get(old)
            if state:
                self._inner.owner[new].state[new] = state
