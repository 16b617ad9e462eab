"""`stop_when`: the rule by which a run ends before its last step, by what its evaluations show.

A gain is a held-out loss that is lower, document by document, than at the best evaluation before, by more than chance:
the paired test of `evaluate.compare`. Small gains add up: the best evaluation stays what later ones are held against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunesmith.config.schema import Run
from tunesmith.config.values import stop_rule
from tunesmith.errors import UserError
from tunesmith.evaluate.compare import LEVEL, paired_ratios
from tunesmith.objectives.base import Objective
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Plan

Documents = Mapping[str, tuple[float, float]]
"""The sum of each document's losses, and of its weights."""


class StopRule:
    """What a run's evaluations have shown so far; `reason` says why it ends, once it does."""

    def __init__(self, text: str):
        self.text = text
        self.kind, self.number, self.task = stop_rule(text)
        self.reason: str | None = None
        self._best: Documents = {}
        self._since = 0

    @classmethod
    def of(cls, run: Run, plan: Plan, objective: Objective, *, has_held_out: bool) -> StopRule | None:
        """The rule of a run, None where it has none. UserError where it would never be told what it needs."""
        if run.stop_when is None:
            return None
        rule = cls(run.stop_when)
        if not has_held_out:
            raise UserError("stop_when needs held-out data; set eval or held_out, or leave stop_when out.")
        if rule.task is not None:
            return rule
        if rule.kind == "no gain" and not objective.is_token_sum:
            raise UserError(
                f"stop_when: with objective: {run.objective} there is no loss of each document to compare; use "
                "`loss below X`, or leave it out."
            )
        if rule.kind == "no gain" and (plan.mesh.pipeline > 1 or plan.mesh.context > 1):
            raise UserError(
                "stop_when: with pipeline or context parallelism no rank knows the loss of each document; use "
                "`loss below X`, or leave it out."
            )
        return rule

    def tell(self, step: int, loss: float, documents: Documents) -> None:
        """Take an evaluation into account; the one before the first step is what the others begin with. Where the rule
        is about a task, `loss` is minus its score, and its items are the documents."""
        if step == 0:
            self._best = dict(documents)
        elif self.kind == "below":
            if loss < self.number:
                self.reason = f"the held-out loss is {loss:.4f}, below {self.number:g}"
        elif self.kind == "above":
            if -loss > self.number:
                self.reason = f"{self.task} scores {-loss:.4f}, above {self.number:g}"
        elif self._is_gain(documents):
            self._best, self._since = dict(documents), 0
        else:
            self._since += 1
            if self._since >= self.number:
                of = f" on {self.task}" if self.task else ""
                self.reason = f"{self._since} evaluations in a row have brought no gain beyond chance{of}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the rule to go on as it was."""
        best = {key: list(value) for key, value in self._best.items()}
        return {"text": self.text, "best": best, "since": self._since, "reason": self.reason}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from the state of a run that had this rule; another rule begins anew."""
        if state and state.get("text") == self.text:
            self._best = {key: (value[0], value[1]) for key, value in state["best"].items()}
            self._since, self.reason = state["since"], state["reason"]

    def _is_gain(self, documents: Documents) -> bool:
        shared = sorted(self._best.keys() & documents.keys())
        if not shared:  # begun without an evaluation: this is the first
            return True
        new, old = (np.array([losses[key] for key in shared]) for losses in (documents, self._best))
        value, _, _, p, _ = paired_ratios(new[:, 0], new[:, 1], old[:, 0], old[:, 1])
        return value < 0 and p < LEVEL


def together(documents: Documents, ranks: Ranks) -> dict[str, tuple[float, float]]:
    """The documents of all ranks, on every rank."""
    every: dict[str, tuple[float, float]] = {}
    for said in ranks.gather(json.dumps(documents)):
        every |= {key: (value[0], value[1]) for key, value in json.loads(said).items()}
    return every
