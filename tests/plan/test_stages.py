from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tunesmith.plan import memory, speed
from tunesmith.plan.choice import Choice
from tunesmith.plan.stages import busiest, cut, micro_batches

from .shapes import MIXTRAL, task


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


def test_the_busiest_rank_does_its_part_and_little_more():
    assert busiest(32, 0.0, 4, "1f1b") == 1 / 4
    assert busiest(32, 2.0, 2, "1f1b") == 17 / 34
    assert busiest(32, 5.0, 4, "1f1b") == 10 / 37
    assert busiest(8, 0.0, 2, "interleaved") == 1 / 2


def test_a_schedule_trades_waiting_for_memory():
    given = task("Llama-3.1-8B", "8 x H100", "lora", 4096, 32)
    stages = Choice(attention="varlen", is_compiled=True, pipeline=8)
    plain, interleaved = (replace(stages, schedule=name) for name in ("1f1b", "interleaved"))
    times = [speed.step_time(given, choice).bubbles for choice in (plain, interleaved)]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.1)
    sizes = [memory.peak(memory.timeline(given, choice)).memory for choice in (plain, interleaved)]
    assert sizes[0].activations < sizes[1].activations
    alone = memory.peak(memory.timeline(given, replace(stages, pipeline=1))).memory
    assert sizes[0].weights < alone.weights / 4
    assert sizes[0].gathered >= 2 * 32 * 4096 * 4096 * 2  # what a stage will receive, both ways


def test_more_micro_batches_wait_less_for_each_other():
    stages = Choice(attention="varlen", is_compiled=True, pipeline=4)
    shares = []
    for sequences in (8, 32, 128):
        time = speed.step_time(task("Llama-3.1-8B", "4 x H100", "lora", 4096, sequences), stages)
        shares.append(time.bubbles / time.total)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.05


def test_experts_in_their_places_are_not_gathered():
    given = task(MIXTRAL, "8 x H200", "full", 4096, 8)
    sharded = Choice(attention="varlen", is_compiled=True, sharding="zero3", shard=8)
    spread = replace(sharded, expert=8)
    here, there = (memory.timeline(given, choice)[1].memory.gathered for choice in (spread, sharded))
    assert here < there / 5
    assert speed.step_time(given, spread).communication < speed.step_time(given, sharded).communication
