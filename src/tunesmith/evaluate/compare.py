"""The verdict: whether one model is better than another, by how much, and how many items it would take to tell.

Both have answered the same items, so differences are compared item by item, which takes out how hard each item is. For
items with 0 or 1: McNemar's exact test on those where the two differ, and the interval of Agresti and Min for the
difference of the shares. For all others, a ratio of sums: Student's t on its linearised differences. Where a table has
several rows, their p values are made larger by Holm's rule: the chance that any row of equal models is called
different stays at 5%. Pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from tunesmith.evaluate.figures import Measure, figure, usable

LEVEL = 0.05
POWER_Z = 0.8416212335729143
"""Standard errors by which a true difference must be larger to be told four times out of five."""
Verdict = Literal["better", "worse", "no difference told", "equal", "too few"]


@dataclass(frozen=True)
class Difference:
    """The difference of the first model to the second, over the items that both have."""

    first: float
    second: float
    value: float
    low: float
    high: float
    p: float
    """Before it is corrected for the number of rows."""
    items: int
    needed: int | None
    """Items in all that would tell a difference as large as this one; None where there is none, or it is told."""
    verdict: Verdict = "no difference told"


def compare(
    measure: Measure, first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Difference | None:
    """The difference between results of the same items in the same order; None where nothing is counted."""
    assert len(first) == len(second)
    both = [(a, b) for a, b in zip(first, second, strict=True) if usable(measure, [a]) and usable(measure, [b])]
    mine, theirs = ([pair[number] for pair in both] for number in (0, 1))
    one, other = figure(measure, mine), figure(measure, theirs)
    if one is None or other is None:
        return None
    found = paired_shares if measure.is_share else paired_ratios
    value, low, high, p, spread = found(*measure.values(mine), *measure.values(theirs))
    made = Difference(one.value, other.value, value, low, high, p, len(both), None)
    return _judged(made, measure, spread, p)


def corrected(rows: Sequence[tuple[Measure, Difference]]) -> list[Difference]:
    """Rows of one table with Holm's correction: the smallest p counts as often as there are rows, and so on."""
    order = sorted(range(len(rows)), key=lambda place: rows[place][1].p)
    made: list[Difference] = [row for _, row in rows]
    worst = 0.0
    for rank, place in enumerate(order):
        measure, row = rows[place]
        worst = max(worst, min(1.0, row.p * (len(rows) - rank)))
        made[place] = _judged(row, measure, None, worst)
    return made


def _judged(row: Difference, measure: Measure, spread: float | None, p: float) -> Difference:
    if row.value == 0 and row.low == row.high == 0:
        return replace(row, verdict="equal", needed=None)
    if row.items < 2:
        return replace(row, verdict="too few", needed=None)
    if p < LEVEL:
        is_better = (row.value < 0) == measure.is_better_below
        return replace(row, verdict="better" if is_better else "worse", needed=None)
    needed = row.needed
    if spread is not None and row.value:
        needed = max(row.items + 1, math.ceil(((1.959963984540054 + POWER_Z) * spread / row.value) ** 2))
    return replace(row, verdict="no difference told", needed=needed)


Compared = tuple[float, float, float, float, float]
"""The difference, its interval, p, and the standard deviation of one item's part in it."""


def paired_shares(above_a: np.ndarray, _a: np.ndarray, above_b: np.ndarray, _b: np.ndarray) -> Compared:
    """0 or 1 of each item by two models."""
    count = len(above_a)
    gained, lost = int((above_a > above_b).sum()), int((above_a < above_b).sum())
    value = (gained - lost) / count
    spread = math.sqrt(max((gained + lost) / count - value**2, 0.0))
    if not gained + lost:
        # No item differs: what could be, by the rule of three, is below 3 in `count`.
        return 0.0, 0.0, 0.0, 1.0, spread
    # Agresti and Min (2005): half an item more in each of the four cells.
    total, b, c = count + 2, gained + 0.5, lost + 0.5
    middle = (b - c) / total
    half = 1.959963984540054 * math.sqrt(b + c - (b - c) ** 2 / total) / total
    return value, max(-1.0, middle - half), min(1.0, middle + half), mcnemar(gained, lost), spread


def mcnemar(gained: int, lost: int) -> float:
    """The exact test: of the items on which two equal models differ, each is right on half by chance."""
    count, fewer = gained + lost, min(gained, lost)
    if not count:
        return 1.0
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) - count * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(math.exp(value) for value in logs))


def paired_ratios(above_a: np.ndarray, below_a: np.ndarray, above_b: np.ndarray, below_b: np.ndarray) -> Compared:
    """Sums by sums of two models over the same items, by what each item adds to the difference."""
    count = len(above_a)
    ratio_a, ratio_b = above_a.sum() / below_a.sum(), above_b.sum() / below_b.sum()
    value = float(ratio_a - ratio_b)
    parts = (above_a - ratio_a * below_a) / below_a.mean() - (above_b - ratio_b * below_b) / below_b.mean()
    if count < 2:
        return value, -math.inf, math.inf, 1.0, math.inf
    spread = float(np.sqrt((parts**2).sum() / (count - 1)))
    error = spread / math.sqrt(count)
    if error <= 1e-12 * max(abs(float(ratio_a)), 1e-300):
        return value, value, value, 1.0 if value == 0 else 0.0, spread
    half = t_quantile(count - 1) * error
    return value, value - half, value + half, t_two_sided(value / error, count - 1), spread


def t_two_sided(t: float, freedom: int) -> float:
    """Chance of a Student's t at least so far from 0."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """How far from 0 Student's t is with a chance of `level`."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > level else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for step in range(400):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        value *= c * d
        if step and abs(1 - c * d) < 1e-12:
            break
    return front * (value - 1)
