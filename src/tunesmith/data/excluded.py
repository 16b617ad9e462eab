"""Records that are to be left out of the training data, as a file names them: by content, a JSON object a line.

`{"hash": "0123456789abcdef", "data": "train", "file": "train.jsonl", "line": 7}`: the hash is of the example's tokens,
so copies of a record go with it, and the file keeps its meaning when lines move. The rest is for people.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.store import TokenStore
from tunesmith.disk import writing
from tunesmith.errors import UserError

FILE = "excluded.jsonl"


def read(path: Path) -> np.ndarray:
    """uint64: the hashes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"exclude: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"exclude: {path} is no text: {error}.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(int(json.loads(line)["hash"], 16))
            assert 0 <= found[-1] < 2**64
        except (ValueError, KeyError, TypeError, AssertionError):
            raise UserError(
                f'exclude: {path}, line {number} is not of the kind {{"hash": "0123456789abcdef"}}; `tunesmith ui` '
                "writes such files where records are marked as bad."
            ) from None
    return np.unique(np.array(found, dtype=np.uint64))


def add(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Name more records; how many the file names then."""
    known = set(read(path).tolist()) if path.exists() else set()
    lines = []
    for record in records:
        if (value := int(record["hash"], 16)) not in known:
            known.add(value)
            lines.append(json.dumps(dict(record), ensure_ascii=False) + "\n")
    with writing(path, "make room there"), path.open("ab") as stream:
        stream.write("".join(lines).encode("utf-8", "replace"))
        stream.flush()
        os.fsync(stream.fileno())
    return len(known)


def leave_out(stores: Sequence[TokenStore], path: Path) -> tuple[tuple[TokenStore, ...], str]:
    """The stores without the records that a file names, and how many they were."""
    hashes, left, count = read(path), [], 0
    for store in stores:
        is_named = np.isin(store.hashes, hashes)
        if is_named.all():
            raise UserError(f"{store.title}: {path} leaves out every one of its {len(store)} examples; see exclude.")
        count += int(is_named.sum())
        left.append(store.part(~is_named, store.title) if is_named.any() else store)
    return tuple(left), f"Left out, as {path} says: {count:,} examples."
