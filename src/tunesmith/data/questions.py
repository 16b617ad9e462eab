"""What a record asks, by whatever name and with what belongs to it: a system text, an input, a context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.data.formats import PROMPTS
from tunesmith.data.turns import (
    messages_of,
    system_turns,
    user_turn,
)
from tunesmith.data.types import (
    Message,
    Origin,
    RecordError,
)
from tunesmith.data.values import (
    as_text,
    first_of,
    present,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset


def asked_of(
    fields: dict[str, Any], origin: Origin, dataset: Dataset, names: Sequence[str] = PROMPTS
) -> list[Message] | str | None:
    """What the record's answers answer, as messages or as a question by itself; None where it is not apart from
    them."""
    value, name = first_of(fields, *names)
    if present(value) is None:
        return None
    if isinstance(value, list | dict):
        return messages_of(value, name, origin, dataset)
    question = question_of(fields, name, origin)
    if not question:
        raise RecordError("empty question", origin, f"`{name}` is empty")
    system = system_turns(fields, [], origin)
    return [*system, user_turn(question)] if system else question


def question_of(fields: dict[str, Any], name: str, origin: Origin) -> str:
    """What a field asks, with what belongs to it: the input of an instruction, the context of a question."""
    asked = "" if present(fields[name]) is None else as_text(fields[name], name, origin)
    parts = [asked]
    if name == "instruction":
        more, other = first_of(fields, "input", "context")
        parts = [asked, "" if present(more) is None else as_text(more, other, origin)]
    elif name == "question" and isinstance(fields.get("context"), str):
        parts = [fields["context"], asked]
    return "\n\n".join(part for part in parts if part.strip())
