"""CSV and TSV files -> records: the delimiter is recognised, the first line names the columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from tunesmith.data.lines import decoded, read_lines
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.errors import UserError


def read_csv(stream: BinaryIO, path: Path) -> Iterator[Record | RecordError]:
    """A record of each row, with the columns' names for fields; an error for a row that has more fields, or fewer."""
    lines = (_ended(line.decode(errors="surrogateescape")) for line in read_lines(stream, path))
    first = next(lines, "")
    skipped = 0
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    if declared := re.fullmatch(r"sep=(.)\s*", first):  # a line of Excel's, before the header
        delimiter, first, skipped = declared[1], next(lines, ""), 1
    if delimiter not in first:
        delimiter = next((d for d in ";\t|" if d in first), delimiter)

    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    row: list[str] | None = []
    while row is not None:
        origin = Origin(str(path), rows.line_num + 1 + skipped)
        try:
            row = next(rows, None)
            if not row or not any(row):
                continue
            for text in row:
                decoded(text.encode(errors="surrogateescape"), origin)
            if header is None:
                header = _column_names(row, origin)
                continue
            if len(row) != len(header):
                raise RecordError("not valid CSV", origin, f"{len(row)} fields, but the header names {len(header)}")
            yield Record(dict(zip(header, row, strict=True)), origin, sum(map(len, row)))
        except csv.Error as error:
            row = []
            yield _as_record_error(error, origin)
        except RecordError as error:
            if header is None:
                raise
            yield error


def _ended(line: str) -> str:
    """The line with a newline for its end: within cells, too, lines end as the program ended them that wrote the
    file."""
    return f"{line[:-2]}\n" if line.endswith("\r\n") else line


def _column_names(row: list[str], origin: Origin) -> list[str]:
    names = [name.strip() for name in row]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UserError(f"{origin}: the column name `{duplicates[0]}` appears more than once.")
    return names


def _as_record_error(error: csv.Error, origin: Origin) -> RecordError:
    reason = str(error)
    if "new-line character" in reason:
        reason = "a carriage return stands outside of quotes; save the file with the line ends of Unix or Windows"
    return RecordError("not valid CSV", origin, f"not valid CSV: {reason}")
