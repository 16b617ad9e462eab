"""Parquet and Arrow files -> records with values as JSON has them, and the names of classes that their columns know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from tunesmith.data.files import kind_of
from tunesmith.data.types import Origin, Record
from tunesmith.errors import UserError


def read_columns(path: Path, kind: str) -> Iterator[Record]:
    """The rows of a Parquet or Arrow file (`kind`), in batches."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.memory_map(str(path)) if kind == "arrow" else pyarrow.parquet.ParquetFile(path) as file:
            for batch in _arrow_batches(file) if kind == "arrow" else file.iter_batches(batch_size=512):
                size = batch.nbytes // max(batch.num_rows, 1)
                is_plain = all(map(_is_plain, batch.schema.types))
                for row in batch.to_pylist():
                    number += 1
                    row = row if is_plain else _plain_value(row)
                    yield Record(row, Origin(str(path), number, "record"), size, is_filled=True)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason, what = str(error).splitlines()[0].rstrip("."), "an Arrow" if kind == "arrow" else "a Parquet"
        raise UserError(f"{path}: not {what} file that can be read, at record {number + 1} ({reason}).") from error


def features_of(path: Path) -> dict[str, Any]:
    """What the datasets library has written into a file of columns about each of them; nothing where it has not."""
    import pyarrow
    import pyarrow.parquet

    try:
        if kind_of(path) == "parquet":
            schema = pyarrow.parquet.read_schema(path)
        else:
            with pyarrow.memory_map(str(path)) as file:
                schema = (pyarrow.ipc.open_file if _is_indexed(file) else pyarrow.ipc.open_stream)(file).schema
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (pyarrow.ArrowException, ValueError, TypeError, KeyError):  # reading its records says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _arrow_batches(file: Any) -> Iterator[Any]:
    """The batches of an Arrow file: of a stream, as the datasets library writes it, or of a file with an index
    (Feather), as others do."""
    import pyarrow

    if not _is_indexed(file):
        yield from pyarrow.ipc.open_stream(file)
        return
    indexed = pyarrow.ipc.open_file(file)
    yield from (indexed.get_batch(number) for number in range(indexed.num_record_batches))


def _is_indexed(file: Any) -> bool:
    """Whether an Arrow file has an index of its batches, which its first bytes say."""
    magic = file.read(6)
    file.seek(0)
    return magic == b"ARROW1"


def _is_plain(kind: Any) -> bool:
    """Whether values of a column of this type are such as JSON has."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_nested(kind):
        return not types.is_map(kind) and all(_is_plain(kind.field(n).type) for n in range(kind.num_fields))
    simple = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(test(kind) for test in (*simple, types.is_null))


def _plain_value(value: Any) -> Any:
    """The value as JSON would have it: bytes are text in columns that other programs wrote (Spark), dates and times are
    spelled out. Bytes that are no text stay, for what reads them to refuse."""
    if isinstance(value, dict):
        return {name: _plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
