"""Odds ratio preference optimization (arXiv 2403.07691): SFT on the chosen answers, prompts included, and a penalty on
the odds of the rejected ones; no reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunesmith.objectives.base import Answers, Column, Objective, rewards, sft_column

if TYPE_CHECKING:
    from torch import Tensor


class Orpo(Objective):
    name = "orpo"
    why = "there is no reference; steps cost what SFT's do"
    records = "pairs"
    documents = 2
    counts_prompts = True
    rate = 0.3

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        from torch.nn.functional import logsigmoid

        settings, beta = self.settings, self.settings.beta or 0.1
        chosen_e, rejected_e = answers.pairs(answers.logps_d / answers.targets_d)
        log_odds_e = (chosen_e - rejected_e) - (_log1mexp(chosen_e) - _log1mexp(rejected_e))
        return {
            "preference_loss": Column(-beta * logsigmoid(log_odds_e), "examples", is_loss=True),
            **sft_column(answers, 1.0 if settings.sft_weight is None else settings.sft_weight),
            **rewards(beta * chosen_e, beta * rejected_e),
        }


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of numbers below 0; of an answer that is certain, that of one which nearly is."""
    import torch

    x = x.clamp(max=-1e-12)
    is_near = x > -0.6931471805599453
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
    return torch.where(is_near, near, far)
