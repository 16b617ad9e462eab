"""The learning-rate range test (arXiv 1506.01186): steps whose rate grows from far too low to far too high.

Where the loss falls fastest is a rate that teaches; where it is lowest and about to rise is one that is nearly too
high. Steps run through the same code as in training, on weights that are thrown away afterwards. Losses of single
steps are those of different data, so what is judged is their moving average.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunesmith.checkpoint.files import write_atomic
from tunesmith.errors import UserError
from tunesmith.measure.picture import rates_svg
from tunesmith.train.job import Job
from tunesmith.train.loop import loss_scale_of, step_of
from tunesmith.train.step import NotFinite

SPAN = 100.0
"""Times the plan's rate, down and up, between which rates are tried."""
SMOOTHING = 0.8
"""Share of the past in the moving average."""
DIVERGED = 1.3
"""A moving average so many times its lowest has diverged."""
BELOW_LOWEST = 3.0
"""A rate is suggested that is so many times smaller than the one with the lowest loss, at most: there it is about to
rise, and a whole run meets harder data than a few steps do."""
FALLEN = 0.02
"""A loss that has fallen by a smaller part has taught nothing about rates."""
NEAR = 3.0
"""Two rates that differ by less than so many times are as good as each other here."""
PICTURE, REPORT = "rates.svg", "report.json"


@dataclass(frozen=True)
class Tried:
    rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class RateRange:
    """What was found."""

    planned: float
    """The rate of the plan."""
    tried: tuple[Tried, ...]
    has_diverged: bool
    suggested: float | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rates_between(lowest: float, highest: float, count: int) -> list[float]:
    """Each the same number of times as large as the one before."""
    return [lowest * (highest / lowest) ** (index / (count - 1)) for index in range(count)]


def try_rates(
    job: Job, rates: Sequence[float], progress: Callable[[str, int, int | None], None] = lambda *_: None
) -> RateRange:
    """Train a step with each of the rates, until the loss diverges. The job's weights change; nothing is saved."""
    if job.roll_out is not None and job.run.objective == "distill":
        raise UserError(
            "`lr` looks at how the loss falls, and with distillation.on_policy each step has another one; try rates "
            "with on_policy: 0."
        )
    if job.roll_out is not None:
        raise UserError(
            f"`lr` looks at how the loss falls, and the loss of objective: {job.run.objective} is about 0 at any rate; "
            "compare runs with different rates by their rewards."
        )
    step = step_of(job, loss_scale_of(job))
    step.capture = None  # passes are captured for runs that are longer
    job.model.train()
    batches = itertools.chain.from_iterable(job.loader.iterate() for _ in itertools.count())
    tried: list[Tried] = []
    average, has_diverged = 0.0, False
    for number, rate in enumerate(rates, 1):
        progress("Trying rates", number, len(rates))
        try:
            result = step(next(batches), rate)
        except NotFinite:
            has_diverged = True
            break
        if result.is_skipped:  # fp16, whose scale is still being found
            continue
        average = SMOOTHING * average + (1 - SMOOTHING) * result.loss
        tried.append(Tried(rate, result.loss, average / (1 - SMOOTHING ** (len(tried) + 1))))
        if tried[-1].smoothed > DIVERGED * min(one.smoothed for one in tried):
            has_diverged = True
            break
    if len(tried) < 3:
        raise UserError(
            f"The loss diverged after {len(tried)} steps, at a rate of {rates[len(tried)]:.3g}: say a lower --lowest, "
            "and look at the data and the model's weights."
        )
    suggested, reason = judge(tried, job.plan.learning_rate, has_diverged=has_diverged)
    return RateRange(job.plan.learning_rate, tuple(tried), has_diverged, suggested, reason)


def judge(tried: Sequence[Tried], planned: float, *, has_diverged: bool) -> tuple[float | None, str]:
    """The rate to use, or none, and why."""
    lowest = min(range(len(tried)), key=lambda index: tried[index].smoothed)
    first = max(one.smoothed for one in tried[: lowest + 1])
    if lowest < 2 or tried[lowest].smoothed > (1 - FALLEN) * first:
        return None, (
            f"the loss did not fall by more than {FALLEN:.0%} at any rate, so nothing can be told from it; keep the "
            f"plan's {planned:.2g}, or try more --steps"
        )
    # Over a few steps around each: what a rate has done shows in the average a little later.
    reach = max(1, len(tried) // 20)
    falls = {
        index: tried[max(0, index - reach)].smoothed - tried[min(lowest, index + reach)].smoothed
        for index in range(1, lowest)
    }
    steepest = max(falls, key=lambda index: falls[index])
    most = tried[lowest].rate / BELOW_LOWEST
    rate = float(f"{min(tried[steepest].rate, most):.1e}")
    reason = f"the loss falls fastest around {tried[steepest].rate:.2g}"
    if tried[steepest].rate > most:
        reason += f", and is lowest at {tried[lowest].rate:.2g}, which leaves {BELOW_LOWEST:g} times to spare"
    if not has_diverged:
        reason += f"; it never diverged, up to {tried[-1].rate:.2g}, so a higher --highest may show more"
    if planned / NEAR <= rate <= planned * NEAR:
        reason += f"; the plan's {planned:.2g} is within {NEAR:g} times of it and may stay"
    return rate, reason


def write(found: RateRange, folder: Path) -> list[str]:
    """Picture and figures; the names of the files."""
    points = [(one.rate, one.loss, one.smoothed) for one in found.tried]
    marks = {"plan": found.planned} | ({"suggested": found.suggested} if found.suggested else {})
    write_atomic(folder / PICTURE, rates_svg(points, marks).encode())
    write_atomic(folder / REPORT, (json.dumps(found.as_json(), indent=1) + "\n").encode())
    return [PICTURE, REPORT]
