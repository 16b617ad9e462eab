"""Files, folders, globs and hub data sets -> records, one at a time, each with the place it came from.

JSONL, CSV and Parquet are streamed, so memory does not grow with the file. A record that cannot be read is told with
its file and line, and the next one is read; a file that cannot be read is an error. Only blank lines are skipped. What
the records mean is the business of `formats`.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import functools
import glob
import gzip
import hashlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tunesmith import hub
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line, listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

KINDS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst", ".zstd")
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev|eval|evaluation", "test": "test|testing"}
"""What files of a data set's splits are called, between hyphens, dots, underscores, blanks or digits, as on the hub."""


def files(dataset: Dataset) -> list[Path]:
    """The files behind `path` (a file, a folder with all below it, or a glob), sorted.

    In a folder or glob, files with other endings are left out, and so are texts (a README, a licence) that lie
    beside record files; in a folder also those of other splits than the one that is asked for. Symbolic links are
    followed; a file that several of them lead to is there once.
    """
    assert dataset.path
    path = expanded(dataset.path)
    try:
        if path.is_file():
            found = [path]
            if _kind(path) is None:
                ending = f"that end in `{path.suffix}`" if path.suffix else "without an ending"
                raise UserError(f"{path}: cannot read files {ending}; {_known_endings()}.")
        elif path.is_dir():
            found = _of_split(_readable(_walk(path), path), path, dataset.split)
        elif glob.has_magic(str(path)):
            found = _readable(_matching(path), path)
        else:
            raise UserError(f"{path}: no such file or folder{_near_miss(path)}")
        if all(file.stat().st_size == 0 for file in found):
            raise UserError(f"{path}: {'the file is' if len(found) == 1 else 'all files are'} empty.")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return found


def searched_folder(dataset: Dataset) -> Path | None:
    """The folder of which everything below is read, where the data are given so."""
    path = expanded(dataset.path or "")
    if dataset.path is None or path.is_file():
        return None
    if path.is_dir():
        return path
    return _fixed_part(path) if "**" in path.parts else None


def read(dataset: Dataset, bad: Callable[[RecordError], None] | None = None) -> Iterator[Record]:
    """The records, in the order of the files, at most `limit` of them; a UserError when there is none.

    `bad` is told of records that cannot be read, which count; without it, the first of them is raised.
    """
    count = 0
    for item in islice(_read_all(dataset), dataset.limit):
        count += 1
        if isinstance(item, Record):
            yield item
        elif bad is None:
            raise item
        else:
            bad(item)
    if not count:
        raise UserError(f"{dataset.path or dataset.hub}: holds no records.")


def fingerprint(dataset: Dataset) -> str:
    """A hash of everything that decides which records `read` gives; the files' names do not."""
    digest = hashlib.sha256(json.dumps(["source 1", dataset.split, dataset.limit]).encode())
    if dataset.hub:
        digest.update(f"{dataset.hub} {dataset.subset} {_load_hub(dataset)._fingerprint}".encode())
        return digest.hexdigest()
    for path in files(dataset):
        digest.update("".join(path.suffixes[-2:]).lower().encode())
        try:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return digest.hexdigest()


# Finding files


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for ending in COMPRESSED:
        if name.endswith(ending):
            kind = KINDS.get(Path(name.removesuffix(ending)).suffix)
            return None if kind in ("parquet", "arrow") else kind
    return KINDS.get(path.suffix.lower())


def _known_endings() -> str:
    return f"known are {', '.join(KINDS)}, all but Parquet and Arrow also with {' or '.join(COMPRESSED[:2])}"


def _walk(folder: Path) -> Iterator[Path]:
    """All files below the folder. A folder that links lead back to is entered once."""
    entered = set()
    for name, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(name)
        if real in entered:
            below.clear()
            continue
        entered.add(real)
        below[:] = sorted((inner for inner in below if not inner.startswith(".")), key=_links_last(name))
        yield from (Path(name, file) for file in names)


def _links_last(folder: str) -> Callable[[str], Any]:
    """So that a file is known by its own name, where it has one below the folder."""
    return lambda name: (os.path.islink(os.path.join(folder, name)), name)


def _matching(pattern: Path) -> Iterator[Path]:
    """As `glob` finds them; but for `**`, `glob` goes round and round where links lead back."""
    if "**" not in pattern.parts:
        return (Path(name) for name in glob.iglob(str(pattern)))
    root = _fixed_part(pattern)
    wanted = "".join(
        "(?:[^/]+/)*" if part == "**" else f"{_END.sub('', fnmatch.translate(part)).replace('.*', '[^/]*')}/"
        for part in pattern.parts[len(root.parts) :]
    )
    matches = re.compile(wanted).fullmatch
    return (path for path in _walk(root) if matches(f"{path.relative_to(root).as_posix()}/"))


def _fixed_part(pattern: Path) -> Path:
    fixed = next(n for n, part in enumerate(pattern.parts) if glob.has_magic(part))
    return Path(*pattern.parts[:fixed])


_END = re.compile(r"\\[zZ]$")


def _readable(candidates: Iterable[Path], where: Path) -> list[Path]:
    side_files = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
    here: dict[str, Path] = {}  # by what they really are: a file that links lead to as well is there once
    for p in sorted(candidates, key=lambda p: (p.is_symlink(), p)):
        is_hidden = any(part.startswith(".") for part in _parts_below(p, where))
        if not is_hidden and p.is_file() and p.name not in side_files:
            here.setdefault(os.path.realpath(p), p)
    if not here:
        raise UserError(f"{where}: no files there{_near_miss(where)}")
    found = sorted(p for p in here.values() if _kind(p))
    for path in found:
        _check_name(path)
    if not found:
        endings = listed(sorted({f"`{p.suffix or p.name}`" for p in here.values()}), most=5)
        raise UserError(f"{where}: only files that cannot be read ({endings}); {_known_endings()}.")
    return [p for p in found if _kind(p) != "text"] or found


def _of_split(found: list[Path], folder: Path, asked: str) -> list[Path]:
    """Without the files of other splits, where there are several."""
    by_file = {path: _split_of(path, folder) for path in found}
    there = {split for split in by_file.values() if split is not None}
    if len(there) < 2:
        return found
    wanted = _split_named(asked) or asked
    if wanted not in there:
        raise UserError(f"{folder}: has the splits {listed(sorted(there))}, but not `{asked}`; say which by `split:`.")
    return [path for path, split in by_file.items() if split in (None, wanted)]


def _split_of(path: Path, folder: Path) -> str | None:
    """By its name, or by that of the folder it is in."""
    *parents, name = _parts_below(path, folder)
    names = (_split_named(part) for part in (name.partition(".")[0], *reversed(parents)))
    return next((split for split in names if split is not None), None)


def _split_named(name: str) -> str | None:
    between = r"(?:^|[-._ 0-9]|$)"
    return next((key for key, words in SPLITS.items() if re.search(f"(?i){between}(?:{words}){between}", name)), None)


def _check_name(path: Path) -> None:
    """What is kept of a run names its files, in UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UserError(f"{shown}: the name of this data file is not UTF-8; rename it.") from error


def _parts_below(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts if path.is_relative_to(folder) else (path.name,)


def _near_miss(path: Path) -> str:
    """The end of a sentence about a path that is not there."""
    if path.exists():
        return "."
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder, path = folder.parent, folder
    try:
        names = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
    except OSError:
        return "."
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    near = near or [n for n in names if Path(n).stem.lower() == path.stem.lower()][:3]
    return f"; did you mean {' or '.join(str(folder / name) for name in near)}?" if near else "."


# Reading


def _read_all(dataset: Dataset) -> Iterator[Record | RecordError]:
    if dataset.hub:
        for number, row in enumerate(_load_hub(dataset), start=1):
            yield Record(row, Origin(dataset.hub, number, "record"), is_filled=True)
        return
    readers = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "text": _read_text}
    for path in files(dataset):
        kind = _kind(path)
        try:
            if kind in ("parquet", "arrow"):
                yield from _read_columns(path, kind)
            else:
                assert kind
                with _open(path) as stream:
                    yield from readers[kind](stream, path, dataset)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: the compressed file is damaged or cut short ({error}).") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _open(path: Path) -> BinaryIO:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.endswith((".zst", ".zstd")):
        return io.BufferedReader(_Zstandard(path), 1 << 20)
    return path.open("rb")


class _Zstandard(io.RawIOBase):
    """A .zst file, of one or more frames. The library's own reader does not notice one cut short."""

    def __init__(self, path: Path):
        import zstandard

        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._frame.unused_data if self._frame and self._frame.eof else b""
            chunk = chunk or self._file.read(1 << 17)
            if not chunk:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last frame is not complete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(chunk)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines with their ends. Split at newlines alone: JSON texts may hold other separators such as U+2028."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:4]:
                raise UserError(f"{path}: the text is UTF-16; save it as UTF-8.")
            line = line.removeprefix(b"\xef\xbb\xbf")
        yield line


def _decoded(line: bytes, origin: Origin) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            "not UTF-8",
            origin,
            f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8",
        ) from error


def _read_jsonl(stream: BinaryIO, path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    is_first = True
    for number, line in enumerate(_lines(stream, path), start=1):
        if not line.strip():
            continue
        if is_first and _begins_json(line):
            yield from _read_json(stream, path, dataset)
            return
        is_first = False
        origin, size = Origin(str(path), number), len(line)
        try:
            text = _decoded(line, origin)
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


def _read_json(stream: BinaryIO, path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    """An array of records, an object around one, records one after the other, or JSONL under the wrong ending."""
    with _open(path) as again:
        lines = _lines(again, path)
        start = next((line for line in lines if line.strip()), b"")
        rest = (line for line in lines if line.strip())
        are_lines = start.lstrip().startswith(b"{") and _is_json(start) and next(rest, None) is not None
    with _open(path) as again:
        if are_lines:
            yield from _read_jsonl(again, path, dataset)
            return
        text = "".join(_decoded(line, Origin(str(path), n)) for n, line in enumerate(_lines(again, path), start=1))
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
    record_fields = {
        "messages",
        "conversations",
        "conversation",
        "input_ids",
        "prompt",
        "chosen",
        *dataset.fields.values(),
    }
    if record_fields & value.keys():
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


def _is_columns(value: dict[str, Any]) -> bool:
    """As pandas writes a table unless told otherwise: `{"prompt": {"0": ..., "1": ...}, ...}`."""
    columns = list(value.values())
    if len(columns) < 2 or not all(isinstance(one, dict) and one for one in columns):
        return False
    return all(one.keys() == columns[0].keys() for one in columns) and all(map(str.isdigit, columns[0]))


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


# NaN and Infinity, which pandas writes for missing values, stay what they are: `formats` knows where they may stand.
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
            if len(values) > 1 and not all(isinstance(one, dict) for one in (values[0], value)):
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


def _read_csv(stream: BinaryIO, path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    def ended(line: str) -> str:  # within cells, too, lines end as the program ended them that wrote the file
        return f"{line[:-2]}\n" if line.endswith("\r\n") else line

    lines = (ended(line.decode(errors="surrogateescape")) for line in _lines(stream, path))
    first = next(lines, "")
    skipped = 0
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    if said := re.fullmatch(r"sep=(.)\s*", first):  # a line of Excel's, before the header
        delimiter, first, skipped = said[1], next(lines, ""), 1
    if delimiter not in first:
        delimiter = next((d for d in ";\t|" if d in first), delimiter)

    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(_chain(first, lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    row: list[str] | None = []
    while row is not None:
        origin = Origin(str(path), rows.line_num + 1 + skipped)
        try:
            row = next(rows, None)
            if not row or not any(row):
                continue
            for text in row:
                _decoded(text.encode(errors="surrogateescape"), origin)
            if header is None:
                header = [name.strip() for name in row]
                duplicates = sorted({name for name in header if header.count(name) > 1})
                if duplicates:
                    raise UserError(f"{origin}: the column name `{duplicates[0]}` appears more than once.")
                continue
            if len(row) != len(header):
                raise RecordError("not valid CSV", origin, f"{len(row)} fields, but the header names {len(header)}")
            yield Record(dict(zip(header, row, strict=True)), origin, sum(map(len, row)))
        except csv.Error as error:
            row = []
            reason = str(error)
            if "new-line character" in reason:
                reason = (
                    "a carriage return stands outside of quotes; save the file with the line ends of Unix or Windows"
                )
            yield RecordError("not valid CSV", origin, f"not valid CSV: {reason}")
        except RecordError as error:
            if header is None:
                raise
            yield error


def _chain(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _read_columns(path: Path, kind: str) -> Iterator[Record]:
    """Of Parquet and Arrow."""
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
    """As JSON would have it: bytes are text in columns that other programs wrote (Spark), dates and times are spelled
    out. Bytes that are no text stay, for what reads them to refuse."""
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


def class_names(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """What the numbers in the first of these columns are called, where the columns say it themselves (`ClassLabel` of
    the datasets library, on the hub and in its Parquet and Arrow files); nothing where they do not, or differ."""
    if dataset.hub:
        known = [_load_hub(dataset).features.to_dict()]
    else:
        known = [_features(path) for path in files(dataset) if _kind(path) in ("parquet", "arrow")]
    found = []
    for features in known:
        feature = next((features[name] for name in names if name in features), None)
        feature = feature[0] if isinstance(feature, list) and feature else feature
        feature = feature.get("feature", feature) if isinstance(feature, dict) else {}
        found.append(feature.get("names") if isinstance(feature, dict) else None)
    first = found[0] if found and all(one == found[0] for one in found) else None
    return first if isinstance(first, list) and all(isinstance(one, str) for one in first) else []


def _features(path: Path) -> dict[str, Any]:
    """Of a file of columns, as the datasets library has written them into it."""
    import pyarrow
    import pyarrow.parquet

    try:
        if _kind(path) == "parquet":
            schema = pyarrow.parquet.read_schema(path)
        else:
            with pyarrow.memory_map(str(path)) as file:
                is_indexed = file.read(6) == b"ARROW1"
                file.seek(0)
                schema = (pyarrow.ipc.open_file if is_indexed else pyarrow.ipc.open_stream)(file).schema
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (pyarrow.ArrowException, ValueError, TypeError, KeyError):  # reading its records says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _arrow_batches(file: Any) -> Iterator[Any]:
    """Of a stream, as the datasets library writes it, or of a file with an index (Feather), as others do."""
    import pyarrow

    is_indexed = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_indexed:
        yield from pyarrow.ipc.open_stream(file)
        return
    indexed = pyarrow.ipc.open_file(file)
    yield from (indexed.get_batch(number) for number in range(indexed.num_record_batches))


def _read_text(stream: BinaryIO, path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    """One file is one record: paragraphs alone would lose their context."""
    parts = []
    for number, line in enumerate(_lines(stream, path), start=1):
        try:
            parts.append(_decoded(line, Origin(str(path), number)))
        except RecordError as error:
            yield error
            return
    text = "".join(parts).replace("\r\n", "\n")
    if text.strip():
        yield Record({"text": text}, Origin(str(path), 1), len(text))


# The hub


def _load_hub(dataset: Dataset) -> Any:
    assert dataset.hub
    if expanded(dataset.hub).exists():
        raise UserError(f"hub: {dataset.hub} is a file or folder here; say `path: {dataset.hub}`.")
    return _load_hub_cached(dataset.hub, dataset.subset, dataset.split)


@functools.lru_cache(maxsize=8)
def _load_hub_cached(name: str, subset: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"hub: {name} needs the library `datasets` (pip install datasets); or give a file with `path:`."
        ) from error
    is_offline = not hub.is_reachable()
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the hub's libraries raise errors of many kinds; all mean the same to the user
        what = f"could not be loaded: {first_line(error)[:300]}"
        if is_offline and isinstance(error, ConnectionError):
            what = f"is not in the hub's cache, and {hub.unreachable()}"
        raise UserError(
            f"hub: {name} (split {split}) {what}; check the name and the connection, or give the data as a file with "
            "`path:`."
        ) from error
