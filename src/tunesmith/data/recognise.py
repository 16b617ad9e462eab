"""Which format the records of a data set are in, by the names of their fields, over many records.

`format:` of the data set insists on one. Records that fit none are refused with the settings by which they would.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tunesmith.data.formats import (
    FORMATS,
    NEEDED,
    OPTIONAL,
    PROMPTS,
    WANTED,
    field_like,
    fields_of,
    is_like,
    missing_field,
    value_at,
)
from tunesmith.data.turns import ROLES
from tunesmith.data.types import Origin, Record
from tunesmith.data.values import names_of
from tunesmith.errors import UserError, listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset, FormatName
    from tunesmith.objectives.base import Records

MOST = 0.8
"""Share of the records that must fit a format for it to be theirs."""
Row = tuple[dict[str, Any], Origin]
"""A record's fields, as the data set renames them, and where it stands."""


class OtherRecordsError(UserError):
    """Records that no wanted format fits: what was `found` in them, and by which settings they would fit."""

    def __init__(self, found: str, advice: str):
        super().__init__(f"{found}{advice}")
        self.found = found


@contextmanager
def given_by_option(option: str, records: Records) -> Iterator[None]:
    """Where an option of a command names the records, an error about them says so: it has no settings to advise."""
    try:
        yield
    except OtherRecordsError as error:
        raise UserError(f"{option}: {error.found}; give files with {NEEDED[records]} here.") from error


def recognise(sample: Sequence[Record], dataset: Dataset, records: Records = "texts") -> FormatName:
    """The format of these records: of those that an objective with such `records` is trained on, the first that fits
    all of them, or most; the others are bad records."""
    assert sample
    rows = [(fields_of(record, dataset), record.origin) for record in sample]
    _check_mapping(sample, dataset)
    if dataset.format:
        _check_format(dataset.format, rows, records)
        return dataset.format  # type: ignore[return-value]
    if records == "texts":
        _refuse_preferences(rows)
    fits = Counter(name for fields, _ in rows for name in FORMATS[records] if not missing_field(fields, name))
    most = max(fits.values(), default=0)
    for name in FORMATS[records]:
        if fits[name] == most >= MOST * len(rows):
            return name  # type: ignore[return-value]
    if fits:
        name, count = fits.most_common(1)[0]
        fields, origin = next(row for row in rows if missing_field(row[0], name))
        raise UserError(
            f"{origin}: {count} of the first {len(rows)} records are in the {name} format, but this one lacks "
            f"the field {missing_field(fields, name)}: it has {names_of(fields)}."
        )
    raise _unrecognised(*rows[0], records)


def _check_format(format: str, rows: list[Row], records: Records) -> None:
    """UserError where records are not in the format that the data set says."""
    if format not in FORMATS[records]:
        raise UserError(
            f"{rows[0][1]}: `format: {format}` does not suit the objective, which is trained on "
            f"{NEEDED[records]}; change `objective` or `format`."
        )
    for fields, origin in rows:
        if missing := missing_field(fields, format):
            raise UserError(
                f"{origin}: `format: {format}` wants the field {missing}, but the record has "
                f"{names_of(fields)}{_suggestion(rows[0][0])}."
            )


def _unrecognised(fields: dict[str, Any], origin: Origin, records: Records) -> OtherRecordsError:
    """The error for records of which none is in a format that the objective is trained on; of the first of them."""
    if records != "texts":
        return OtherRecordsError(
            f"{origin}: found {names_of(fields)}",
            f", but the objective is trained on {NEEDED[records]}; say which is which, e.g. `fields: "
            f"{_fields_for(records, fields)}`, or change `objective`.",
        )
    wanted = {name: ", ".join(" or ".join(names) for names in WANTED[name]) for name in FORMATS[records]}
    known = "; ".join(f"{name}: {fields_of_format}" for name, fields_of_format in wanted.items())
    return OtherRecordsError(
        f"{origin}: found {names_of(fields)}, which fits no known format ({known})", f"{_suggestion(fields)}."
    )


def _fields_for(records: Records, fields: dict[str, Any]) -> str:
    """A mapping for `fields:` that would fit, with the names that the record has where they say what they are."""
    names = {
        "tagged": ("tokens", "tags"),
        "prompts": ("prompt", "answer"),
        "related": ("anchor", "positive"),
        "labelled": ("text", "label"),
        "judged": ("prompt", "completion", "label"),
        "ranked": ("prompt", "completion", "score"),
    }.get(records, ("prompt", "chosen", "rejected"))
    if records == "ranked" and any(is_like("chosen", name) for name in fields):
        names = ("prompt", "chosen", "rejected")
    if records in ("pairs", "judged", "ranked") and fields.keys() & set(PROMPTS):
        names = names[1:]
    if records == "labelled" and all(fields.keys() & set(texts) for texts in WANTED["labelled_pair"][1:]):
        names = ("label",)
    known = ("text", "label") if records == "labelled" else ("prompt", "chosen", "rejected")
    mapping = {name: (name in known and field_like(name, fields)) or "NAME" for name in names if name not in fields}
    return "{" + ", ".join(f"{wanted}: {name}" for wanted, name in mapping.items()) + "}"


def _check_mapping(sample: Sequence[Record], dataset: Dataset) -> None:
    """UserError where `fields:` maps a field that no format wants, or one that no record has."""
    known = {name for wanted in WANTED.values() for names in wanted for name in names} | OPTIONAL
    for wanted, name in dataset.fields.items():
        if wanted not in known:
            near = difflib.get_close_matches(wanted, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {listed(sorted(known))}."
            raise UserError(f"fields of {dataset.title}: no format wants a field `{wanted}`; {hint}")
        if wanted not in ("role", "content") and not any(value_at(record.fields, name) for record in sample):
            raise UserError(
                f"{sample[0].origin}: `fields` maps {wanted} to `{name}`, but the record has "
                f"{names_of(sample[0].fields)}."
            )


def _refuse_preferences(rows: list[Row]) -> None:
    """OtherRecordsError for records of preferences, which would fit a format of texts by their other fields."""
    fields, origin = rows[0]
    if "chosen" in fields and "rejected" in fields:
        chosen = fields["chosen"]
        context = next((name for name in ("prompt", "conversations", "messages", "question") if name in fields), None)
        if isinstance(chosen, list) and len(chosen) > 1:
            mapping = "{messages: chosen}"
        elif context:
            mapping = f"{{prompt: {context}, completion: chosen}}"
        else:
            mapping = "{text: chosen}"
        raise OtherRecordsError(
            f"{origin}: `chosen` and `rejected` are preference data",
            "; say `objective: dpo` (or orpo, simpo, cpo, kto), or to train on the preferred answers alone "
            f"`fields: {mapping}`.",
        )
    is_chat = any(not missing_field(fields, name) for name in ("messages", "sharegpt", "prompt_completion"))
    if is_chat and "labels" not in fields and isinstance(fields.get("label"), bool):
        raise OtherRecordsError(
            f"{origin}: `label` is true or false for good and bad answers: preference data",
            "; say `objective: kto`, or keep the good answers and remove `label`.",
        )


_LIKE_PROMPT = (
    "prompt", "query", "question", "instruction", "input", "inputs", "problem", "user", "request", "human",
    "source", "ask", "q", "context", "article", "document", "dialogue",
)  # fmt: skip
_LIKE_COMPLETION = (
    "completion", "reply", "answer", "response", "output", "outputs", "solution", "assistant", "target",
    "targets", "answers", "bot", "gpt", "result", "a", "summary", "highlights", "label_text",
)  # fmt: skip
_BESIDE = ("system", "system_prompt", "tools", "functions")
"""Read whatever the others are called."""
_LIKE_TEXT = ("content", "body", "document", "article", "passage", "raw", "code", "story")


def _suggestion(fields: dict[str, Any]) -> str:
    """The end of a sentence about a record that fits no format of texts: the `fields:` by which it would."""
    mapping = _chat_mapping(fields) or _text_mapping(fields) or _nested_mapping(fields)
    if mapping is None:
        return "; say which is which, e.g. `fields: {prompt: NAME, completion: NAME}`"
    return f"; say `fields: {{{mapping}}}`"


def _chat_mapping(fields: dict[str, Any]) -> str | None:
    """A mapping for a field that holds a list of objects, as messages are."""
    name = next((name for name, value in fields.items() if _is_like_messages(value)), None)
    if name is None:
        return None
    message = fields[name][0]
    role = next((key for key, value in message.items() if str(value).lower() in ROLES), None)
    content = next((key for key, value in message.items() if isinstance(value, str) and key != role), None)
    if role and content and (role not in ("role", "from") or content not in ("content", "value", "text")):
        return f"messages: {name}, role: {role}, content: {content}"
    return f"messages: {name}"


def _is_like_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and len(value[0]) > 1


def _text_mapping(fields: dict[str, Any]) -> str | None:
    """A mapping for fields of text: a prompt and its completion by their names, or the only two; or one long text."""
    names = [name for name, value in fields.items() if isinstance(value, str) and name not in _BESIDE]
    by_lower_name = {name.lower(): name for name in names}

    def first_like(likely: Sequence[str]) -> str | None:
        return next((by_lower_name[name] for name in likely if name in by_lower_name), None)

    prompt, completion, text = map(first_like, (_LIKE_PROMPT, _LIKE_COMPLETION, _LIKE_TEXT))
    if prompt and completion:
        return f"prompt: {prompt}, completion: {completion}"
    if len(names) == 2 and not text:
        first, second = (prompt, next(name for name in names if name != prompt)) if prompt else names
        if completion == first:
            first, second = second, first
        return f"prompt: {first}, completion: {second}"
    if text or (len(names) == 1 and (len(fields) == 1 or len(fields[names[0]]) > 100)):
        return f"text: {text or names[0]}"
    return None


def _nested_mapping(fields: dict[str, Any]) -> str | None:
    """A mapping for an object in a field, whose own fields hold the texts."""
    outer = next((name for name, value in fields.items() if isinstance(value, dict)), None)
    if outer is None:
        return None
    inner = [name for name, value in fields[outer].items() if isinstance(value, str)]
    first, second = inner if len(inner) == 2 else ("NAME", "NAME")
    return f"prompt: {outer}.{first}, completion: {outer}.{second}"
