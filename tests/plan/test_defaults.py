"""What is proposed from the data's size: enough steps, and a value that is given always wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.errors import UserError
from tunesmith.plan import defaults
from tunesmith.plan.defaults import BATCH_TOKENS, MAX_EPOCHS, MIN_STEPS, DataSize, held_out_records, propose
from tunesmith.plan.hardware import named
from tunesmith.plan.search import search

from .shapes import MODEL, run, why

SMOL, EIGHT = MODEL["SmolLM2-135M"], MODEL["Llama-3.1-8B"]


def counted(examples: int, each: int, longest: int | None = None) -> DataSize:
    return DataSize(examples, examples * each, longest or 2 * each, is_exact=True)


def proposed(size: DataSize | None, limit: int = 2048, width: int = 576, **settings):
    said: list[tuple[str, str, str]] = []
    amount = propose(run(**settings), width, limit, size, lambda *one: said.append(tuple(map(str, one))))
    return amount, {topic: f"{choice}; {reason}" for topic, choice, reason in said}


@given(
    examples=st.integers(1, 10**7),
    each=st.integers(4, 4000),
    share=st.floats(1, 30),
    limit=st.sampled_from([512, 2048]),
)
def test_every_set_gets_enough_steps_or_as_many_epochs_as_there_may_be(examples, each, share, limit):
    each = min(each, limit)
    longest = min(limit, int(each * share))
    amount, said = proposed(counted(examples, each, longest), limit)
    batch = amount.sequence_length * amount.sequences
    steps = examples * each * amount.epochs / batch
    assert steps >= 0.9 * MIN_STEPS or amount.epochs == MAX_EPOCHS
    assert amount.epochs <= MAX_EPOCHS
    assert longest <= amount.sequence_length <= limit, "nothing is cut that was not cut before"
    assert batch <= max(BATCH_TOKENS[1], limit)
    assert said["batch"]
    assert said["epochs"]
    if amount.steps is not None and amount.steps < MIN_STEPS:
        assert "learns little" in said["steps"]


def test_a_small_set_learns_and_a_large_one_uses_the_device():
    small, _ = proposed(counted(440, 90))
    assert small.sequence_length * small.sequences == 512
    assert (small.steps or 0) >= MIN_STEPS
    middle, _ = proposed(counted(886, 200, 742))
    assert middle.epochs == 1, "what one pass teaches is not learned by heart in a second"
    large, _ = proposed(counted(200_000, 500))
    assert large.sequence_length * large.sequences == 65536
    assert large.epochs == 1


def test_a_value_that_is_given_wins():
    amount, said = proposed(counted(440, 90), batch_tokens=16384, epochs=1, learning_rate=7e-5)
    assert (amount.sequence_length * amount.sequences, amount.epochs, amount.learning_rate) == (16384, 1, 7e-5)
    assert "smaller batch_tokens makes more steps" in said["steps"], "and what few steps mean is said"
    amount, said = proposed(counted(440, 90), steps=7)
    assert amount.steps == 7
    assert "epochs" not in said


def test_a_batch_smaller_than_a_sequence_packs_shorter_ones_where_no_example_is_cut_by_that():
    amount, _ = proposed(counted(440, 90, 180), batch_tokens=512)
    assert (amount.sequence_length, amount.sequences) == (512, 1)
    with pytest.raises(UserError, match="batch_tokens is 512, less than the 1536 of the longest example"):
        proposed(counted(440, 90, 1500), batch_tokens=512)
    amount, _ = proposed(counted(440, 90, 1500))
    assert (amount.sequence_length, amount.sequences) == (1536, 1)


def test_a_narrow_model_has_a_higher_rate_and_adapters_ten_times_that_of_all_weights():
    rates = [proposed(None, width=width)[0].learning_rate for width in (576, 2048, 4096, 16384)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] == 2e-4
    assert proposed(None, width=4096, method="full")[0].learning_rate == 2e-5
    assert proposed(None, width=4096, optimizer="lion")[0].learning_rate < 1e-4
    rates = [proposed(None, width=4096, method="full", optimizer=one)[0].learning_rate for one in ("adamw", "galore")]
    assert rates[1] == pytest.approx(4 * rates[0])


def test_without_knowledge_of_the_data_the_plan_says_that_it_is_still_to_be_decided():
    amount, said = proposed(None)
    assert amount.steps is None
    assert "not known yet" in said["batch"]
    assert "not known yet" in said["epochs"]


def test_the_plan_holds_what_was_decided_and_the_machine_has_no_say():
    size = counted(886, 200, 742)
    plans = [search(run(), SMOL, named(where), size=size).plan for where in ("H200", "8 x A100-80G", "RTX 4090")]
    assert len({(p.sequence_length, p.sequences_per_step, p.epochs, p.learning_rate) for p in plans}) == 1
    assert "886 examples with 177,200 tokens" in why(plans[0], "batch")


@pytest.mark.parametrize(
    ("settings", "records", "held_out"),
    [
        ({}, [99], 0),
        ({}, [99, 50], 0),
        ({}, [100], 5),
        ({}, [440, 50], 22),
        ({}, [10**6], defaults.HELD_OUT_MOST),
        ({"eval": "e.jsonl"}, [1000], 0),
        ({"eval": "e.jsonl", "held_out": 10}, [1000], 10),
        ({"held_out": 0}, [1000], 0),
        ({"held_out": 0.1}, [50, 50], 10),
        ({"held_out": 7}, [50], 7),
    ],
)
def test_a_small_share_is_held_out_by_itself_and_none_of_tiny_sets(settings, records, held_out):
    assert held_out_records(run(**settings), records) == held_out


def test_more_records_than_there_are_cannot_be_held_out():
    with pytest.raises(UserError, match="held_out asks for 60 records, and the training data have 50"):
        held_out_records(run(held_out=60), [50])
