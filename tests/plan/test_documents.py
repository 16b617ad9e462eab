"""What data files tell before they are tokenized."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tunesmith.config.schema import Dataset
from tunesmith.plan import documents
from tunesmith.plan.facts import PairedWork, Rows
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import named
from tunesmith.plan.search import search

from .shapes import MODEL, run, why


def with_data(*paths, **settings):
    return run(**settings).model_copy(update={"data": [Dataset(path=str(path)) for path in paths]})


def test_tokens_are_known_from_steps_or_guessed_from_files(tmp_path):
    smol, where = MODEL["SmolLM2-135M"], named("H200")
    counted = run(steps=10)
    plan = search(counted, smol, where).plan
    assert documents.total_tokens(counted, plan, None) == (163840, "10 steps")
    assert documents.total_tokens(run(), plan, documents.measure(run())) is None
    file = tmp_path / "d.jsonl"
    file.write_text("x" * 9000)
    guessed = with_data(file, epochs=2)
    size = documents.measure(guessed)
    plan = search(guessed, smol, where, size=size).plan
    assert documents.total_tokens(guessed, plan, size) == (4000, "the size of the files, roughly")


def test_lengths_come_from_the_lines_of_a_folder_and_of_no_other_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("x" * 449 + "\n" + "y" * 899 + "\n\n")
    (tmp_path / "README.md").write_text("z" * 10_000)
    assert documents.sample_lengths(with_data(tmp_path)) == (100, 200)
    text = tmp_path / "t.txt"
    text.write_text("a long text")
    assert documents.sample_lengths(with_data(tmp_path, text)) == ()
    assert documents.sample_lengths(run()) == ()


def test_a_large_file_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SAMPLE", 4500)
    (tmp_path / "a.jsonl").write_text(("x" * 449 + "\n") * 100)
    assert len(documents.sample_lengths(with_data(tmp_path / "a.jsonl"))) == 10


@pytest.mark.parametrize(
    ("lengths", "mean"), [((), 1000), ((100, 100), 100), ((100, 300), 250), ((5000,), 1000), ((1000, 1, 1), 998)]
)
def test_the_mean_is_over_tokens_and_within_sequences(lengths, mean):
    assert documents.mean_length(lengths, 1000) == mean


def test_short_documents_make_a_plan_quicker_and_are_a_reason():
    wanted = run(sequence_length=16384, batch_tokens=65536)
    long = search(wanted, MODEL["Llama-3.1-8B"], named("H200")).plan
    short = search(wanted, MODEL["Llama-3.1-8B"], named("H200"), lengths=(300, 500)).plan
    assert short.tokens_per_second > 1.2 * long.tokens_per_second
    assert short.memory == long.memory
    assert why(short, "documents").startswith("about 425 tokens")


def test_padded_micro_batches_are_of_like_length_and_bounded():
    lengths = [700, 3, 650, 5, 4, 690, 120, 110, 6]
    groups = documents.like_lengths(lengths, 2048)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert groups[0][:2] == [0, 5]
    assert all(len(group) * lengths[group[0]] <= 2048 for group in groups)
    computed = sum(len(group) * lengths[group[0]] for group in groups)
    assert computed < 1.25 * sum(lengths)
    guessed = documents.guessed(lengths, 1024, 4096, sides=1)
    assert guessed.padding(2048) == pytest.approx(computed / sum(lengths))
    assert guessed.micro_batches(2048, 1) == len(groups)
    assert documents.like_lengths([5, 9, 5], 64, alone=6) == [[1], [0, 2]]
    assert documents.like_lengths([], 64) == []


@pytest.mark.parametrize("count_of_sides", [1, 2])
def test_no_other_way_to_cut_a_step_into_padded_micro_batches_is_cheaper(count_of_sides):
    """Of those that keep an order of lengths; with two sides, in the best of their orders."""
    chance = random.Random(count_of_sides)
    for _ in range(20):
        sides = [tuple(chance.randint(1, 40) for _ in range(count_of_sides)) for _ in range(8)]
        tokens = 96

        def cost(groups, sides=sides, tokens=tokens) -> float:
            padded = [
                len(one) * sum(max(side) for side in zip(*(sides[i] for i in one), strict=True)) for one in groups
            ]
            fits = all(size <= tokens or len(one) == 1 for size, one in zip(padded, groups, strict=True))
            return sum(padded) + documents.START * tokens * len(groups) if fits else math.inf

        keys = [
            lambda i, sides=sides: sides[i][0],
            lambda i, sides=sides: sides[i][-1],
            lambda i, sides=sides: sum(sides[i]),
        ]
        orders = [sorted(range(8), key=lambda i, key=key: (-key(i), [-one for one in sides[i][::-1]])) for key in keys]
        cuts = [cut for count in range(8) for cut in itertools.combinations(range(1, 8), count)]
        ways = [[order[a:b] for a, b in itertools.pairwise((0, *cut, 8))] for order in orders for cut in cuts]
        assert cost(documents.like_lengths(sides, tokens)) == min(map(cost, ways))


@pytest.mark.parametrize("count_of_sides", [1, 2])
def test_no_micro_batch_needs_more_than_those_that_a_plan_looked_at(count_of_sides):
    """Of steps that it did not look at, too, whose micro-batches keep to what those had at most."""
    chance = random.Random(count_of_sides)

    def step() -> np.ndarray:
        return np.array([[chance.randint(1, 60) for _ in range(count_of_sides)] for _ in range(9)])

    def needs(rows: int, *sides: int) -> tuple[int, int]:
        pairs = sum(one * other for one, other in itertools.combinations_with_replacement(sides, 2))
        return rows * sum(sides), rows * pairs

    for _ in range(20):
        seen, unseen, tokens = [step() for _ in range(2)], [step() for _ in range(4)], 200
        every = np.concatenate([*seen, *unseen])
        known = documents.Padded(tuple(seen), documents.outermost(every))
        most = known.most(tokens)
        largest = [needs(*shape) for shape in known.largest(tokens)]
        if count_of_sides == 1:  # both at once
            assert any(own >= most[0] and pairs >= most[1] for own, pairs in largest)
        for documents_of_step in [*seen, *unseen]:
            groups = documents.like_lengths(documents_of_step.tolist(), tokens, most=most)
            assert sorted(itertools.chain(*groups)) == list(range(9))
            for group in groups:
                own = needs(len(group), *documents_of_step[group].max(axis=0).tolist())
                assert all(
                    one <= max(limit, *(other[at] for other in largest))
                    for at, (one, limit) in enumerate(zip(own, most, strict=True))
                )
        for looked_at in seen:  # and these are cut as they were
            ways = [documents.like_lengths(looked_at.tolist(), tokens, most=one) for one in (most, None)]
            assert ways[0] == ways[1]


def test_an_encoder_decoder_is_planned_by_its_micro_batches():
    """Memory and time as they were counted, for the lengths of the data."""
    sizes = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "vocab_size": 32128}
    a_token = Rows(terms=(2e6, 2e6, 0, 0, 0, 0))
    counted = {name: Rows(terms=(0,) * 6) for name in PairedWork.model_fields if name not in ("width", "kept")}
    counted["kernels"] = Rows(terms=(0, 0, 0, 0, 0, 1e6))
    facts = from_config({"model_type": "t5", **sizes}).changed(paired=PairedWork(kept=a_token, **counted, width=2))
    asked = run(method="full", sequence_length=1024, batch_tokens=4096)
    plans = {
        length: search(asked, facts, named("1xH100"), draw=lambda _, length=length: _steps_of(length)).plan
        for length in (16, 512)
    }
    kept = {length: plan.memory.activations for length, plan in plans.items()}
    assert kept[512] == pytest.approx(2e6 * 4096, rel=0.01)
    assert kept[16] == pytest.approx(2e6 * 64, rel=0.01)
    assert plans[512].memory.gradients > 0  # of the micro-batches before
    assert plans[16].time.host == pytest.approx(plans[512].time.host, rel=0.1)
    assert plans[512].time.host > 5  # a million kernels


def _steps_of(length: int) -> documents.Padded:
    """Two pairs in a micro-batch, of texts of so many tokens, or as many as there is room for."""
    step = np.array([[length, length]] * (4 if length > 100 else 2))
    return documents.Padded((step,), step[:1], is_every=True)


def test_answers_to_a_prompt_are_rows_of_their_own():
    known = documents.Padded((np.array([[80], [60]]),), np.array([[80]]), rows=2)
    assert known.shapes(1000) == (((4, 40),),)
    assert known.largest(1000) == ((4, 40),)
    assert known.padding(1000) == pytest.approx(160 / 140)


def test_where_no_lengths_are_known_all_may_be_the_longest():
    unknown = documents.guessed((), 64, 256, sides=1)
    assert unknown.largest(256) == ((4, 64),)
    assert unknown.most(256) is None
    assert {
        rows * (read + written) for rows, read, written in documents.guessed((), 64, 256, sides=2).largest(256)
    } == {256}


def test_the_plan_of_a_model_that_does_not_pack_knows_its_padding(tmp_path):
    """Time by the tokens that are computed, and the attention's memory by the longest document."""
    lines = [("x" * (4500 if n % 10 == 0 else 90 * (n % 7 + 1))) + "\n" for n in range(300)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    asked = with_data(tmp_path / "data.jsonl")
    lengths = documents.sample_lengths(asked)
    facts = MODEL["Llama-3.1-8B"].changed(has_fused_attention=False)
    packed, padded = (
        search(asked, facts.changed(packs=packs), named("1xH100"), lengths=lengths).plan for packs in (True, False)
    )
    assert padded.by_length
    assert not padded.is_compiled
    assert not packed.by_length
    step = padded.sequences_per_step * padded.sequence_length
    known = documents.guessed(lengths, padded.sequence_length, step, sides=1)
    share = known.padding(padded.micro_batch * padded.sequence_length)
    assert 1 < share < 1.3
    assert padded.time.matmuls == pytest.approx(share * packed.time.matmuls, rel=0.3)
    assert padded.most_padded == known.most(padded.micro_batch * padded.sequence_length)
    assert packed.most_padded is None
    assert any(reason.choice == "padded" and "more tokens" in reason.why for reason in padded.reasons)
