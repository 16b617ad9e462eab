"""Learning-rate schedules: pure functions of the step, so a resumed run needs no state of theirs."""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine", "wsd"]
DECAY_SHARE = 0.2
"""Share of all steps in which `wsd` decays."""
FLOOR = 0.0
"""Where linear, cosine and wsd end, as a share of the peak."""


def learning_rate(step: int, *, total: int, peak: float, warmup: float, shape: Shape) -> float:
    """The rate of step `step` (from 0) of `total`. `warmup` below 1 is a share of all steps, else a number of steps."""
    assert 0 <= step < total
    warmup_steps = warmup_length(warmup, total)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if shape == "constant":
        return peak
    if shape == "wsd":
        decay_steps = max(1, math.ceil(DECAY_SHARE * total))
        start = max(warmup_steps, total - decay_steps)
        return peak if step < start else peak * _line((step - start) / (total - start))
    progress = (step - warmup_steps) / (total - warmup_steps)
    if shape == "linear":
        return peak * _line(progress)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def warmup_length(warmup: float, total: int) -> int:
    steps = math.ceil(warmup * total) if warmup < 1 else round(warmup)
    return min(steps, total - 1)


def _line(progress: float) -> float:
    return FLOOR + (1 - FLOOR) * (1 - progress)
