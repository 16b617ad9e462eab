"""Files, folders, globs and hub data sets -> records, one at a time, each with the place it came from.

JSONL, CSV and Parquet are streamed, so memory does not grow with the file. A record that cannot be read is told with
its file and line, and the next one is read; a file that cannot be read is an error. Only blank lines are skipped. Which
files there are is the business of `files`, what the records mean that of `convert`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tunesmith import hub
from tunesmith.data.column_files import features_of, read_columns
from tunesmith.data.csv_files import read_csv
from tunesmith.data.files import data_files, kind_of
from tunesmith.data.json_files import read_json, read_jsonl
from tunesmith.data.lines import decoded, open_file, read_lines
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset


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
    for path in data_files(dataset):
        digest.update("".join(path.suffixes[-2:]).lower().encode())
        try:
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return digest.hexdigest()


def class_names(dataset: Dataset, names: Sequence[str]) -> list[str]:
    """What the numbers in the first of these columns are called, where the columns say it themselves (`ClassLabel` of
    the datasets library, on the hub and in its Parquet and Arrow files); nothing where they do not, or differ."""
    if dataset.hub:
        schemas = [_load_hub(dataset).features.to_dict()]
    else:
        schemas = [features_of(path) for path in data_files(dataset) if kind_of(path) in ("parquet", "arrow")]
    names_of_files = [_names_of_classes(features, names) for features in schemas]
    if not names_of_files or any(others != names_of_files[0] for others in names_of_files):
        return []
    class_names = names_of_files[0]
    is_named = isinstance(class_names, list) and all(isinstance(name, str) for name in class_names)
    return class_names if is_named else []


def _names_of_classes(features: dict[str, Any], columns: Sequence[str]) -> Any:
    """What the datasets library has written as the names of the first of these columns, or of the items in its
    lists."""
    feature = next((features[column] for column in columns if column in features), None)
    feature = feature[0] if isinstance(feature, list) and feature else feature
    feature = feature.get("feature", feature) if isinstance(feature, dict) else {}
    return feature.get("names") if isinstance(feature, dict) else None


def _read_all(dataset: Dataset) -> Iterator[Record | RecordError]:
    if dataset.hub:
        for number, row in enumerate(_load_hub(dataset), start=1):
            yield Record(row, Origin(dataset.hub, number, "record"), is_filled=True)
        return
    for path in data_files(dataset):
        try:
            yield from _read_file(path, dataset)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: the compressed file is damaged or cut short ({error}).") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _read_file(path: Path, dataset: Dataset) -> Iterator[Record | RecordError]:
    kind = kind_of(path)
    if kind in ("parquet", "arrow"):
        yield from read_columns(path, kind)
        return
    with open_file(path) as stream:
        if kind == "jsonl":
            yield from read_jsonl(stream, path, dataset)
        elif kind == "json":
            yield from read_json(path, dataset)
        elif kind == "csv":
            yield from read_csv(stream, path)
        else:
            assert kind == "text"
            yield from _read_text(stream, path)


def _read_text(stream: BinaryIO, path: Path) -> Iterator[Record | RecordError]:
    """One file is one record: paragraphs alone would lose their context."""
    parts = []
    for number, line in enumerate(read_lines(stream, path), start=1):
        try:
            parts.append(decoded(line, Origin(str(path), number)))
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
