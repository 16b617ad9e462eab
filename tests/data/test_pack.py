import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data.pack import fill, pack


@st.composite
def documents(draw):
    capacity = draw(st.integers(1, 300))
    return draw(st.lists(st.integers(1, capacity), max_size=200)), capacity


@given(documents())
@settings(max_examples=200, deadline=None)
def test_every_document_is_packed_once_and_no_sequence_overflows(case):
    lengths, capacity = np.array(case[0], dtype=np.int64), case[1]
    packed = pack(lengths, capacity)
    assert sorted(i for sequence in packed for i in sequence.tolist()) == list(range(len(lengths)))
    for sequence in packed:
        assert len(sequence) > 0
        assert lengths[sequence].sum() <= capacity


@given(documents())
@settings(max_examples=100, deadline=None)
def test_packing_is_best_fit_decreasing(case):
    """Against the textbook: each document, longest first, into the fullest sequence that has room."""
    lengths, capacity = case
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    packed = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(capacity - sum(lengths[i] for i in sequence) for sequence in packed) == sorted(rooms)


@given(documents())
@settings(max_examples=30, deadline=None)
def test_the_same_lengths_give_the_same_sequences(case):
    first, second = pack(np.array(case[0]), case[1]), pack(np.array(case[0], dtype=np.int32), case[1])
    assert [s.tolist() for s in first] == [s.tolist() for s in second]


def test_documents_keep_their_order_within_a_sequence():
    assert [s.tolist() for s in pack(np.array([1, 5, 2]), 8)] == [[0, 1, 2]]


def test_sequences_are_full_on_lengths_like_those_of_real_data():
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 2000).astype(np.int64).clip(1, 2048)
    packed = pack(lengths, 2048)
    assert fill(int(lengths.sum()), len(packed), 2048) > 0.97


def test_a_hundred_thousand_documents_take_no_time():
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 100_000).astype(np.int64).clip(1, 32768)
    start = time.perf_counter()
    pack(lengths, 32768)
    assert time.perf_counter() - start < 2  # measured 0.05 s; quadratic packing would take minutes


@pytest.mark.parametrize(("lengths", "said"), [([3, 9], "document 1 has 9 tokens"), ([3, 0], "document 1 is empty")])
def test_documents_that_cannot_be_packed_are_named(lengths, said):
    with pytest.raises(ValueError, match=said):
        pack(np.array(lengths), 8)


def test_nothing_packs_into_nothing():
    assert pack(np.array([], dtype=np.int64), 8) == []
    assert fill(0, 0, 8) == 0
