"""`chat` and every other generation asks as training did, and stops where trained turns end."""

from __future__ import annotations

import pytest

from templates import ENDS, TEMPLATES, THINKING, TOOLS, make_tokenizer
from tunesmith.data.build import store_of
from tunesmith.data.chat import Encoder
from tunesmith.data.prepare import answers_reason
from tunesmith.data.types import Completion, Conversation, Document, Message, Origin
from tunesmith.errors import UserError
from tunesmith.infer.generate import prompt_ids

HERE = Origin("data.jsonl", 7)
SYSTEM = Message("system", "Be brief.\n")
QUESTION, ANSWER = Message("user", "What is this?"), Message("assistant", "\n\nThis  is it.")
AGAIN, LAST = Message("user", " And that?"), Message("assistant", "That.")
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}


def asked(encoder: Encoder, item: Conversation) -> list[int]:
    """What the training example that trains the last answer has before it."""
    reason = item.messages[-1].extra.get("reasoning_content", "")
    wanted = encoder.tokenizer.encode((reason or item.messages[-1].content).strip(), add_special_tokens=False)[-3:]
    found = []
    for example in encoder.encode_all(item, HERE):
        is_target = (example.weights > 0).tolist()
        last = len(is_target) - 1 - is_target[::-1].index(True)
        first = last
        while first and is_target[first - 1]:
            first -= 1
        answer = example.ids[first : last + 1].tolist()
        if any(answer[i : i + len(wanted)] == wanted for i in range(len(answer))):
            found.append(example.ids[:first].tolist())
    assert len(found) == 1
    return found[0]


def as_dicts(messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


CONVERSATIONS = {
    "a question": (QUESTION, ANSWER),
    "a system message": (SYSTEM, QUESTION, ANSWER),
    "two questions": (QUESTION, ANSWER, AGAIN, LAST),
    "a system message and two questions": (SYSTEM, QUESTION, ANSWER, AGAIN, LAST),
}


@pytest.mark.parametrize("prefix_space", [False, True], ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_sends_the_tokens_that_training_put_before_the_answer(name, prefix_space):
    tokenizer = make_tokenizer(TEMPLATES[name], prefix_space=prefix_space)
    for train_on in ("assistant", "last"):
        encoder = Encoder(tokenizer, template=None, train_on=train_on)
        for kind, messages in CONVERSATIONS.items():
            found = prompt_ids(encoder, as_dicts(messages[:-1]))
            assert found == asked(encoder, Conversation(messages)), (train_on, kind)


@pytest.mark.parametrize("name", THINKING)
def test_a_model_trained_to_reason_is_asked_to_reason_and_another_is_not(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    encoder = Encoder(tokenizer, template=None, train_on="assistant")
    thought = Message("assistant", "This.", extra={"reasoning_content": "I wonder."})
    for item in (Conversation((SYSTEM, QUESTION, thought)), Conversation((SYSTEM, QUESTION, LAST))):
        store = store_of(encoder.encode_all(item, HERE))
        found = prompt_ids(encoder, as_dicts(item.messages[:-1]), answers_reason(encoder, [store]))
        assert found == asked(encoder, item)


@pytest.mark.parametrize("name", TOOLS)
def test_tools_and_what_they_gave_are_asked_with_as_in_training(name):
    encoder = Encoder(make_tokenizer(TEMPLATES[name]), template=None, train_on="assistant")
    call = Message("assistant", "", extra={"tool_calls": [CALL]})
    result = Message("tool", "four", extra={"name": "add", "tool_call_id": "call00000"})
    for messages in ((QUESTION, LAST), (QUESTION, call, result, LAST)):
        item = Conversation(messages, (TOOL,))
        assert encoder.prompt(messages[:-1], (TOOL,)) == asked(encoder, item)


@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_stops_where_trained_turns_end(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    encoder = Encoder(tokenizer, template=None, train_on="assistant")
    item = Conversation((QUESTION, ANSWER))
    for example in encoder.encode_all(item, HERE):
        assert int(example.ids[example.weights > 0][-1]) in encoder.end_ids
    if name in ENDS:
        assert tokenizer.convert_tokens_to_ids(ENDS[name]) in encoder.end_ids


def test_without_a_template_a_prompt_is_the_text_that_was_trained_on():
    for prefix_space in (False, True):
        encoder = Encoder(make_tokenizer(None, prefix_space=prefix_space), template=None, train_on="assistant")
        example = encoder.encode(Completion("What is this?", " This."), HERE)
        found = prompt_ids(encoder, [{"role": "user", "content": "What is this?"}])
        assert found == example.ids[example.weights == 0].tolist()
        document = encoder.encode(Document("What is this?"), HERE)
        assert found == document.ids.tolist()[:-1]


def test_without_a_template_tools_are_refused_and_not_left_out():
    encoder = Encoder(make_tokenizer(None), template=None, train_on="assistant")
    tool = {"type": "function", "function": {"name": "add"}}
    call = Message("assistant", "", extra={"tool_calls": [{"function": {"name": "add", "arguments": {}}}]})
    for messages, tools in (([QUESTION], [tool]), ([QUESTION, call], [])):
        with pytest.raises(UserError, match="no chat template"):
            encoder.prompt(messages, tools)


def test_what_a_model_said_that_no_data_could_have_does_not_end_a_chat():
    encoder = Encoder(make_tokenizer(TEMPLATES["qwen3"]), template=None, train_on="assistant")
    said = {"role": "assistant", "content": "<think>\nI was cut off"}
    question = {"role": "user", "content": "Go on."}
    assert prompt_ids(encoder, [question, said, question])
