"""What is learned: one file an objective, all of them on the same step, packing, plan and checkpoints.

An objective is a subclass of `base.Objective`; `objective_of` finds the one that a run names. To add one: its file
here, its name in `config.schema.ObjectiveName`, a line in the table below and a section of docs/objectives.md. Where
its records have a new shape, `data.formats`, `data.convert` and `data.preferences` learn to read it.
"""

from __future__ import annotations

from tunesmith.config.schema import Run
from tunesmith.objectives.base import Objective
from tunesmith.objectives.cpo import Cpo, Simpo
from tunesmith.objectives.distill import Distill
from tunesmith.objectives.dpo import Dpo
from tunesmith.objectives.embed import Embed
from tunesmith.objectives.grpo import Grpo, Rloo
from tunesmith.objectives.head import Classify, ClassifyTokens, Reward
from tunesmith.objectives.kto import Kto
from tunesmith.objectives.orpo import Orpo
from tunesmith.objectives.sft import Sft

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": Sft,
    "dpo": Dpo,
    "kto": Kto,
    "orpo": Orpo,
    "simpo": Simpo,
    "cpo": Cpo,
    "distill": Distill,
    "reward": Reward,
    "classify": Classify,
    "classify_tokens": ClassifyTokens,
    "embed": Embed,
    "grpo": Grpo,
    "rloo": Rloo,
}


def objective_of(run: Run) -> Objective:
    kind = OBJECTIVES[run.objective]
    if issubclass(kind, Grpo):
        return kind(run.preference, run.rollout)
    if issubclass(kind, Distill):
        return kind(run.preference, run.distillation, run.rollout)
    if issubclass(kind, ClassifyTokens):
        return kind(run.preference, tuple(run.labels))
    return Embed(run.preference, run.embedding) if issubclass(kind, Embed) else kind(run.preference)
