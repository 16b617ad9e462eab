"""What is held out of the training data: by content, whole records, never on both sides."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data.build import store_of
from tunesmith.data.held_out import in_proportion, split
from tunesmith.data.store import TokenStore
from tunesmith.data.types import Example, Origin


def store(contents: list[int], title: str = "data", each: int = 1) -> TokenStore:
    """Of one example for each content, `each` of them from a record."""
    return store_of(
        [
            Example(
                [1, 2, content >> 8, content & 255], [0.0, 1.0, 1.0, 1.0], Origin(title, 1 + number // each, "line")
            )
            for number, content in enumerate(contents)
        ],
        title,
    )


def contents(one: TokenStore) -> list[tuple[int, ...]]:
    return [tuple(one.example(i)[0].tolist()) for i in range(len(one))]


def test_nothing_is_held_out_where_nothing_is_asked_for():
    data = [store(list(range(10)))]
    kept, held = split(data, 0)
    assert kept == data
    assert held == []


@settings(max_examples=15, deadline=None)
@given(
    sets=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=250), min_size=1, max_size=3),
    count=st.integers(1, 60),
    each=st.integers(1, 3),
)
def test_what_is_held_out_is_nowhere_trained_on_and_no_record_is_torn(sets, count, each):
    stores = [store(one, f"set {i}", each) for i, one in enumerate(sets)]
    kept, held = split(stores, count)
    trained = {content for one in kept for content in contents(one)}
    assert not trained & {content for one in held for content in contents(one)}
    assert sum(map(len, (*kept, *held))) == sum(map(len, stores)), "and nothing is lost"
    assert all(len(one) for one in kept)
    for i, one in enumerate(kept):
        mine = next((other for other in held if other.title == f"set {i} (held out)"), None)
        if mine is not None:
            assert not np.isin(one.records, mine.records).any()


def test_the_choice_is_by_content_alone_so_that_losses_of_runs_compare():
    numbers = list(range(400))
    _, (first,) = split([store(numbers)], 20)
    _, (transposed,) = split([store(numbers[::-1], "other name")], 20)
    assert len(first) == 20
    assert set(contents(first)) == set(contents(transposed))
    _, (more,) = split([store(numbers)], 30)
    assert set(contents(first)) < set(contents(more))


def test_small_sets_beside_large_ones_are_left_whole():
    small, large = store(list(range(30)), "small"), store(list(range(20, 500)), "large")
    kept, (held,) = split([small, large], 40)
    assert kept[0] is small
    assert held.title == "large (held out)"
    assert not set(contents(held)) & set(contents(small))


def test_a_part_has_a_report_and_a_fingerprint_of_its_own():
    data = store(list(range(200)))
    (kept,), (held,) = split([data], 10)
    assert (kept.report.records, held.report.records) == (190, 10)
    assert kept.report.tokens + held.report.tokens == data.report.tokens
    assert kept.report.target_tokens + held.report.target_tokens == data.report.target_tokens
    assert len({data.fingerprint, kept.fingerprint, held.fingerprint}) == 3
    (again,), _ = split([store(list(range(200)))], 10)
    assert again.fingerprint == kept.fingerprint


def test_held_out_data_beyond_a_tenth_of_what_is_trained_on_are_sampled_from_every_set_and_always_alike():
    sets = [store(list(range(1000)), "large"), store(list(range(1000, 1100)), "small")]
    whole = sum(int(one.lengths.sum()) for one in sets)
    assert in_proportion(sets, 10 * whole) == sets
    sample, again = in_proportion(sets, 5 * whole), in_proportion(sets, 5 * whole)
    assert [len(one) for one in sample] == [200, 20]
    assert [one.title for one in sample] == ["large", "small"]
    assert [contents(one) for one in sample] == [contents(one) for one in again]
    assert [len(one) for one in in_proportion(sets, 1)] == [15, 2], "however short a training is"
    few = [store(list(range(16)))]
    assert in_proportion(few, 1) == few


def test_a_sample_is_spread_over_the_set_and_over_whatever_takes_turns_in_it():
    (sample,) = in_proportion([store(list(range(1000)))], 10_000)
    numbers = [tokens[2] * 256 + tokens[3] for tokens in contents(sample)]
    assert len(numbers) == 100
    for turns in (2, 3, 4, 5, 10):
        assert min(np.bincount([number % turns for number in numbers])) >= 100 // turns - 4
    assert min(np.histogram(numbers, 10, (0, 1000))[0]) >= 8
