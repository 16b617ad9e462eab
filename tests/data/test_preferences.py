"""Preferences in the shapes people have them, and that a pair is never torn apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Dataset
from tunesmith.data.build import store_of
from tunesmith.data.chat import Encoder
from tunesmith.data.convert import convert
from tunesmith.data.loader import Loader
from tunesmith.data.preferences import encode, mismatched
from tunesmith.data.recognise import recognise
from tunesmith.data.store import shortened
from tunesmith.data.types import Completion, Example, Judged, Origin, Preference, Record
from tunesmith.errors import UserError
from tunesmith.objectives import OBJECTIVES

ORIGIN = Origin("d.json", 3)
ASK = {"role": "user", "content": "Hi?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes", "No"))
TURN = [{"role": "user", "content": "First"}, {"role": "assistant", "content": "Once"}]
PARTS = ("prompt", "chosen", "rejected")
SHAPES = {
    "texts": {"prompt": "Hi?", "chosen": "Yes", "rejected": "No"},
    "messages": {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
    "text and messages": {"prompt": "Hi?", "chosen": [YES], "rejected": [NO]},
    "whole conversations": {"chosen": [ASK, YES], "rejected": [ASK, NO]},
    "whole conversations and their prompt": {"prompt": "Hi?", "chosen": [ASK, YES], "rejected": [ASK, NO]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "Yes"},
        "rejected": {"from": "gpt", "value": "No"},
    },
    "whole conversations and their beginning": {"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]},
    "conversations without their prompt's system message": {
        "prompt": [{"role": "system", "content": "Be brief."}, ASK],
        "chosen": [ASK, YES],
        "rejected": [ASK, NO],
    },
    "dialogues": {"chosen": "\n\nHuman: Hi?\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi?\n\nAssistant: No"},
    "dialogues and their prompt": {
        "prompt": "\n\nHuman: Hi?\n\nAssistant:",
        "chosen": "\n\nHuman: Hi?\n\nAssistant: Yes",
        "rejected": "\n\nHuman: Hi?\n\nAssistant: No",
    },
    "messages in columns of text": {name: json.dumps([one]) for name, one in zip(PARTS, (ASK, YES, NO), strict=True)},
    "question": {"question": "Hi?", "chosen": "Yes", "rejected": "No"},
    "instruction": {"instruction": "Hi?", "input": "", "chosen": "Yes", "rejected": "No"},
    "earlier turns": {"chosen": [*TURN, ASK, YES], "rejected": [*TURN, ASK, NO]},
    "system": {"system": "Be brief", "prompt": "Hi?", "chosen": "Yes", "rejected": "No"},
}


def converted(fields, records="pairs"):
    record = Record(fields, ORIGIN)
    dataset = Dataset(path="d")
    return convert(record, recognise([record], dataset, records), dataset)


def said(answer) -> tuple[str, str]:
    """What is asked last, and what is answered, of which alone anything is learned."""
    if isinstance(answer, Completion):
        return answer.prompt, answer.completion
    *before, last = answer.messages
    assert all(message.weight == 0 for message in before if message.role == "assistant")
    assert (last.role, last.weight) == ("assistant", None)
    return before[-1].content, last.content


@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_recognised_in_the_shapes_people_have(shape):
    found = converted(SHAPES[shape])
    assert isinstance(found, Preference)
    assert (said(found.chosen), said(found.rejected)) == (("Hi?", "Yes"), ("Hi?", "No"))
    if shape == "system":
        assert found.chosen.messages[0].content == "Be brief"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Hi?", "completion": "Yes", "label": True},
        {"prompt": [ASK], "completion": [YES], "label": 1},
        {"messages": [*TURN, ASK, YES], "label": True},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes"}], "label": "true"},
        {"question": "Hi?", "response": "Yes", "label": True},
        {"prompt": "Hi?", "completion": "Yes", "label": "1"},
        {"prompt": "Hi?", "completion": "Yes", "label": "desirable"},
    ],
)
def test_judged_answers_are_recognised(fields):
    found = converted(fields, "judged")
    assert isinstance(found, Judged)
    assert found.is_desirable
    assert said(found.answer) == ("Hi?", "Yes")


@pytest.mark.parametrize("records", ["pairs", "judged", "ranked", "labelled", "prompts"])
@pytest.mark.parametrize(
    ("asked", "question"),
    [
        ({"instruction": "Say it", "input": "in German"}, "Say it\n\nin German"),
        ({"question": "Who?", "context": "It was Ann."}, "It was Ann.\n\nWho?"),
        ({"messages": [{"role": "user", "content": "Who?"}]}, "Who?"),
    ],
)
def test_what_belongs_to_a_question_is_read_with_it(records, asked, question):
    answered = {"response": "Yes", "label": True, "score": 1}
    found = converted(asked | ({"chosen": "Yes", "rejected": "No"} if records == "pairs" else answered), records)
    if records == "prompts":
        assert found.messages[-1].content == question
    else:
        answer = getattr(found, {"pairs": "chosen", "judged": "answer"}.get(records, "text"))
        assert said(answer) == (question, "Yes")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": "Yes"}, "are the same, which prefers nothing"),
        ({"chosen": [ASK, YES], "rejected": [ASK, YES]}, "are the same, which prefers nothing"),
        ({"prompt": "Hi?", "chosen": "Yes", "rejected": ""}, "`rejected` is empty"),
        ({"prompt": "Hi?", "chosen": None, "rejected": "No"}, "`chosen` is null; an answer is needed"),
        ({"chosen": "Yes", "rejected": "No"}, "a text without a `prompt` before it"),
        ({"chosen": [ASK, YES], "rejected": [{**ASK, "content": "Other?"}, NO]}, "the same up to an assistant turn"),
        ({"messages": [ASK, YES]}, "trained on pairs of answers"),
        (
            {"prompt": str([ASK]), "chosen": str([YES]), "rejected": str([NO])},
            "`prompt` holds messages as Python writes",
        ),
        ({"prompt": "Bye?", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "not one that begins with the prompt beside"),
        (
            {"prompt": "Bye?", "chosen": "Human: Hi?\n\nAssistant: Yes", "rejected": "Human: Hi?\n\nAssistant: No"},
            "not one that begins with the prompt beside",
        ),
        ({"prompt": TURN, "chosen": [ASK, YES], "rejected": [ASK, NO]}, "not one that begins with the prompt beside"),
    ],
)
def test_what_is_no_pair_is_refused_in_a_sentence(fields, why):
    with pytest.raises(UserError, match=why) as found:
        converted(fields)
    assert str(found.value).startswith("d.json, line 3: ")


def test_an_answer_that_is_json_to_a_plain_question_stays_text():
    found = converted({"prompt": "As JSON?", "chosen": json.dumps([YES]), "rejected": "No"})
    assert said(found.chosen) == ("As JSON?", json.dumps([YES]))


def test_a_label_that_is_no_label_is_refused():
    with pytest.raises(UserError, match="`label` must be true or false, found 3"):
        converted({"prompt": "a", "completion": "b", "label": 3}, "judged")
    with pytest.raises(UserError, match="does not end with an answer"):
        converted({"messages": [ASK, YES, ASK], "label": True}, "judged")


SIZES = st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=12)


def pair(index: int, sizes: tuple[int, int]) -> Example:
    ids = np.concatenate([np.arange(n) + 1000 * index + 500 * answer for answer, n in enumerate(sizes)])
    weights = np.ones(sum(sizes), dtype=np.float32)
    return Example(ids, weights, Origin("d", index + 1), sizes, (1.0, 0.0))


@settings(max_examples=30, deadline=None)
@given(
    sizes=SIZES,
    length=st.integers(8, 30),
    micro_batch=st.integers(1, 3),
    ranks=st.integers(1, 3),
    is_padded=st.booleans(),
)
def test_a_pair_is_never_torn_apart(sizes, length, micro_batch, ranks, is_padded):
    """In no micro-batch of no rank, and every one is there once."""
    store = store_of([pair(i, both) for i, both in enumerate(sizes)], sequence_length=length)
    options = {"sequence_length": length, "sequences_per_step": 2, "micro_batch": micro_batch, "ranks": ranks}
    lengths = (True, None) if is_padded else None
    seen = []
    for rank in range(ranks):
        loader = Loader([store], [1.0], seed=1, **options, rank=rank, lengths=lengths, objective=OBJECTIVES["dpo"])
        for step in range(loader.total_steps):
            for batch in loader.step(step).micro_batches:
                firsts = batch.tokens[batch.boundaries[:-1].long()].tolist()
                counted = [one for one, part in zip(firsts, batch.parts.tolist(), strict=True) if part >= 0]
                assert batch.parts.tolist() in ([-1], [0, 1] * (len(counted) // 2))
                assert [one + 500 for one in counted[::2]] == counted[1::2]
                seen += counted[::2]
                assert batch.tokens.shape[0] <= length * micro_batch
    assert sorted(seen) == [1000 * i for i in range(len(sizes))]


def test_a_pair_that_is_too_long_loses_the_end_of_its_longest_answer():
    store = store_of([pair(0, (4, 9)), pair(1, (9, 9))], sequence_length=10)
    assert [[len(store.document(d)[0]) for d in store.documents(i)] for i in (0, 1)] == [[4, 6], [5, 5]]
    assert store.report.truncated == 2
    assert store_of([pair(0, (4, 9)), pair(1, (4, 6))], sequence_length=10, too_long="drop").report.examples == 1


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5), room=st.integers(5, 100))
def test_what_is_shortened_fits_and_no_more_than_needed_is_cut(sizes, room):
    made = shortened(np.array(sizes), room)
    assert made.sum() == min(room, sum(sizes))
    assert all(0 < after <= before for before, after in zip(sizes, made, strict=True))
    whole = made == np.array(sizes)
    assert whole.all() or np.ptp(made[~whole]) <= 1


def test_mismatched_answers_belong_to_other_prompts():
    examples = []
    for i in range(7):
        ids = np.array([100 + i, 200 + i, 300 + i, 400 + i])
        examples.append(Example(ids, np.array([0, 0, 1, 1], dtype=np.float32), Origin("d", i + 1), values=(1.0,)))
    made = mismatched(store_of(examples), 64)
    assert len(made) == 7
    for i in range(7):
        ids, weights, _ = made.example(i)
        assert ids[:2].tolist() == [100 + i, 200 + i]
        assert ids[2] - 300 == ids[3] - 400 != i
        assert weights.tolist() == [0, 0, 1, 1]


def test_a_store_of_pairs_is_known_by_which_answer_is_chosen():
    one = pair(0, (4, 9))
    other = Example(one.ids, one.weights, one.origin, one.sizes, (0.0, 1.0))
    assert store_of([one]).fingerprint != store_of([other]).fingerprint


def test_pairs_that_are_dropped_for_their_length_are_said_with_what_helps(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    from tunesmith.config.schema import Run
    from tunesmith.data.prepare import prepare

    records = [{"prompt": "Hi?", "chosen": "yes " * n, "rejected": "no " * n} for n in (2, 40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"objective": "dpo", "data": str(tmp_path / "pairs.jsonl"), "sequence_length": 128, "too_long": "drop"}
    run = Run(model=str(tiny_model), output=str(tmp_path / "run"), **settings)
    found = prepare(run, AutoTokenizer.from_pretrained(tiny_model), 259)
    assert [len(store) for store in found.train] == [1]
    assert any("must hold both answers of a pair" in warning for warning in found.warnings)
    ids = [found.train[0].document(d)[0] for d in found.train[0].documents(0)]
    weights = [found.train[0].document(d)[1] for d in found.train[0].documents(0)]
    prompts = [tokens[counted == 0].tolist() for tokens, counted in zip(ids, weights, strict=True)]
    assert prompts[0] == prompts[1]
    records[1]["prompt"] *= 40
    (tmp_path / "pairs.jsonl").write_text(json.dumps(records[1]) + "\n")
    with pytest.raises(UserError, match=r"begin beyond sequence_length 64.*; raise sequence_length \(.* tokens\)\.$"):
        prepare(
            run.model_copy(update={"too_long": None, "sequence_length": 64}),
            AutoTokenizer.from_pretrained(tiny_model),
            259,
        )


HUMAN = "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: Bye?\n\nAssistant:"


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        ("texts", {"prompt": HUMAN, "completion": " Ciao."}),
        ("texts", {"prompt": HUMAN, "completion": [{"role": "assistant", "content": " Ciao."}]}),
        ("texts", {"prompt": HUMAN, "completion": " Ciao.", "system": "Be brief."}),
        ("texts", {"instruction": HUMAN, "output": " Ciao."}),
        ("texts", {"question": HUMAN, "answer": " Ciao."}),
        ("pairs", {"prompt": HUMAN, "chosen": " Ciao.", "rejected": " No.", "system": "Be brief."}),
        ("judged", {"question": HUMAN, "completion": " Ciao.", "label": True}),
        ("ranked", {"prompt": HUMAN, "completion": " Ciao.", "score": 1.0}),
        ("labelled", {"prompt": HUMAN, "completion": " Ciao.", "label": "good"}),
        ("prompts", {"prompt": HUMAN, "answer": "Ciao."}),
        ("prompts", {"question": HUMAN + " Ciao.", "system": "Be brief."}),
    ],
    ids=str,
)
def test_a_prompt_that_is_a_dialogue_in_one_text_is_asked_as_its_turns(tiny_model, records, fields):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    encoder = Encoder(tokenizer, template=None, train_on="assistant")
    encoder.labels = ("good",) if records == "labelled" else ()
    record, dataset = Record(fields, Origin("a.jsonl", 1)), Dataset(path="a.jsonl")
    item = convert(record, recognise([record], dataset, records), dataset)
    made, _ = encode(item, encoder, record.origin, records)
    text = tokenizer.decode(made[0].ids.tolist())
    before = "<|im_start|>system\nBe brief.<|im_end|>\n" if "system" in fields else ""
    turns = ["user\nHi?", "assistant\nHello.", "user\nBye?"]
    asked = before + "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert text.startswith(asked if records == "prompts" else f"{asked}Ciao.<|im_end|>")
    if records == "prompts":
        assert text == asked
        assert item.facts["answer"] == "Ciao."
