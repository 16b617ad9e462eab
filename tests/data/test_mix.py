from collections import Counter
from math import ceil, floor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data.mix import epoch_order, permutation

data_sets = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 350).map(lambda w: w / 100)), max_size=4)
seeds = st.integers(0, 2**63 - 1)


def seen(counts, weights, seed, epoch):
    sources, indices = epoch_order(counts, weights, seed, epoch)
    assert sources.dtype == np.int32
    assert indices.dtype == np.int64
    return Counter(zip(sources.tolist(), indices.tolist(), strict=True))


@given(data_sets, seeds, st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_each_example_is_seen_as_often_as_its_weight_says(sets, seed, epoch):
    counts, weights = [c for c, _ in sets], [w for _, w in sets]
    times = seen(counts, weights, seed, epoch)
    for source, (count, weight) in enumerate(sets):
        each = [times.pop((source, i), 0) for i in range(count)]
        assert all(n in (floor(weight), floor(weight) + 1) for n in each)
        assert abs(sum(each) - weight * count) < 1 + 1e-6
    assert not times


@given(st.integers(1, 60), st.integers(1, 99), seeds, st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_fraction_takes_new_examples_until_all_were_seen(count, percent, seed, epoch):
    together = Counter()
    epochs = ceil(100 / percent)
    for e in range(epoch, epoch + epochs):
        together += seen([count], [percent / 100], seed, e)
    assert set(together) == {(0, i) for i in range(count)}
    assert max(together.values()) <= 2


@given(data_sets, seeds, st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_the_order_depends_on_the_arguments_alone(sets, seed, epoch):
    counts, weights = [c for c, _ in sets], [w for _, w in sets]
    first = epoch_order(counts, weights, seed, epoch)
    np.random.seed(1)
    np.random.random(3)
    second = epoch_order(counts, weights, seed, epoch)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_epochs_and_seeds_differ_and_data_sets_are_interleaved():
    def order(seed, epoch):
        return epoch_order([50, 50], [1, 1], seed, epoch)

    orders = {tuple(order(seed, epoch)[1].tolist()) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    sources = order(0, 0)[0]
    assert 20 < (np.diff(sources) != 0).sum() < 80


def test_the_order_stays_what_it_was():
    """A resumed run must see the same order after an upgrade of numpy: these numbers may never change."""
    assert permutation(8, 7, 1, 2).tolist() == [2, 3, 4, 5, 7, 1, 0, 6]
    sources, indices = epoch_order([3, 4], [1, 1.5], seed=5, epoch=1)
    assert sources.tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 1]
    assert indices.tolist() == [0, 3, 1, 1, 0, 2, 2, 2, 3]
