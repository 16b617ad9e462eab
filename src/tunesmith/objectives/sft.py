"""Supervised fine-tuning: the mean loss over target tokens; of plain texts, which are targets throughout, this is
continued pretraining."""

from __future__ import annotations

from tunesmith.objectives.base import Objective


class Sft(Objective):
    name = "sft"

    @property
    def is_token_sum(self) -> bool:
        return True
