"""Records with labels or scores: of a text, a pair of texts, an answer, or of each word."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.data.convert_texts import completion_of
from tunesmith.data.formats import WANTED
from tunesmith.data.turns import (
    messages_of,
    system_turns,
    tools_of,
)
from tunesmith.data.types import (
    Conversation,
    Document,
    Labelled,
    Origin,
    RecordError,
    Tagged,
)
from tunesmith.data.values import (
    as_list,
    as_number,
    as_text,
    first_of,
    present,
    shown,
)
from tunesmith.errors import listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset


def convert_labelled(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Labelled:
    """A text, a prompt with its completion or a conversation, with its label or score."""
    label = _label_of(fields, origin)
    label_name = _label_name(label, fields, dataset)
    if "completion" in fields or "response" in fields:
        if present(fields.get("text")) is not None:
            name = "label" if "label" in fields else "score"
            reason = f"has a `text` and an answer, and the `{name}` is of one: remove the other, or give both as "
            raise RecordError("several texts", origin, reason + "`prompt` and `completion`")
        return Labelled(completion_of(fields, origin, dataset), label, label_name)
    if "text" in fields:
        names = [name for name in ("text", "text_pair") if name == "text" or present(fields.get(name)) is not None]
        return Labelled(_text_of(fields, names, origin), label, label_name)
    key = next(k for k in ("messages", "conversations", "conversation") if k in fields)
    messages = messages_of(fields[key], key, origin, dataset)
    conversation = Conversation((*system_turns(fields, messages, origin), *messages), tools_of(fields, origin))
    return Labelled(conversation, label, label_name)


def convert_labelled_pair(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Labelled:
    """Two texts as one, with an empty line between them, and their label."""
    firsts, seconds = ([name for name in names if name in fields] for names in WANTED["labelled_pair"][1:])
    if firsts[0] == "sentence1" and seconds[0] == "sentence2":  # the format's own names go before others
        firsts, seconds = firsts[:1], seconds[:1]
    names = [*firsts, *seconds]
    if len(names) != 2:
        reason = f"{listed([f'`{name}`' for name in names])} are more than two texts with a `label`; say which two are "
        raise RecordError("several texts", origin, reason + "meant, `fields: {sentence1: NAME, sentence2: NAME}`")
    label = _label_of(fields, origin)
    return Labelled(_text_of(fields, names, origin), label, _label_name(label, fields, dataset))


def _text_of(fields: dict[str, Any], names: Sequence[str], origin: Origin) -> Document:
    """The texts of these fields as one; RecordError where one of them is empty."""
    texts = [as_text(fields[name], name, origin) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise RecordError("empty text", origin, f"`{name}` is empty, so there is nothing to label")
    return Document("\n\n".join(texts))


def _label_of(fields: dict[str, Any], origin: Origin) -> str | float:
    """The record's `label`, a name or a whole number, or its `score`, any number."""
    name = "score" if "score" in fields and "label" not in fields else "label"
    label = fields[name]
    if name == "score":
        return as_number(label, name, origin)
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, str):
        if not label.strip():
            raise RecordError("wrong label", origin, "`label` is empty")
        return label.strip()
    if isinstance(label, list):
        reason = f"found {shown(label)}; a text has one label here, so train a run for each of several"
        raise RecordError("wrong label", origin, f"`label` must be a name or a number, {reason}")
    if not isinstance(label, int | float) or (isinstance(label, float) and not label.is_integer()):
        raise RecordError("wrong label", origin, f"`label` must be a name or a number, found {shown(label)}")
    return label


def _label_name(label: str | float, fields: dict[str, Any], dataset: Dataset) -> str | None:
    """What a field beside a label that is a number calls it (`label_text`, or as `fields` says); None where none
    does."""
    if isinstance(label, str) and not label.isdecimal():
        return None
    own = dataset.fields.get("label", "label")
    name, _ = first_of(fields, "label_name", *(f"{own}_{end}" for end in ("name", "text", "str")), f"text_{own}")
    if isinstance(name, str) and name.strip():
        return name.strip()
    return json.dumps(fields["label"]) if isinstance(fields.get("label"), bool) else None


def convert_tagged(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Tagged:
    """Words with a label each."""
    value, name = first_of(fields, *WANTED["tagged"][0])
    words = [as_text(word, name, origin) for word in _split(value, name, origin)]
    value, tags_name = first_of(fields, *WANTED["tagged"][1])
    tags = [_tag(tag, tags_name, origin) for tag in _split(value, tags_name, origin)]
    if len(words) != len(tags):
        reason = f"`{name}` has {len(words)} words, but `{tags_name}` has {len(tags)}; each word needs its own"
        raise RecordError("wrong length", origin, reason)
    if not any(word.strip() for word in words):
        raise RecordError("empty text", origin, f"`{name}` has no words, so there is nothing to label")
    return Tagged(tuple(words), tuple(tags))


def _split(value: Any, name: str, origin: Origin) -> list[Any]:
    """The items of a list, or of what files of columns have for one: JSON text, or words with spaces between them."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return value.split()
    return as_list(value, name, origin)


def _tag(value: Any, name: str, origin: Origin) -> str | int | None:
    """A label's name or number; None where there is none, which -100 says in data made for transformers."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        value = int(value)
    if value is None or value == -100:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or (isinstance(value, str) and not value.strip()):
        raise RecordError("wrong label", origin, f"`{name}` must hold names or numbers, found {shown(value)}")
    return value
