"""What a run saves to be continued, and how it is given back: weights, masters and optimizer states, by all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tunesmith.checkpoint.codec import ShardSlice
from tunesmith.checkpoint.store import Checkpoint, CheckpointStore, Saving, copy_to_host, itself
from tunesmith.model.adapters import RankSchedule
from tunesmith.model.merges import Merges
from tunesmith.optim.build import Optimizer, weight_of
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import from_rows, full_tensor, own_parts, rows_of
from tunesmith.plan.plan import Plan
from tunesmith.run.stop import StopRule


@dataclass(frozen=True)
class Share:
    """What of a run's tensors this rank writes."""

    called: nn.Module
    plan: Plan
    ranks: Ranks

    @property
    def is_first_of_stage(self) -> bool:
        return self.ranks.rank % (self.ranks.count // self.plan.mesh.pipeline) == 0

    def own(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that this rank has a part in writing: weights that several stages have are the first one's."""
        repeated = self.called.repeated if isinstance(self.called, Pipelined) else set()
        return {name: tensor for name, tensor in tensors.items() if weight_of(name) not in repeated}

    def parts(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, ShardSlice]]:
        """This rank's rows of each tensor; all ranks must ask at once."""
        tensor = (self.ranks.rank % self.plan.mesh.tensor, self.plan.mesh.tensor)
        for name, part in own_parts(tensors, is_first=self.is_first_of_stage, tensor=tensor):
            yield name, ShardSlice(*part)


@dataclass(frozen=True)
class TrainingState:
    """Weights and optimizer of a run, saved into its checkpoints and restored from them."""

    optimizer: Optimizer
    share: Share
    checkpoints: CheckpointStore
    schedule: RankSchedule | Merges | None = None
    """AdaLoRA's, or that of merges into the base, which change more than trained weights."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out losses by step, which go on with the run."""
    rule: StopRule | None = None
    """What of the evaluations `stop_when` has to remember."""
    held_out: tuple[str, ...] = ()
    """Fingerprints of the data that are evaluated."""

    def save(self, step: int, state: dict[str, Any], metric: float | None, *, is_async: bool) -> Saving:
        """Begins a checkpoint. All ranks must take part. Weights are decoded until they are copied or written."""
        self.optimizer.decode()
        saving = None
        try:
            saving = self._begin(step, state, metric, is_async=is_async)
        finally:
            if is_async or saving is None:
                self.optimizer.encode()
        return saving if is_async else Saving(lambda: self._write(saving), saving.finish)

    def _begin(self, step: int, state: dict[str, Any], metric: float | None, *, is_async: bool) -> Saving:
        tensors, ranks = self.optimizer.tensors(), self.share.ranks
        measured_on = hashlib.sha256(" ".join(self.held_out).encode()).hexdigest()[:16]
        copy = copy_to_host if is_async else itself
        if self.held_out:
            state = {**state, "held_out": list(self.held_out)}
        if self.rule is not None:
            state = {**state, "stop_when": self.rule.state()}
        if self.schedule is not None:
            tensors |= {f"schedule/{name}": value for name, value in self.schedule.tensors().items()}
        if ranks.count == 1:
            full = {name: full_tensor(tensor) for name, tensor in tensors.items()}
            return self.checkpoints.begin(step, full, state, metric=metric, measured_on=measured_on, copy=copy)
        tensors = self.share.own(tensors)
        parts = dict(self.share.parts(tensors))
        return self.checkpoints.begin_on_all_ranks(
            step, parts, tensors.keys(), state, ranks, metric=metric, measured_on=measured_on, copy=copy
        )

    def _write(self, saving: Saving) -> None:
        try:
            saving.write()
        finally:
            self.optimizer.encode()

    def restore(self, store: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
        """Gives weights and optimizer the values of a checkpoint, and returns the state that was saved with it. Losses
        of other held-out data are no part of it; `has_other_held_out` then says so."""
        loaded, state = store.load_rows(checkpoint, self._wanted_rows, self.optimizer.room)
        tensors = {}
        for name, part in loaded.items():
            if self._wanted_rows(name) == (0, 0):
                continue  # another stage's
            weight = self._spread_weight(name)
            is_spread = weight is not None and part.total == weight.shape[0] and part.tensor.ndim > 0
            tensors[name] = from_rows(part.tensor, weight) if is_spread else part.tensor
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("schedule/")}
        if self.schedule is not None:
            self.schedule.restore({name.removeprefix("schedule/"): value for name, value in own.items()})
        self.optimizer.restore(tensors)
        if self.held_out and state.get("held_out") not in (None, list(self.held_out)):
            state = {**state, "first_loss": None, "has_other_held_out": True}
        elif checkpoint.metric is not None:
            self.losses[checkpoint.step] = checkpoint.metric
        if state.get("first_loss") is not None:
            self.losses[0] = state["first_loss"]
        if self.rule is not None and (self.rule.task or not state.get("has_other_held_out")):
            self.rule.restore(state.get("stop_when"))
        return state

    def _spread_weight(self, name: str) -> DTensor | None:
        """The weight that a tensor of the checkpoint belongs to, where it lies over ranks."""
        weight = self.optimizer.weights.get(weight_of(name))
        return weight if isinstance(weight, DTensor) else None

    def _wanted_rows(self, name: str) -> tuple[int, int] | None:
        """The rows of a tensor of the checkpoint that this rank needs; None: all of it."""
        if isinstance(self.share.called, Pipelined) and weight_of(name) not in self.optimizer.weights:
            return 0, 0
        weight = self._spread_weight(name)
        return None if weight is None else rows_of(weight)
