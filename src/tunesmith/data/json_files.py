"""JSON and JSONL files -> records, whichever of the two their ending says.

A line of JSONL that cannot be read is an error of that record; a file that is no JSON as a whole is a `UserError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tunesmith.data.lines import decoded, open_file, read_lines
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.errors import UserError, listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset


def read_jsonl(stream: BinaryIO, path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    """A record of each line; where the file is one JSON value under the ending of JSONL, what `read_json` makes of
    it."""
    is_first = True
    for number, line in enumerate(read_lines(stream, path), start=1):
        if not line.strip():
            continue
        if is_first and _begins_json(line):
            yield from read_json(path, dataset)
            return
        is_first = False
        origin, size = Origin(str(path), number), len(line)
        try:
            text = decoded(line, origin)
            del line  # a long one is held once at a time
            value = _parse(text, origin)
            if _has_escaped_surrogates(text):
                _check_characters(value, origin)
            yield Record(_as_fields(value, origin), origin, size)
        except RecordError as error:
            yield error


def _begins_json(line: bytes) -> bool:
    """Whether a list of records begins with the line, or an object over several lines, as programs write them for
    people to read: JSON under the ending of JSONL."""
    start = line.strip()
    if start in (b"{", b"[", b"[{") or (start.startswith(b"[") and start.endswith(b",")):
        return True
    if not start.startswith(b"[{"):
        return False
    try:
        rows = json.loads(start)
    except (ValueError, RecursionError):
        return False
    return not all(map(_is_message, rows))


def read_json(path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    """An array of records, an object around one, records one after the other, or JSONL under the wrong ending."""
    with open_file(path) as again:
        filled = (line for line in read_lines(again, path) if line.strip())
        first = next(filled, b"")
        are_lines = first.lstrip().startswith(b"{") and _is_json(first) and next(filled, None) is not None
    with open_file(path) as again:
        if are_lines:
            yield from read_jsonl(again, path, dataset)
            return
        text = "".join(decoded(line, Origin(str(path), n)) for n, line in enumerate(read_lines(again, path), start=1))
    value = _parse_file(text, path)
    may_hold_halves = _has_escaped_surrogates(text)
    del text
    for number, item in enumerate(_rows(value, path, dataset), start=1):
        origin = Origin(str(path), number, "record")
        try:
            if may_hold_halves:
                _check_characters(item, origin)
            yield Record(_as_fields(item, origin), origin)
        except RecordError as error:
            yield error


def _rows(value: Any, path: Path, dataset: Dataset) -> list[Any]:
    """What a JSON file holds as records: its list, one of the lists in its object, or the object itself."""
    if isinstance(value, list):
        is_one_record = value and all(_is_message(item) for item in value)
        return [value] if is_one_record else value
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds only {_type_name(value)}, not records.")
    if _is_columns(value):
        raise UserError(
            f"{path}: holds columns ({listed([f'`{name}`' for name in value], most=5)}), not records; write one object "
            "a record (with pandas: `to_json(path, orient='records', lines=True)`)."
        )
    if not value.keys().isdisjoint((*_RECORD_FIELDS, *dataset.fields.values())):
        return [value]
    lists = [key for key, inner in value.items() if isinstance(inner, list) and any(map(_is_rowlike, inner))]
    if len(lists) > 1 and dataset.split in lists:
        lists = [dataset.split]
    if len(lists) > 1:
        raise UserError(
            f"{path}: holds several lists of records ({listed(lists)}); "
            f"name one with `split:`, or keep them in files of their own."
        )
    return value[lists[0]] if lists else [value]


_RECORD_FIELDS = ("messages", "conversations", "conversation", "input_ids", "prompt", "chosen")
"""Fields by which an object is one record, not a list of them under a name."""


def _is_columns(value: dict[str, Any]) -> bool:
    """Whether an object is a table as pandas writes it unless told otherwise: `{"prompt": {"0": ..., "1": ...},
    ...}`."""
    columns = list(value.values())
    if len(columns) < 2 or not all(isinstance(column, dict) and column for column in columns):
        return False
    return all(column.keys() == columns[0].keys() for column in columns) and all(map(str.isdigit, columns[0]))


def _is_rowlike(item: Any) -> bool:
    return isinstance(item, dict) or (isinstance(item, list) and bool(item) and all(map(_is_message, item)))


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item) and ("content" in item or "value" in item)


def _as_fields(value: Any, origin: Origin) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return {"messages": value}
    raise RecordError("not an object", origin, f"expected an object with named fields, found {_type_name(value)}")


def _type_name(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # NaN, Infinity, -Infinity
    names = {
        str: "a text",
        bool: "a yes/no value",
        int: "a number",
        float: "a number",
        list: "a list",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field `{duplicate}` appears twice in one object")
    return fields


# NaN and Infinity, which pandas writes for missing values, stay what they are: `convert` knows where they may stand.
_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


_SPACE = re.compile(r"\s*")


def _parse_file(text: str, path: Path) -> Any:
    """What a file holds; a list of the objects, where it holds several one after the other."""
    values: list[Any] = []
    place = _SPACE.match(text).end()  # type: ignore[union-attr]
    try:
        while place < len(text):
            value, end = _DECODER.raw_decode(text, place)
            place = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            values.append(value)
            if len(values) > 1 and not (isinstance(values[0], dict) and isinstance(value, dict)):
                raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        where = Origin(str(path), error.lineno)
        raise UserError(f"{where}: not valid JSON at column {error.colno}: {_plain(error.msg)}.") from error
    except RecursionError as error:
        raise UserError(f"{path}: the JSON is nested too deeply.") from error
    except ValueError as error:
        raise UserError(f"{path}: not usable JSON: {error}.") from error
    return values[0] if len(values) == 1 else values


def _parse(text: str, origin: Origin) -> Any:
    kind = "not valid JSON"
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        column = min(error.pos, len(text.rstrip())) + 1  # of a line that breaks off, its end
        reason = f"not valid JSON at column {column}: {_plain(error.msg)}"
        if error.msg == "Extra data" and text[error.pos :].strip() == ",":
            reason = (
                "the line ends with a comma, as in a list; in JSONL each line is a record by itself: remove the "
                "commas, or put all of it between [ and ] and name the file .json"
            )
        raise RecordError(kind, origin, reason) from error
    except RecursionError as error:
        raise RecordError(kind, origin, "the JSON is nested too deeply") from error
    except ValueError as error:
        raise RecordError(kind, origin, f"not usable JSON: {error}") from error
    return value


def _has_escaped_surrogates(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def _check_characters(value: Any, origin: Origin) -> None:
    """JSON can spell half of a surrogate pair, in names as in texts; nothing can be encoded from it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        reason = "holds half of a surrogate pair (\\ud...), which is no character"
        raise RecordError("half of a character", origin, reason) from error


def _plain(message: str) -> str:
    message = message.removesuffix(" at").rstrip(".")
    return message[:1].lower() + message[1:]
