"""Direct preference optimization (arXiv 2305.18290) and its usual losses: hinge (2309.06657), IPO (2310.12036), cDPO,
robust (2403.00409), normalised by length, and with an SFT loss beside it."""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.objectives.base import Answers, Column, Objective, pair_loss, rewards, sft_column


class Dpo(Objective):
    name = "dpo"
    why = "one forward pass over all pairs before the first step gives the reference; steps cost what SFT's do"
    records = "pairs"
    documents = 2
    has_reference = True
    rate = 0.1

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        settings, beta = self.settings, self.settings.beta or 0.1
        ratios_d = answers.logps_d - answers.references_d
        chosen_e, rejected_e = answers.pairs(ratios_d)
        # IPO's squares would grow with the length of answers; its authors divide by it, and so does TRL.
        is_normalised = settings.length_normalised or settings.loss == "ipo"
        of_chosen, of_rejected = answers.pairs(ratios_d / answers.targets_d if is_normalised else ratios_d)
        losses_e = pair_loss(of_chosen - of_rejected, settings.loss, beta, settings.label_smoothing)
        return {
            "preference_loss": Column(losses_e, "examples", is_loss=True),
            **sft_column(answers, settings.sft_weight or 0.0),
            **rewards(beta * chosen_e, beta * rejected_e),
        }
