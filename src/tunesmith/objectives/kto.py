"""Kahneman-Tversky optimization (arXiv 2402.01306): answers that are wanted or not, one by one.

An answer is judged by how much more likely it has become, against a baseline: how much more likely answers to *other*
prompts have become. The baseline is that of the whole step, and no gradient goes through it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.objectives.base import Answers, Column, Objective, share_above_0


class Kto(Objective):
    name = "kto"
    why = "one forward pass over all answers before the first step gives the reference, one in each step the baseline"
    records = "judged"
    has_reference = True
    has_baseline = True
    rate = 0.1

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        settings, beta = self.settings, self.settings.beta or 0.1
        wanted_e = answers.values_d
        ratios_e = answers.logps_d - answers.references_d
        ahead_e = (2 * wanted_e - 1) * (ratios_e - answers.baseline)
        weights_e = wanted_e * settings.desirable_weight + (1 - wanted_e) * settings.undesirable_weight
        rewards_e = beta * ratios_e.detach()
        return {
            "preference_loss": Column(weights_e * (1 - (beta * ahead_e).sigmoid()), "examples", is_loss=True),
            "accuracy": Column(share_above_0(ahead_e.detach()), "examples"),
            "reward_chosen": Column(rewards_e * wanted_e, "wanted"),
            "reward_rejected": Column(rewards_e * (1 - wanted_e), "unwanted"),
            "kl": Column(answers.baseline.expand_as(ratios_e), "examples"),
        }
