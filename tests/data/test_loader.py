import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data.build import store_of
from tunesmith.data.loader import Loader, PackedDocument, evaluation_batches, micro_batch_of, pack_in_windows
from tunesmith.data.types import Example, Origin
from tunesmith.errors import UserError

LENGTH = 16


def store(sizes, title="data", seed=0):
    """Examples of the given sizes, all different, with some weights that are not 0 or 1."""
    draw = np.random.default_rng(seed)
    examples = []
    for line, size in enumerate(sizes, start=1):
        weights = draw.choice([0, 1, 0.5], size).astype(np.float32)
        weights[-1] = 1
        ids = draw.integers(1, 1000, size).astype(np.int32)
        examples.append(Example(ids, weights, Origin(f"{title}.jsonl", line)))
    return store_of(examples, title)


def loader(stores, weights=None, **options):
    options = {"seed": 3, "sequence_length": LENGTH, "sequences_per_step": 3} | options
    return Loader(stores, weights or [1.0] * len(stores), **options)


def documents(batches):
    """Every document in the micro-batches that counts: origin -> how often."""
    return Counter(
        origin
        for batch in batches
        for origin, start, end in zip(batch.origins, batch.boundaries[:-1], batch.boundaries[1:], strict=True)
        if batch.weights[start:end].sum() > 0
    )


def contents(step):
    """All that a step holds, comparable."""
    return (
        step.step,
        step.epoch,
        step.target_weight,
        step.tokens,
        [(b.tokens.tolist(), b.labels.tolist(), b.weights.tolist(), b.origins) for b in step.micro_batches],
    )


stores = st.lists(
    st.lists(st.integers(2, LENGTH), min_size=1, max_size=25).map(lambda sizes: tuple(sizes)),
    min_size=1,
    max_size=3,
).map(lambda sets: [store(sizes, f"set{n}", n) for n, sizes in enumerate(sets)])


@given(stores, st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_every_example_is_seen_once_per_epoch(sets, seed, per_step, epochs):
    data = loader(sets, seed=seed, sequences_per_step=per_step, epochs=epochs)
    seen = Counter()
    for s in range(data.total_steps):
        seen += documents(data.step(s).micro_batches)
    assert len(seen) == sum(len(part) for part in sets)
    assert set(seen.values()) == {epochs}


@given(stores, st.integers(1, 7), st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_a_step_holds_the_same_for_any_number_of_ranks_and_any_micro_batch(sets, per_step, micro_batch):
    alone = loader(sets, sequences_per_step=per_step, epochs=1.5)
    for ranks in (1, 2, 4):
        shares = [
            loader(sets, sequences_per_step=per_step, epochs=1.5, micro_batch=micro_batch, rank=r, ranks=ranks)
            for r in range(ranks)
        ]
        assert {share.total_steps for share in shares} == {alone.total_steps}
        for s in range(alone.total_steps):
            whole, steps = alone.step(s), [share.step(s) for share in shares]
            dealt = [batch for step in steps for batch in step.micro_batches]
            assert documents(dealt) == documents(whole.micro_batches)
            assert len({len(step.micro_batches) for step in steps}) == 1
            assert all(step.target_weight == whole.target_weight for step in steps)
            assert all(step.tokens == whole.tokens for step in steps)
            assert all(len(batch.tokens) <= micro_batch * LENGTH for batch in dealt)
            assert sum(float(batch.weights.sum()) for batch in dealt) == pytest.approx(whole.target_weight)
            assert whole.target_weight > 0


@given(stores, st.lists(st.sampled_from([0.3, 0.5, 1, 2.25]), min_size=3, max_size=3), st.randoms())
@settings(max_examples=12, deadline=None)
def test_any_step_asked_for_alone_equals_the_one_met_on_the_way(sets, weights, random):
    def fresh():
        return loader(sets, weights[: len(sets)], epochs=2.5, micro_batch=2)

    on_the_way = [contents(step) for step in fresh().iterate()]
    assert len(on_the_way) == fresh().total_steps
    numbers = list(range(len(on_the_way)))
    random.shuffle(numbers)
    data = fresh()
    for s in numbers:
        assert contents(data.step(s)) == on_the_way[s]
    start = random.choice(numbers)
    assert [contents(step) for step in fresh().iterate(start)] == on_the_way[start:]


def test_many_windows_hold_every_example_once(monkeypatch):
    monkeypatch.setattr("tunesmith.data.loader.WINDOW", 2)
    sets = [store([2 + i % 14 for i in range(300)])]
    data = loader(sets, epochs=2)
    seen = sum((documents(step.micro_batches) for step in data.iterate()), Counter())
    assert len(seen) == 300
    assert set(seen.values()) == {2}


def test_windows_fill_their_sequences():
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 8000).astype(np.int64).clip(1, 2048)
    sequences = list(pack_in_windows(lengths, 2048))
    assert len(sequences) > 3 * 256
    assert lengths.sum() > 0.97 * 2048 * len(sequences)


def test_documents_are_not_sorted_by_length(monkeypatch):
    monkeypatch.setattr("tunesmith.data.loader.WINDOW", 32)
    data = loader([store([2 + i % 14 for i in range(2000)])], sequences_per_step=16)
    means = [np.diff(b.boundaries).mean() for s in range(8) for b in [data.step(s)] for b in b.micro_batches]
    halves = np.mean(means[:64]), np.mean(means[64:])
    assert halves[0] == pytest.approx(halves[1], rel=0.25)


def test_epochs_are_cut_where_asked_and_their_ends_are_known():
    sets = [store([LENGTH] * 10)]  # ten sequences an epoch
    data = loader(sets, sequences_per_step=4, epochs=2.5)
    assert data.total_steps == 7  # 25 sequences
    assert data.epoch_ends == (3, 5)
    assert [data.epoch_of(s) for s in range(7)] == [0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.5]
    assert data.step(6).epoch == 2.5
    assert data.step(6).tokens == LENGTH

    data = loader(sets, sequences_per_step=4, steps=6)
    assert data.total_steps == 6
    assert data.epoch_ends == (3, 5)
    assert data.step(5).tokens == 4 * LENGTH
    with pytest.raises(IndexError):
        data.step(6)


def test_tiny_data_for_many_steps_is_ready_at_once():
    data = loader([store([5, 6])], sequences_per_step=8, steps=100_000)
    assert data.total_steps == 100_000
    assert documents(data.step(99_999).micro_batches) == {"data.jsonl, line 1": 8, "data.jsonl, line 2": 8}


def test_epochs_without_any_example_are_passed_over():
    data = loader([store([5])], [0.1], sequences_per_step=1, epochs=25)
    assert data.total_steps == 3
    assert [data.epoch_of(s) for s in range(3)] == [1, 11, 21]


def test_an_idle_rank_gets_a_micro_batch_without_weight():
    sets = [store([LENGTH] * 3)]
    idle = loader(sets, sequences_per_step=3, rank=1, ranks=2).step(0)
    assert [float(batch.weights.sum()) > 0 for batch in idle.micro_batches] == [False, True]
    assert len(idle.micro_batches[0].tokens) == 2


def test_documents_are_laid_end_to_end_with_labels_shifted_within_each():
    batch = micro_batch_of(
        [
            PackedDocument(np.array([5, 6, 7]), np.array([1, 0, 0.5]), 0, "a, line 1"),
            PackedDocument(np.array([8, 9]), np.array([1, 1]), 1, "b, line 4"),
        ]
    )
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9]
    assert batch.labels.tolist() == [0, 7, 0, 9, 0]
    assert batch.weights.tolist() == [0, 0.5, 0, 1, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.boundaries.tolist() == [0, 3, 5]
    assert batch.longest == 3
    assert batch.sources.tolist() == [0, 1]
    assert batch.origins == ("a, line 1", "b, line 4")
    kinds = {name: str(getattr(batch, name).dtype) for name in ("tokens", "labels", "weights", "positions")}
    assert kinds == {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "weights": "torch.float32",
        "positions": "torch.int64",
    }
    assert str(batch.boundaries.dtype) == "torch.int32"


@given(st.lists(st.integers(2, LENGTH), min_size=1, max_size=60), st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_evaluation_sees_everything_once_in_bounded_batches(sizes, micro_batch):
    held_out = store(sizes)
    batches = list(evaluation_batches(held_out, sequence_length=LENGTH, micro_batch=micro_batch, source=2))
    assert documents(batches) == {f"data.jsonl, line {n}": 1 for n in range(1, len(sizes) + 1)}
    assert all(len(batch.tokens) <= micro_batch * LENGTH for batch in batches)
    assert all(set(batch.sources.tolist()) == {2} for batch in batches)
    total = sum(float(batch.weights.sum()) for batch in batches)
    assert total == pytest.approx(float(held_out.target_weights.sum()))


def test_an_error_in_the_thread_reaches_the_caller_and_the_thread_ends():
    others = threading.enumerate()
    data = loader([store([LENGTH] * 30)])
    right = data.step

    def step(s):
        if s == 4:
            raise OSError("the disk is gone")
        return right(s)

    data.step = step
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(batch.step for batch in data.iterate())
    assert seen == [0, 1, 2, 3]
    steps = loader([store([LENGTH] * 30)]).iterate()
    next(steps)
    steps.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader") and thread not in others]


def test_no_examples_is_an_error_for_people():
    with pytest.raises(UserError, match="no examples"):
        loader([])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("lengths", [(True, None), (True, 30), (True, 0), (False, 30)])
def test_micro_batches_by_length_hold_the_same_documents_and_no_more_tokens_than_planned(ranks, lengths):
    one = store([3, 60, 5, 4, 31, 8, 50, 6, 2, 29, 7, 64, 3, 12, 40])
    sizes = {"seed": 0, "sequence_length": 64, "sequences_per_step": 4, "micro_batch": 2}
    packed = Loader([one], [1.0], **sizes)
    dealt = [Loader([one], [1.0], **sizes, rank=rank, ranks=ranks, lengths=lengths) for rank in range(ranks)]
    for step in range(packed.total_steps):
        expected = sorted(origin for one in packed.step(step).micro_batches for origin in one.origins)
        batches = [loader.step(step) for loader in dealt]
        assert len({len(batch.micro_batches) for batch in batches}) == 1
        found = []
        for one in (one for batch in batches for one in batch.micro_batches):
            if one.weights.any():
                found += one.origins
            documents = one.boundaries.diff()
            computed = len(documents) * one.longest if lengths[0] else len(one.tokens)
            assert computed <= 128
            if lengths[1] is not None and one.longest > lengths[1]:
                assert len(documents) == 1
        assert sorted(found) == expected
        assert {batch.target_weight for batch in batches} == {packed.step(step).target_weight}
