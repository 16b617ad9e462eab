"""Distillation: target tokens are learned from another model's probabilities, and from the data's own tokens beside it.

Its loss is a mean over target tokens like that of SFT, of two parts, and is made where the logits are
(`kernels.linear_distillation`). On held-out data it is measured by the loss of their own tokens, as SFT is: that needs
no teacher, and says what the teacher was good for. In a share of the steps (`on_policy`) the student itself answers,
and the teacher's probabilities at its tokens are all that is learned (`run.on_policy`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tunesmith.config.schema import Distillation, Rollout
from tunesmith.objectives.base import Objective

PARTS = ("sft_loss", "distillation_loss")


@dataclass(frozen=True)
class Distill(Objective):
    distillation: Distillation = field(default_factory=Distillation)
    rollout: Rollout = field(default_factory=Rollout)

    name = "distill"
    why = "the teacher's probabilities are learned; it is frozen, and makes a forward pass over all that is trained on"
    has_teacher = True

    @property
    def is_token_sum(self) -> bool:
        return True

    @property
    def is_on_policy(self) -> bool:
        return self.distillation.on_policy > 0
