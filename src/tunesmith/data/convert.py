"""Records -> conversations, documents, completions, tokens or preferences.

Converting is strict where leniency would train something else than meant: an answer that is missing, a part that is no
text, a label that is no token. There is a function for each format, in the modules that are named after what records
hold (`convert_texts`, `convert_preferences`, ...). How things become tokens is the business of `chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunesmith.data.convert_labelled import convert_labelled, convert_labelled_pair, convert_tagged
from tunesmith.data.convert_preferences import convert_judged, convert_preference
from tunesmith.data.convert_prompts import convert_prompts
from tunesmith.data.convert_related import convert_anchors, convert_similar
from tunesmith.data.convert_texts import (
    convert_alpaca,
    convert_messages,
    convert_prompt_completion,
    convert_question_answer,
    convert_text,
    convert_tokens,
)
from tunesmith.data.formats import fields_of, missing_field
from tunesmith.data.turns import (
    is_written_as_turns,
    turns_in_column,
    user_turn,
)
from tunesmith.data.types import (
    Asked,
    Completion,
    Conversation,
    Document,
    Judged,
    Labelled,
    Message,
    Origin,
    Preference,
    Record,
    RecordError,
    Related,
    Tagged,
    Tokens,
)
from tunesmith.data.values import (
    as_text,
    names_of,
    present,
    without_nulls,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset, FormatName

Item = Conversation | Document | Completion | Tokens | Preference | Judged | Labelled | Asked | Related | Tagged
_CONVERTERS: dict[str, Callable[[dict[str, Any], Origin, Any], Item]] = {
    "messages": convert_messages,
    "sharegpt": convert_messages,
    "alpaca": convert_alpaca,
    "prompt_completion": convert_prompt_completion,
    "question_answer": convert_question_answer,
    "text": convert_text,
    "tokens": convert_tokens,
    "preference": convert_preference,
    "judged": convert_judged,
    "scored": convert_labelled,
    "labelled": convert_labelled,
    "labelled_pair": convert_labelled_pair,
    "prompts": convert_prompts,
    "anchors": convert_anchors,
    "similar": convert_similar,
    "tagged": convert_tagged,
}
ONE_ANSWER = ("alpaca", "prompt_completion", "question_answer")
"""Formats whose records have one answer, to which a field with its reasoning belongs."""


def convert(record: Record, format: FormatName, dataset: Dataset) -> Item:
    """What the record means, or a RecordError that names its file and line."""
    fields = fields_of(record, dataset)
    if record.is_filled:  # what is JSON text in a column keeps its nulls: it was written so
        fields = {name: without_nulls(value) for name, value in fields.items()}
    missing = missing_field(fields, format)
    if missing:
        raise RecordError(
            "missing field", record.origin, f"the field {missing} is missing: the record has {names_of(fields)}"
        )
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or is_written_as_turns(prompt):  # else an answer may well be such a text
        fields = {name: turns_in_column(value, name, record.origin) for name, value in fields.items()}
    item = _CONVERTERS[format](fields, record.origin, dataset)
    if format in ONE_ANSWER and (thoughts := present(fields.get("reasoning_content"))):
        item = _with_thoughts(item, as_text(thoughts, "reasoning_content", record.origin))
    _check_media(fields, item, record.origin)
    return item


def unread(sample: Sequence[Record], format: FormatName, dataset: Dataset) -> list[str]:
    """Names of the fields that hold something, but whose absence changes nothing of what is made of a record. A field
    of messages is called `messages.thought`."""
    is_read: dict[str, bool] = {}
    for record in sample:
        try:
            item = convert(record, format, dataset)
        except RecordError:
            continue
        for name in _filled_fields(record.fields):
            if not is_read.get(name):
                less = replace(record, fields=_without(record.fields, name))
                is_read[name] = _converted(less, format, dataset) != item
    return [name for name, read in is_read.items() if not read and is_read.get(name.rpartition(".")[0], True)]


def _converted(record: Record, format: FormatName, dataset: Dataset) -> Item | None:
    """What the record means; None where it cannot be trained on."""
    try:
        return convert(record, format, dataset)
    except RecordError:
        return None


def _filled_fields(fields: dict[str, Any]) -> list[str]:
    """Names of the fields that hold something, and of those in their messages. An index of pandas has no name."""
    names = [name for name, value in fields.items() if name and _is_filled(value)]
    for name, value in fields.items():
        messages = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        inner = {key for message in messages for key, held in message.items() if _is_filled(held)}
        names += [f"{name}.{key}" for key in sorted(inner)]
    return names


def _is_filled(value: Any) -> bool:
    return present(value) not in (None, "", [], {})


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields without one of them, or with messages that lack it."""
    outer, _, inner = name.partition(".")
    if name in fields or not inner:
        return {other: value for other, value in fields.items() if other != name}
    messages = [
        {key: value for key, value in item.items() if key != inner} if isinstance(item, dict) else item
        for item in fields[outer]
    ]
    return {**fields, outer: messages}


def _with_thoughts(item: Item, thoughts: str) -> Conversation:
    """The item as a conversation whose answer has its reasoning beside it."""
    if isinstance(item, Completion):
        item = Conversation((user_turn(item.prompt), Message("assistant", item.completion)))
    assert isinstance(item, Conversation)
    *before, answer = item.messages
    answer = replace(answer, extra={**answer.extra, "reasoning_content": thoughts})
    return replace(item, messages=(*before, answer))


_MEDIA = {"image": "<image>", "images": "<image>", "video": "<video>", "videos": "<video>", "audio": "<audio>"}
_MEDIA |= {"audios": "<audio>"}


def _check_media(fields: dict[str, Any], item: Item, origin: Origin) -> None:
    """RecordError for a text that speaks of a picture beside it, which would be learned blind."""
    if not isinstance(item, Conversation | Completion | Document):
        return
    texts = texts_of(item)
    for name, mark in _MEDIA.items():
        if fields.get(name) and any(mark in text for text in texts):
            raise RecordError("not text", origin, f"the text holds {mark}, for `{name}` beside it; only text is read")


def texts_of(item: Conversation | Document | Completion | Tokens) -> list[str]:
    """The texts of an item, in order; none of tokens."""
    if isinstance(item, Conversation):
        return [message.content for message in item.messages]
    if isinstance(item, Completion):
        return [item.prompt, item.completion]
    return [item.text] if isinstance(item, Document) else []
