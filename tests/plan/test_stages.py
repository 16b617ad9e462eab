from __future__ import annotations

import itertools

import pytest

from tunesmith.plan.stages import cut, micro_batches


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("costs", [[1.0] * 5, [1.0, 1, 9, 1, 1, 1], [3.0, 1, 4, 1, 5, 9, 2, 6]])
@pytest.mark.parametrize("last", [0.0, 2.5])
def test_no_other_cut_has_a_cheaper_costliest_stage(costs, stages, last):
    def costliest(bounds: tuple[int, ...]) -> float:
        sums = [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]
        return max([*sums[:-1], sums[-1] + (last if stages > 1 else 0.0)])

    runs = cut(costs, stages, last=last)
    assert [index for run in runs for index in run] == list(range(len(costs)))
    assert all(runs)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(costliest((0, *inner, len(costs))) for inner in every)
    assert costliest((0, *(run.stop for run in runs))) == pytest.approx(best)


def test_micro_batches_make_whole_rounds():
    assert [micro_batches(count, 4) for count in (1, 4, 5, 8)] == [4, 4, 8, 8]
