"""Distillation: target tokens are learned from another model's probabilities, and from the data's own tokens beside it.

Its loss is a mean over target tokens like that of SFT, of two parts, and is made where the logits are
(`kernels.linear_distillation`). On held-out data it is measured by the loss of their own tokens, as SFT is: that needs
no teacher, and says what the teacher was good for.
"""

from __future__ import annotations

from tunesmith.objectives.base import Objective

PARTS = ("sft_loss", "distillation_loss")


class Distill(Objective):
    name = "distill"
    why = "the teacher's probabilities are learned; it is frozen, and makes a forward pass over all that is trained on"
    has_teacher = True

    @property
    def is_token_sum(self) -> bool:
        return True
