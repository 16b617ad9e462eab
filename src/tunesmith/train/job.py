"""Everything a training run consists of, put together by `tunesmith.run.assemble` and run by `train.loop`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tunesmith.checkpoint.store import Checkpoint, CheckpointStore, Saving
from tunesmith.config.schema import Run
from tunesmith.data.loader import Loader
from tunesmith.data.prompts import PromptLoader
from tunesmith.data.types import StepBatch
from tunesmith.model.adapters import RankSchedule
from tunesmith.model.forward import Shape
from tunesmith.model.merges import Merges
from tunesmith.objectives.base import Objective
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.context import ContextShard
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.train.events import Evaluation
from tunesmith.train.step import Teach

Progress = Callable[[int, int | None], None]
"""Told how far something is, and out of how much (None: not known)."""


RollOut = Callable[[Any, Callable[[int, int], None]], StepBatch]
"""From the prompts of a step (`PromptBatch`), or from a step of the data (`StepBatch`), to its micro-batches. Tells how
many answers there are, of how many; may be stopped by an exception then."""


class Save(Protocol):
    def __call__(self, step: int, state: dict[str, Any], metric: float | None, *, is_async: bool) -> Saving:
        """After so many steps, with state and held-out loss; beside training, of copies, where it `is_async`, else of
        the weights and states themselves."""
        ...


class WriteResult(Protocol):
    def __call__(self, name: str | None = None) -> Path:
        """Into a folder of this name; the usual one when left out."""
        ...


@dataclass(frozen=True)
class Job:
    run: Run
    plan: Plan
    folder: Path
    device: torch.device
    model: nn.Module
    spec: ForwardSpec
    """How the model is called."""
    loader: Loader | PromptLoader
    titles: tuple[str, ...]
    """Names of the training data sets, as the loader numbers them."""
    optimizer: Optimizer
    checkpoints: CheckpointStore
    resume_from: CheckpointStore
    """Where to look for a checkpoint to continue from: the same, unless changed settings were accepted."""
    evaluate: Callable[[int, Progress], Evaluation] | None
    """Held-out losses after so many steps; None without held-out data."""
    save: Save
    """Begins a checkpoint. All ranks must take part."""
    restore: Callable[[CheckpointStore, Checkpoint], dict[str, Any]]
    """Gives weights and optimizer the values of a checkpoint, and returns the state that was saved with it."""
    write_result: WriteResult
    """Writes the adapter or the model into the run folder and returns where. All ranks must take part."""
    finish: Callable[[Mapping[str, Any]], None]
    """Writes the summary, by which a run is known to be finished."""
    ends: Callable[[], str | None]
    """Why the run ends before its last step, by what evaluations have shown (`stop_when`); None where it goes on."""
    warnings: tuple[str, ...]
    """What should be said before training starts."""
    shape: Shape | None = None
    """The one shape of micro-batches that compiled layers see."""
    ranks: Ranks = field(default_factory=Ranks)
    context_shard: ContextShard = field(default_factory=ContextShard)
    """What of its micro-batches this rank computes."""
    objective: Objective | None = None
    """None: SFT."""
    schedule: RankSchedule | None = None
    """AdaLoRA's share in each step."""
    merges: Merges | None = None
    """Of adapters into the base, at intervals."""
    teach: Teach | None = None
    """With `objective: distill`."""
    sets: tuple[tuple[str, str], ...] = ()
    """Title of each training data set, and the key under which the token cache has it."""
    close: Callable[[], None] = lambda: None
    """Ends what was started for it beside this process; once it is over, however it went."""
    roll_out: RollOut | None = None
    """With objectives that learn from the model's own answers: makes a step of its prompts."""
