"""Pairs with their prompts once: nothing of a pair is lost, and every document still sees all of its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.data.build import store_of
from tunesmith.data.loader import documents_of, idle, micro_batch_of
from tunesmith.data.store import SHARED, TokenStore
from tunesmith.data.types import Example, Origin


def pair_of(prompt: int, chosen: list[int], rejected: list[int], line: int = 1, *, is_scored: bool = False) -> Example:
    """Answers of these tokens to a prompt of so many; where answers are scored, every token has a weight."""
    asked = np.arange(100, 100 + prompt)
    ids = [np.concatenate([asked, answer]).astype(np.int32) for answer in (chosen, rejected)]
    weights = [np.ones(len(one)) if is_scored else np.repeat([0.0, 1.0], [prompt, len(one) - prompt]) for one in ids]
    both = (np.concatenate(some) for some in (ids, weights))
    return Example(*both, Origin("d", line), tuple(map(len, ids)), (1.0, 0.0))


def seen_by(store: TokenStore, index: int) -> list[list[int]]:
    """The tokens that each document of an example sees in a micro-batch, which has another example before it."""
    documents = [one for i in (0, index) for one in documents_of(store, i, 0)]
    batch = micro_batch_of(documents)
    if batch.keys is None:
        return [batch.tokens[a:b].tolist() for a, b in zip(batch.boundaries[2:-1], batch.boundaries[3:], strict=True)]
    tokens = batch.tokens[batch.key_places].tolist()
    return [tokens[a:b] for a, b in zip(batch.keys[2:-1].tolist(), batch.keys[3:].tolist(), strict=True)]


answers = st.lists(st.integers(0, 2), min_size=1, max_size=12)
pairs = st.tuples(st.integers(1, 20), answers, answers, st.booleans())


@given(st.lists(pairs, min_size=2, max_size=6))
def test_a_document_sees_what_it_saw_and_predicts_what_it_predicted(made):
    store = store_of([pair_of(*one[:3], line, is_scored=one[3]) for line, one in enumerate(made, start=1)])
    once = store.sharing()
    for index in range(1, len(store)):
        before, after = (documents_of(one, index, 0) for one in (store, once))
        assert seen_by(once, index) == [one.ids.tolist() for one in before]
        for whole, own in zip(before, after, strict=True):
            assert own.shared == 0 or own.shared >= SHARED
            assert own.ids.tolist() == whole.ids[own.shared :].tolist()
            assert len(own.ids) >= 1
            if not made[index][3]:  # its targets are all its own, and none of them is its first token
                assert own.weights[1:].sum() == whole.weights[1:].sum()
    assert once.lengths.sum() + once.shared_tokens == store.lengths.sum()


def test_positions_go_on_behind_what_is_shared_and_labels_are_its_own():
    store = store_of([pair_of(10, [1, 2], [3, 4, 5])]).sharing()
    batch = micro_batch_of(documents_of(store, 0, 0))
    assert batch.boundaries.tolist() == [0, 12, 16]
    assert batch.tokens[12:].tolist() == [109, 3, 4, 5]
    assert batch.positions[12:].tolist() == [9, 10, 11, 12]
    assert batch.labels[12:15].tolist() == [3, 4, 5]
    assert batch.weights[12:].tolist() == [1, 1, 1, 0]
    assert batch.longest == 13
    assert micro_batch_of([idle(documents_of(store, 0, 0)[1])]).keys is None


@pytest.mark.parametrize(
    ("example", "shared"),
    [
        (pair_of(SHARED - 1, [1], [2]), 0),
        (pair_of(SHARED + 1, [1], [2]), SHARED),
        (pair_of(20, [1, 2, 3], [1, 2, 4]), 19),
        (pair_of(20, [1, 2, 3], [1, 2, 4], is_scored=True), 22),
        (pair_of(20, [1, 2], [1, 2], is_scored=True), 21),
    ],
    ids=["too short", "prompt", "answers that begin alike", "the same, scored", "equal answers, scored"],
)
def test_how_much_is_shared(example, shared):
    assert store_of([example]).sharing().shared_tokens == shared


def test_a_store_of_single_documents_and_one_that_shares_already_stay_as_they_are():
    single = store_of([Example(np.arange(9, dtype=np.int32), np.ones(9, np.float32), Origin("d", 1))])
    assert single.sharing() is single
    once = store_of([pair_of(20, [1], [2]), pair_of(30, [1], [2], 2)]).sharing()
    assert once.sharing() is once
    second = once.part(np.array([False, True]), "second")
    assert second.shared_tokens == 29
