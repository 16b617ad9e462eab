"""How a model's layers are cut into the stages of a pipeline: pure arithmetic, for the planner and for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from tunesmith.plan.plan import Schedule

PER_RANK: dict[Schedule, int] = {"1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""Stages that each rank has; where it has several, they lie `pipeline` stages apart."""


def cut(costs: Sequence[float], stages: int, *, last: float = 0.0) -> list[range]:
    """The layers of each stage, in order, none without: the costliest stage as cheap as can be. `last` is what the last
    stage has to do besides, for the output head."""
    layers = len(costs)
    assert 1 <= stages <= layers
    sums = [0.0, *accumulate(costs)]
    # best[n]: the cost of the costliest stage, and where the last one begins, when n layers make up the stages so far
    best = [(sums[n], 0) for n in range(layers + 1)]
    begins: list[list[int]] = []
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        best = [
            min(
                ((max(best[at][0], sums[n] - sums[at] + extra), at) for at in range(stage, n)),
                default=(float("inf"), 0),
            )
            for n in range(layers + 1)
        ]
        begins.append([at for _, at in best])
    bounds = [layers]
    for row in reversed(begins):
        bounds.append(row[bounds[-1]])
    bounds.append(0)
    bounds.reverse()
    return [range(start, end) for start, end in pairwise(bounds)]


def micro_batches(accumulation: int, pipeline: int) -> int:
    """Micro-batches that go through the pipeline in a step: as many as there are, made up to whole rounds by idle
    ones."""
    return -(-accumulation // pipeline) * pipeline


@lru_cache(maxsize=256)
def busiest(layers: int, head: float, pipeline: int, schedule: Schedule) -> float:
    """The part of the model's work that the busiest rank of a pipeline does; `head` is the output head's, in layers."""
    stages = pipeline * PER_RANK[schedule]
    runs = cut([1.0] * layers, stages, last=head)
    loads = [float(len(run)) for run in runs]
    loads[-1] += head
    return max(sum(loads[rank::pipeline]) for rank in range(pipeline)) / (layers + head)
