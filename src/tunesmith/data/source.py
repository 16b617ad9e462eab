"""Files, folders, globs and hub data sets -> records, one at a time, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunesmith.config.schema import Dataset
from tunesmith.data.types import Record


def files(dataset: Dataset) -> list[Path]:
    """The files behind `path`, sorted."""
    raise NotImplementedError


def read(dataset: Dataset) -> Iterator[Record]:
    """The records, in the order of the files, at most `limit` of them."""
    raise NotImplementedError


def fingerprint(dataset: Dataset) -> str:
    """A hash of everything that decides which records `read` gives."""
    raise NotImplementedError
