from __future__ import annotations

import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Dataset
from tunesmith.data import source
from tunesmith.data.convert import convert, unread
from tunesmith.data.formats import FORMATS, WANTED
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Completion, Conversation, Document, Message, Origin, Record, RecordError, Tokens
from tunesmith.errors import UserError

PLAIN = Dataset(path="data.jsonl")
HERE = Origin("data.jsonl", 7)
NAN, INF = float("nan"), float("inf")
SHARED = Path(os.environ.get("TUNESMITH_SHARED_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))


def record(fields, line=7) -> Record:
    return Record(fields, Origin("data.jsonl", line))


def converted(fields, dataset=PLAIN, records="texts"):
    one = record(fields)
    return convert(one, recognise([one], dataset, records), dataset)


def turns(item) -> list[tuple[str, str]]:
    assert isinstance(item, Conversation)
    return [(message.role, message.content) for message in item.messages]


HELLO = [("user", "Hi"), ("assistant", "Hello")]


def test_messages_with_text_parts_and_other_names_of_roles():
    for user, assistant in (("user", "assistant"), ("human", "gpt"), ("User", "model")):
        for content in (str, lambda t: [{"type": "text", "text": t}], lambda t: [{"type": "text", "value": t}]):
            fields = {
                "messages": [{"role": user, "content": content("Hi")}, {"role": assistant, "content": content("Hello")}]
            }
            assert turns(converted(fields)) == HELLO


def test_messages_as_json_text_in_a_table():
    fields = {"messages": json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])}
    assert turns(converted(fields)) == HELLO


def test_weights_of_messages():
    answers = [{"weight": 0.5}, {"loss_weight": 0}, {"train": True}, {"train": False}, {"weight": None}, {}]
    messages = [{"role": "user", "content": "Hi"}]
    messages += [{"role": "assistant", "content": "x", **answer} for answer in answers]
    assert [m.weight for m in converted({"messages": messages}).messages[1:]] == [0.5, 0.0, 1.0, 0.0, None, None]


def test_sharegpt_with_system_tools_calls_and_results():
    tool = {"name": "add", "parameters": {"type": "object"}}
    item = converted(
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": '{"sum": 4}'},
                {"from": "gpt", "value": "four"},
            ],
            "system": "Be kind.",
            "tools": json.dumps([tool]),
        }
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert item == Conversation(
        (
            Message("system", "Be kind."),
            Message("user", "Hi"),
            Message("assistant", "", extra={"tool_calls": [call]}),
            Message("tool", '{"sum": 4}'),
            Message("assistant", "four"),
        ),
        ({"type": "function", "function": tool},),
    )


def test_conversations_as_pairs():
    assert turns(converted({"conversation": [{"input": "Hi", "output": "Hello"}]})) == HELLO


def test_tool_calls_in_all_the_ways_people_write_them():
    expected = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    ways = [
        {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"tool_calls": json.dumps([{"name": "add", "arguments": {"a": 2}}])},
        {"function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"content": [{"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 2}}'}]},
    ]
    for way in ways:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, **way}]
        assert converted({"messages": messages}).messages[1].extra == {"tool_calls": expected}, way


def test_tools_are_read_under_the_name_that_openai_gave_them_first():
    described = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    call = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Hi"}, call]
    expected = ({"type": "function", "function": described},)
    assert converted({"messages": messages, "tools": [described]}).tools == expected
    assert converted({"messages": messages, "functions": [described]}).tools == expected
    assert converted({"messages": messages, "functions": "def add(): ..."}).tools == ()


def test_null_arguments_of_tool_calls_are_kept_but_for_those_that_columns_were_filled_with():
    call = {"name": "add", "arguments": {"a": None, "b": [None, {"c": None}]}}
    tool = {"name": "add", "parameters": {"a": {"default": None}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    written = {"messages": messages, "tools": [tool]}

    def arguments(fields, **more):
        made = convert(Record(fields, HERE, **more), "messages", Dataset(path="d.jsonl"))
        return made.messages[1].extra["tool_calls"][0]["function"]["arguments"], made.tools[0]["function"]

    assert arguments(written) == (call["arguments"], tool)
    assert arguments(written, is_filled=True) == ({"b": [None, {}]}, {"name": "add", "parameters": {"a": {}}})
    as_text = {**call, "arguments": json.dumps(call["arguments"])}
    messages[1] = {**messages[1], "tool_calls": [as_text]}
    assert arguments({"messages": messages, "tools": json.dumps([tool])}, is_filled=True) == (call["arguments"], tool)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "Hi", "completion": NAN}, "`completion` is NaN; an answer is needed"),
        ({"prompt": -INF, "completion": "x"}, "`prompt` is -Infinity"),
        ({"text": INF}, "`text` must be text, found Infinity"),
        ({"messages": [{"role": "user", "content": NAN}]}, "`messages` 1 must be text, found NaN"),
        ({"messages": NAN}, "`messages` must be a list, found NaN"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", "weight": INF}]},
            "`weight` of `messages` 2 must be a number from 0 to 1,000 or true/false, not Infinity",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": [NAN]}}]}]},
            "arguments of the tool call in `messages` 1 holds NaN, which JSON does not have",
        ),
    ],
)
def test_nan_and_infinity_are_called_by_their_names(fields, said):
    with pytest.raises(RecordError) as caught:
        converted(fields)
    assert said in str(caught.value)
    assert caught.value.kind == "NaN or Infinity"


def test_nan_in_a_field_that_may_be_missing_is_nothing():
    fields = {"instruction": "Hi", "input": NAN, "output": "two", "system": NAN, "history": NAN}
    assert converted(fields) == converted({"instruction": "Hi", "output": "two"})


def test_a_few_records_of_another_kind_do_not_hide_the_format():
    good = [Record({"prompt": "Hi", "completion": "x"}, HERE)] * 9
    assert recognise([Record({"odd": 1}, HERE), *good], Dataset(path="d.jsonl")) == "prompt_completion"
    with pytest.raises(UserError, match="lacks the field"):
        recognise([Record({"odd": 1}, HERE), *good[:2]], Dataset(path="d.jsonl"))


def test_reasoning_is_kept_apart_under_one_name():
    for way in (
        {"content": "four", "reasoning_content": "two and two"},
        {"content": "four", "thinking": "two and two"},
        {"content": [{"type": "thinking", "thinking": "two and two"}, {"type": "text", "text": "four"}]},
    ):
        message = converted({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **way}]}).messages[1]
        assert message == Message("assistant", "four", extra={"reasoning_content": "two and two"})


def test_alpaca_with_input_system_history_and_response():
    assert turns(converted({"instruction": "Hi", "output": "Hello"})) == HELLO
    assert turns(converted({"instruction": "Hi", "input": "", "response": "Hello"})) == HELLO
    dolly = {"instruction": "How late?", "context": "It is late.", "response": "very", "category": "qa"}
    assert turns(converted(dolly))[0] == ("user", "How late?\n\nIt is late.")
    fields = {"instruction": "Add", "input": "2 2", "output": "4", "system": "Be kind.", "history": [["Hi", "Hello"]]}
    assert turns(converted(fields)) == [
        ("system", "Be kind."),
        *HELLO,
        ("user", "Add\n\n2 2"),
        ("assistant", "4"),
    ]


def test_prompt_and_completion_as_texts_or_as_messages():
    assert converted({"prompt": "2+2=", "completion": "4"}) == Completion("2+2=", "4")
    assert converted({"prompt": "2+2=", "response": 4}) == Completion("2+2=", "4")
    assert turns(converted({"prompt": "Hi", "completion": "Hello", "system": "Be kind."}))[0] == ("system", "Be kind.")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    item = converted({"prompt": [*chat, chat[0]], "completion": [chat[1]]})
    assert turns(item) == HELLO * 2
    assert [m.weight for m in item.messages] == [None, 0.0, None, None]


def test_question_and_answer_with_context_and_lists_of_answers():
    assert turns(converted({"question": "Hi", "answer": "Hello"})) == HELLO
    assert turns(converted({"question": "2+2?", "answer": 4}))[1] == ("assistant", "4")
    squad = {"context": "It is late.", "question": "How late?", "answers": {"text": ["very"], "answer_start": [0]}}
    assert turns(converted(squad)) == [("user", "It is late.\n\nHow late?"), ("assistant", "very")]


def test_text_and_tokens():
    assert converted({"text": "Once"}) == Document("Once")
    assert converted({"input_ids": [1, 2]}) == Tokens((1, 2), (True, True))
    padded = {"input_ids": [0, 1, 2, 0], "labels": [-100, -100, 2, -100], "attention_mask": [0, 1, 1, 0]}
    assert converted(padded) == Tokens((1, 2), (False, True))


def test_fields_rename_also_inside_messages():
    dataset = Dataset(path="d", fields={"prompt": "query", "completion": "reply"})
    assert converted({"query": "Hi", "reply": "Hello"}, dataset) == Completion("Hi", "Hello")
    dataset = Dataset(path="d", fields={"messages": "dialog", "role": "who", "content": "says"})
    dialog = [{"who": "user", "says": "Hi"}, {"who": "bot", "says": "Hello"}]
    assert turns(converted({"dialog": dialog}, dataset)) == HELLO
    swapped = Dataset(path="d", fields={"prompt": "completion", "completion": "prompt"})
    assert converted({"prompt": "Hello", "completion": "Hi"}, swapped) == Completion("Hi", "Hello")


def test_the_format_is_recognised_from_all_records_and_can_be_insisted_on():
    both = {"prompt": "Hi", "completion": "Hello", "text": "Hi Hello"}
    assert recognise([record(both)], PLAIN) == "prompt_completion"
    assert recognise([record(both), record({"text": "x"})], PLAIN) == "text"
    assert recognise([record(both)], Dataset(path="d", format="text")) == "text"
    with pytest.raises(UserError, match=r"line 2: 1 of the first 2 records are in the text format, but this one lacks"):
        recognise([record({"text": "x"}, 1), record({"body": "x"}, 2)], PLAIN)
    with pytest.raises(UserError, match=r"`format: text` wants the field `text`, but the record has `query`, `reply`"):
        recognise([record({"query": "Hi", "reply": "x"})], Dataset(path="d", format="text"))


SUGGESTED = [
    ({"query": "Hi", "reply": "Hello"}, "{prompt: query, completion: reply}"),
    ({"id": 3, "Problem": "2+2", "Solution": "4"}, "{prompt: Problem, completion: Solution}"),
    ({"dialog": [{"role": "user", "content": "Hi"}]}, "{messages: dialog}"),
    ({"dialog": [{"who": "user", "says": "Hi"}]}, "{messages: dialog, role: who, content: says}"),
    ({"id": 1, "body": "Once upon"}, "{text: body}"),
    ({"left": "Hi", "right": "Hello"}, "{prompt: left, completion: right}"),
]


@pytest.mark.parametrize(("fields", "mapping"), SUGGESTED)
def test_unknown_fields_are_named_with_a_mapping_that_works(fields, mapping):
    with pytest.raises(UserError) as caught:
        recognise([record(fields)], PLAIN)
    message = str(caught.value)
    assert message.startswith("data.jsonl, line 7: ")
    assert f"say `fields: {mapping}`" in message
    assert all(f"`{name}`" in message for name in fields)
    wanted = dict(pair.split(": ") for pair in mapping.strip("{}").split(", "))
    recognise([record(fields)], Dataset(path="d", fields=wanted))


def chat(*answers, **more):
    return {"messages": [{"role": "user", "content": "Hi"}, *({"role": "assistant", **a} for a in answers)], **more}


REFUSED = [
    ({"prompt": None, "completion": "Hi"}, "`prompt` is null"),
    ({"question": "Hi", "answer": None}, "`answer` is null"),
    ({"question": "Hi", "answer": ""}, "`answer` is empty"),
    ({"question": "Hi", "answer": " \n"}, "`answer` is empty"),
    ({"question": "Hi", "answer": True}, "`answer` must be text, found true/false"),
    ({"question": "Hi", "answers": []}, "`answers` is null"),
    ({"question": "Hi", "choices": ["a", "b"], "answer": 1}, "multiple-choice question, whose `choices` would not"),
    ({"question": "Hi", "options": {"A": "a", "B": "b"}, "answer": "B"}, "multiple-choice question, whose `options`"),
    ({"prompt": "Hi", "completion": {"a": 1}}, "has no `role`"),
    ({"instruction": "", "output": "x"}, "`instruction` is empty"),
    ({"instruction": "Hi", "output": "x", "history": ["Hi"]}, "`history` must be a list of"),
    ({"text": None}, "`text` must be text, found null"),
    ({"messages": None}, "`messages` must be a list, found null"),
    ({"messages": []}, "`messages` is empty"),
    ({"messages": ["Hi"]}, "`messages` 1 is not an object"),
    (chat(), "no assistant turn"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "no assistant turn of the conversation answers"),
    (chat({"content": ""}), "`messages` 2 is an empty answer"),
    (chat({"content": None}), "`messages` 2 is an empty answer"),
    (chat({"content": "x", "weight": -1}), "`weight` of `messages` 2 must be a number from 0 to 1,000"),
    (chat({"content": "x", "weight": 1e300}), "`weight` of `messages` 2 must be a number from 0 to 1,000"),
    (chat({"content": [{"type": "image", "url": "x"}]}), "part of type `image`; only text"),
    (
        {"prompt": "<image>\nWhat?", "completion": "A cat", "image": "x.png"},
        "the text holds <image>, for `image` beside it; only text is read",
    ),
    (chat({"content": "", "tool_calls": "{"}), "tool call in `messages` 2 is not valid JSON"),
    (chat({"content": "", "tool_calls": [{"arguments": {}}]}), "has no function `name`"),
    (chat({"content": "x"}, tools="["), "`tools` is not valid JSON"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role `robot`; known are user"),
    ({"messages": [{"role": "a\nb", "content": "x"}]}, r"unknown role `a\\nb`; known are user"),
    ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "preference data.*{prompt: prompt, completion: chosen}"),
    (chat({"content": "x"}, label=True), "`label` is true or false.*preference data"),
    ({"input_ids": [1, 2], "labels": [1]}, "2 `input_ids` but 1 `labels`"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "differ at place 0.*shifted by one already"),
    ({"input_ids": [1, 2], "labels": [-100, 5]}, "differ at place 1"),
    ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "hides tokens in the middle"),
    ({"input_ids": [1, "2"]}, "must be whole numbers, found '2'"),
    ({"input_ids": []}, "`input_ids` is empty"),
    ({"input_ids": [-1]}, "holds -1, which is no token id"),
    ({}, "found no fields, which fits no known format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_would_train_wrong_is_refused_with_its_place(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        converted(fields)
    assert str(caught.value).startswith("data.jsonl, line 7: ")
    assert "\n" not in str(caught.value)


def test_a_label_that_json_does_not_have_is_refused_in_a_sentence():
    for format, fields in (
        ("labelled", {"text": "a", "label": b"\xff"}),
        ("judged", {"prompt": "a", "completion": "b", "label": b"\xff"}),
        ("scored", {"text": "a", "score": b"\xff"}),
        ("tagged", {"tokens": ["a"], "ner_tags": [b"\xff"]}),
    ):
        with pytest.raises(UserError, match=r"found \"b'\\"):
            convert(record(fields), format, Dataset(path="d"))


def test_the_mapping_offered_for_preferred_answers_works():
    fields = {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"}}
    dataset = Dataset(path="d", fields={"prompt": "conversations", "completion": "chosen"})
    assert turns(converted({**fields, "rejected": {}}, dataset)) == HELLO


def test_a_mapping_that_cannot_be_is_named():
    with pytest.raises(UserError, match="no format wants a field `promt`; did you mean `prompt`"):
        recognise([record({"q": "Hi"})], Dataset(path="d", fields={"promt": "q"}))
    with pytest.raises(UserError, match="maps prompt to `q`, but the record has `question`"):
        recognise([record({"question": "Hi"})], Dataset(path="d", fields={"prompt": "q"}))


def test_fields_that_nothing_is_made_of_are_known():
    def names(*fields, **more):
        rows, dataset = [record(one) for one in fields], Dataset(path="d.jsonl", **more)
        return unread(rows, recognise(rows, dataset), dataset)

    pair = {"prompt": "Hi", "completion": "Hello"}
    assert names({**pair, "thinking": "Hm", "system": ""}) == ["thinking"]
    assert names({**pair, "system": ""}, {**pair, "system": "Be brief"}) == []
    assert names({"q": "Hi", "a": "x", "id": 3}, fields={"prompt": "q", "completion": "a"}) == ["id"]
    assert names({"messages": chat({"content": "x"})["messages"], "images": [], "score": 0}) == ["score"]
    turns = [{"role": "user", "content": "Hi", "id": 1}, {"role": "assistant", "content": "x", "thought": "Hm"}]
    assert names({"messages": turns, "": 0}) == ["messages.id", "messages.thought"]
    assert names({"prompt": "Hi", "completion": "x", "turns": turns}) == ["turns"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "name"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["messages", "conversations", "instruction", "output", "prompt", "completion", "question", "answer", "text",
     "input_ids", "labels", "attention_mask", "tools", "system", "history", "chosen", "rejected", "label", "x"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    fields=st.dictionaries(NAMES, VALUES, max_size=4),
    insisted=st.sampled_from([None, *WANTED]),
    records=st.sampled_from([*FORMATS]),
)
def test_any_record_is_converted_or_refused_in_a_sentence(fields, insisted, records):
    said = ""
    try:
        converted(fields, Dataset(path="d", format=insisted), records)
    except UserError as error:
        said = str(error)
    assert not said or said.startswith("data.jsonl, line 7: ")


PUBLIC = {
    "gsm8k_train.jsonl": "question_answer",
    "lf_alpaca_en_demo.json": "alpaca",
    "lf_v1_sft_demo.jsonl": "messages",
    "lf_glaive_toolcall_en_demo.json": "sharegpt",
    "fastchat_dummy_conversation.json": "sharegpt",
    "lf_c4_demo.jsonl": "text",
    "lf_dpo_en_demo.json": "preference",
    "lf_kto_en_demo.json": "judged",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_data_as_people_publish_it(name):
    if not (SHARED / name).exists():
        pytest.skip("the shared data sets are not here")
    dataset = Dataset(path=str(SHARED / name))
    records = list(islice(source.read(dataset), 300))
    kind = {"preference": "pairs", "judged": "judged"}.get(PUBLIC[name], "texts")
    assert recognise(records, dataset, kind) == PUBLIC[name]
    for one in records:
        convert(one, PUBLIC[name], dataset)


@pytest.mark.parametrize(
    "fields",
    [
        {"instruction": "Sum?", "output": "two"},
        {"prompt": "Sum?", "completion": "two"},
        {"prompt": [{"role": "user", "content": "Sum?"}], "completion": "two"},
        {"question": "Sum?", "answer": "two"},
    ],
)
def test_reasoning_in_a_field_of_its_own_belongs_to_the_answer(fields):
    dataset = Dataset(path="d", fields={"reasoning_content": "Complex_CoT"})
    record = Record({**fields, "Complex_CoT": "one and one"}, Origin("d", 1, "line"))
    made = convert(record, recognise([record], dataset), dataset)
    assert [(one.role, one.content, one.extra) for one in made.messages] == [
        ("user", "Sum?", {}),
        ("assistant", "two", {"reasoning_content": "one and one"}),
    ]


TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        ("texts", {"prompt": "Where?", "completion": "Here."}),
        ("texts", {"instruction": "Where?", "output": "Here."}),
        ("texts", {"question": "Where?", "answer": "Here."}),
        ("pairs", {"prompt": "Where?", "chosen": "Here.", "rejected": "There."}),
        ("judged", {"prompt": "Where?", "completion": "Here.", "label": True}),
    ],
    ids=str,
)
def test_tools_beside_a_question_and_its_answer_are_told_to_the_model(records, fields):
    """They were left out of records that are no conversations."""
    given = {**fields, "tools": json.dumps([TOOL])}
    record, dataset = Record(given, Origin("a.jsonl", 1)), Dataset(path="a.jsonl")
    format = recognise([record], dataset, records)
    made = convert(record, format, dataset)
    made = made.chosen if records == "pairs" else made.answer if records == "judged" else made
    assert [tool["function"] for tool in made.tools] == [TOOL]
    assert unread([record], format, dataset) == []


@pytest.mark.parametrize(
    ("fields", "mapping"),
    [
        ({"query": "Where?", "tools": "[]", "answers": "Here."}, "{prompt: query, completion: answers}"),
        ({"system": "Be brief.", "chat": "Hi."}, "{prompt: NAME, completion: NAME}"),
    ],
    ids=str,
)
def test_no_mapping_is_proposed_that_takes_a_system_text_or_tools_for_a_question(fields, mapping):
    with pytest.raises(UserError, match=re.escape(f"`fields: {mapping}`")):
        recognise([Record(fields, Origin("a.jsonl", 1))], Dataset(path="a.jsonl"))


@pytest.mark.parametrize(("records", "wanted"), [("judged", "label"), ("ranked", "score")])
def test_the_mapping_in_a_refusal_is_one_of_what_the_objective_learns_from(records, wanted):
    record = Record({"prompt": "Where?", "completion": "Here.", "rating": 5}, Origin("a.jsonl", 1))
    with pytest.raises(UserError, match=re.escape(f"`fields: {{{wanted}: NAME}}`")):
        recognise([record], Dataset(path="a.jsonl"), records)
