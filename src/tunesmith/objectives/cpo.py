"""Preferences without a reference: contrastive preference optimization (arXiv 2401.08417) and SimPO (2405.14734)."""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.objectives.base import Answers, Column, Objective, pair_loss, rewards, sft_column


class Cpo(Objective):
    """DPO with a uniform reference, and SFT on the chosen answers beside it."""

    name = "cpo"
    why = "there is no reference; steps cost what SFT's do"
    records = "pairs"
    documents = 2
    rate = 0.1

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        settings, beta = self.settings, self.settings.beta or 0.1
        scores_d = answers.logps_d / answers.targets_d if settings.loss == "ipo" else answers.logps_d
        chosen_e, rejected_e = answers.pairs(scores_d)
        losses_e = pair_loss(chosen_e - rejected_e, settings.loss, beta, settings.label_smoothing)
        return {
            "preference_loss": Column(losses_e, "examples", is_loss=True),
            **sft_column(answers, 1.0 if settings.sft_weight is None else settings.sft_weight),
            **rewards(beta * chosen_e, beta * rejected_e),
        }


class Simpo(Objective):
    """Log-probabilities a token, and a margin by which the chosen answer should be ahead."""

    name = "simpo"
    why = "there is no reference; steps cost what SFT's do"
    records = "pairs"
    documents = 2
    rate = 0.1

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        settings, beta = self.settings, self.settings.beta or 2.0
        chosen_e, rejected_e = answers.pairs(answers.logps_d / answers.targets_d)
        margin_e = chosen_e - rejected_e - settings.margin / beta
        losses_e = pair_loss(margin_e, "sigmoid", beta, settings.label_smoothing)
        return {
            "preference_loss": Column(losses_e, "examples", is_loss=True),
            **sft_column(answers, settings.sft_weight or 0.0),
            **rewards(beta * chosen_e, beta * rejected_e),
        }
