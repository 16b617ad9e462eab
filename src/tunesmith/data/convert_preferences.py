"""Records of preferences: two answers of which one is better (`preference`), or one that is good or bad (`judged`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunesmith.data.convert_texts import completion_of, convert_messages
from tunesmith.data.formats import field_like
from tunesmith.data.messages import as_context, asked_as_turns, turns_of
from tunesmith.data.questions import asked_of
from tunesmith.data.turns import (
    answer_turn,
    checked,
    messages_of,
    system_turns,
    tools_of,
    user_turn,
)
from tunesmith.data.types import (
    Completion,
    Judged,
    Message,
    Origin,
    Preference,
    RecordError,
)
from tunesmith.data.values import (
    as_number,
    present,
    shown,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

ANSWERS = ("chosen", "rejected")


def convert_preference(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Preference:
    """Both answers with what they answer: a prompt beside them, or what two whole conversations begin with."""
    answers = [fields["chosen"], fields["rejected"]]
    prompt = asked_of(fields, origin, dataset)
    are_texts = all(isinstance(answer, str) for answer in answers)
    if are_texts and (prompt is None or (isinstance(prompt, str) and all(map(turns_of, answers)))):
        preference = _of_dialogues(answers, prompt, fields, origin)
    elif isinstance(prompt, str) and all(isinstance(answer, str | int | float) for answer in answers):
        preference = _of_texts(answers, prompt, fields, origin)
    else:
        preference = _of_messages(answers, prompt, fields, origin, dataset)
    if preference.chosen == preference.rejected:
        raise RecordError("same answers", origin, "`chosen` and `rejected` are the same, which prefers nothing")
    margin = present(fields.get("margin"))
    return preference if margin is None else replace(preference, margin=as_number(margin, "margin", origin))


def _of_dialogues(
    texts: list[str], prompt: list[Message] | str | None, fields: dict[str, Any], origin: Origin
) -> Preference:
    """Two whole conversations, each in one text."""
    conversations = [_dialogue(text, name, fields, origin) for text, name in zip(texts, ANSWERS, strict=True)]
    turns = turns_of(prompt) if isinstance(prompt, str) and prompt else None
    _check_prompt(prompt if turns is None else [turn for turn in turns if turn.content], conversations, origin)
    return _with_common_prompt(*conversations, origin)


def _of_texts(texts: list[Any], prompt: str, fields: dict[str, Any], origin: Origin) -> Preference:
    """Two answers to a prompt, all of them texts."""
    answers = [answer_turn(text, name, origin) for text, name in zip(texts, ANSWERS, strict=True)]
    if tools := tools_of(fields, origin):
        return _of_turns([asked_as_turns([user_turn(prompt), answer]) for answer in answers], origin, tools)
    chosen, rejected = (Completion(prompt, answer.content) for answer in answers)
    return Preference(chosen, rejected)


def _of_messages(
    values: list[Any], prompt: list[Message] | str | None, fields: dict[str, Any], origin: Origin, dataset: Dataset
) -> Preference:
    """Two answers of which one at least is messages, or the prompt is: answers alone, or whole conversations."""
    answers = [_answer(value, name, origin, dataset) for value, name in zip(values, ANSWERS, strict=True)]
    if prompt is not None and any(answer[0].role == "assistant" for answer in answers):
        asked = as_context([user_turn(prompt)] if isinstance(prompt, str) else prompt)
        asked, tools = [*system_turns(fields, asked, origin), *asked], tools_of(fields, origin)
        return _of_turns([asked_as_turns([*asked, *answer]) for answer in answers], origin, tools)
    if isinstance(prompt, list) and prompt[0].role == "system":  # which the answers may leave out
        answers = [answer if answer[0].role == "system" else [prompt[0], *answer] for answer in answers]
    _check_prompt(prompt, answers, origin)
    system = system_turns(fields, answers[0], origin)
    return _with_common_prompt(*answers, origin, system, tools_of(fields, origin))


def _of_turns(
    conversations: Sequence[list[Message]], origin: Origin, tools: tuple[dict[str, Any], ...] = ()
) -> Preference:
    chosen, rejected = (checked(messages, origin, tools) for messages in conversations)
    return Preference(chosen, rejected)


def _check_prompt(asked: list[Message] | str | None, turns: Sequence[list[Message]], origin: Origin) -> None:
    """RecordError where whole conversations do not begin with the prompt that is given beside them."""
    for name, messages in zip(ANSWERS, turns, strict=True):
        if isinstance(asked, str):
            is_there = any(m.role == "user" and m.content.strip() == asked.strip() for m in messages)
        else:
            is_there = asked is None or messages[: len(asked)] == asked
        if not is_there:
            raise RecordError(
                "no common prompt",
                origin,
                f"`{name}` is a whole conversation, but not one that begins with the prompt beside it; leave one out",
            )


def _answer(value: Any, name: str, origin: Origin, dataset: Dataset) -> list[Message]:
    """The messages of an answer, which is a text, a message or several."""
    if isinstance(value, list | dict):
        return messages_of(value, name, origin, dataset)
    return [answer_turn(value, name, origin)]


def _with_common_prompt(
    chosen: list[Message],
    rejected: list[Message],
    origin: Origin,
    system: Sequence[Message] = (),
    tools: tuple[dict[str, Any], ...] = (),
) -> Preference:
    """Two whole conversations: what they have in common is the prompt, and what differs are the answers."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if common == len(chosen) == len(rejected):
        raise RecordError("same answers", origin, "`chosen` and `rejected` are the same, which prefers nothing")
    conversations = []
    for name, messages in zip(ANSWERS, (chosen, rejected), strict=True):
        if common == len(messages) or messages[common].role != "assistant" or common == 0:
            raise RecordError(
                "no common prompt",
                origin,
                "`chosen` and `rejected` must be the same up to an assistant turn, or answer a `prompt` of their own; "
                f"`{name}` does not",
            )
        conversations.append([*system, *as_context(messages[:common]), *messages[common:]])
    return _of_turns(conversations, origin, tools)


def _dialogue(text: str, name: str, fields: dict[str, Any], origin: Origin) -> list[Message]:
    """The messages of a whole conversation in one text."""
    messages = turns_of(text)
    if messages is None:
        mapping = f"{{prompt: {field_like('prompt', fields) or 'NAME'}}}"
        raise RecordError(
            "no prompt",
            origin,
            f"`{name}` is a text without a `prompt` before it; say `fields: {mapping}` where another field has it, "
            "give whole conversations as messages, or move what both texts begin with into a `prompt`",
        )
    if not messages[-1].content:
        raise RecordError("empty answer", origin, f"`{name}` is empty, which would teach the model to be silent")
    return messages


_JUDGEMENTS = {"true": True, "1": True, "desirable": True, "false": False, "0": False, "undesirable": False}
"""What labels mean that a column of text holds."""


def convert_judged(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Judged:
    """An answer, or a conversation whose last answer it is, with whether it is wanted."""
    label = fields["label"]
    if isinstance(label, str):
        label = _JUDGEMENTS.get(label.strip().lower(), label)
    if not isinstance(label, bool) and label not in (0, 1):
        raise RecordError("wrong label", origin, f"`label` must be true or false, found {shown(label)}")
    if "completion" in fields or "response" in fields:
        return Judged(completion_of(fields, origin, dataset), bool(label))
    conversation = convert_messages(fields, origin, dataset)
    last = max(n for n, message in enumerate(conversation.messages) if message.role != "assistant")
    if last == len(conversation.messages) - 1:
        raise RecordError("no answer", origin, "the conversation does not end with an answer, which `label` is about")
    messages = (*as_context(conversation.messages[:last]), *conversation.messages[last:])
    return Judged(replace(conversation, messages=messages), bool(label))
