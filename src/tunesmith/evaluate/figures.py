"""From the results of items to figures, each with an interval: pure numpy.

A figure is a ratio of two sums over items: accuracy is right answers by questions, loss is nats by target tokens. Items
are what is drawn, so the interval of a ratio is that of its linearised values. Shares of yes and no have Wilson's,
which holds near 0 and 1, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.evaluate.tasks import Kind, Rule, Task

Z95 = 1.959963984540054
BITS = 1 / math.log(2)


@dataclass(frozen=True)
class Measure:
    """What is made of results: the sum of one number over items by the sum of another, or by the number of items."""

    name: str
    of: str
    by: str | None = None
    is_share: bool = False
    """Each item has 0 or 1."""
    is_better_below: bool = False
    scale: float = 1.0

    @property
    def is_percentage(self) -> bool:
        return self.is_share or self.by == "instructions"

    def values(self, results: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Above and below the line, of each item."""
        above = self.scale * np.array([float(one[self.of]) for one in results])
        below = np.array([1.0 if self.by is None else float(one[self.by]) for one in results])
        return above, below


@dataclass(frozen=True)
class Figure:
    measure: Measure
    value: float
    low: float
    high: float
    items: int


def finite(value: float) -> float | None:
    """The end of an interval as JSON can hold it: None where there is none."""
    return value if math.isfinite(value) else None


def _share(name: str) -> Measure:
    return Measure(name, name, is_share=True)


LOSS = Measure("loss", "loss_sum", "target_tokens", is_better_below=True)
BITS_PER_BYTE = Measure("bits_per_byte", "loss_sum", "target_bytes", is_better_below=True, scale=BITS)
CHOICE_LOSS = Measure("choice_loss", "choice_loss", is_better_below=True)
MEASURES: dict[tuple[Kind, Rule | None], tuple[Measure, ...]] = {
    ("loss", None): (LOSS, BITS_PER_BYTE),
    ("choices", None): (_share("acc"), _share("acc_norm"), CHOICE_LOSS),
    ("letters", None): (_share("acc"), CHOICE_LOSS),
    ("answers", "gsm8k"): (_share("strict"), _share("flexible")),
    ("answers", "math"): (_share("exact"),),
    ("answers", "exact"): (_share("exact"),),
    ("samples", None): (),
    ("instructions", None): (
        _share("strict"),
        _share("loose"),
        Measure("instructions_strict", "followed", "instructions"),
        Measure("instructions_loose", "followed_loosely", "instructions"),
    ),
    ("judge", None): (Measure("score", "score"),),
}


def measures_of(task: Task, results: Sequence[Mapping[str, Any]] = ()) -> tuple[Measure, ...]:
    """What is reported of a task; of lm-eval's, by the names of its metrics."""
    if task.kind != "lm-eval":
        return MEASURES[task.kind, task.rule]
    names = dict.fromkeys(name for one in results for name in one)
    return tuple(_of_metric(name, [float(one[name]) for one in results if name in one]) for name in names)


def _of_metric(name: str, values: Sequence[float]) -> Measure:
    is_below = any(part in name for part in ("perplexity", "bits_per_byte", "brier", "wer", "ter"))
    return Measure(name, name, is_share=all(value in (0, 1) for value in values), is_better_below=is_below)


def usable(measure: Measure, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results that have numbers for the measure: a judge may have given no answer that could be read."""
    names = [measure.of, *([measure.by] if measure.by else [])]
    return [one for one in results if all(one.get(name) is not None for name in names)]


def figure(measure: Measure, results: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The figure of a measure over results, with its interval of 95%; None where nothing is counted."""
    above, below = measure.values(usable(measure, results))
    count = len(above)
    if not count or below.sum() <= 0:
        return None
    value = float(above.sum() / below.sum())
    if measure.is_share:
        low, high = wilson(float(above.sum()), count)
    elif count < 2:
        low, high = -math.inf, math.inf
    else:
        error = math.sqrt(count / (count - 1) * float(((above - value * below) ** 2).sum())) / float(below.sum())
        low, high = value - Z95 * error, value + Z95 * error
    return Figure(measure, value, low, high, count)


def wilson(successes: float, count: float) -> tuple[float, float]:
    share = successes / count
    middle = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
