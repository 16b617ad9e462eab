"""The loss of each document of each step, kept beside the events: what leads from a spike to its records.

RUN/documents/  sets.json      the data sets, and under which keys the token cache has them
                rank-N.bin     what rank N has computed: blocks of a step each; `rank-N.old.bin` the steps before

Ten bytes a document. A rank keeps the last `MOST` to twice as many bytes and then forgets the oldest steps. A step that
a resumed run did again stands there twice, and the later block counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tunesmith.checkpoint.files import write_atomic

FOLDER, SETS = "documents", "sets.json"
MAGIC = 0x54534431
HEAD = np.dtype([("magic", "<u4"), ("step", "<u4"), ("count", "<u4")])
ROW = np.dtype([("source", "<u2"), ("record", "<u4"), ("loss", "<f2"), ("weight", "<f2")])
"""Data set, number of the whole example in its token store, mean loss of its targets, and their weight together."""
MOST = 1 << 25
LARGEST = 60000.0
"""That 16 bits can say."""


class DocumentLog:
    """Appends the blocks of this rank. A full disk costs what is to be written, not the run."""

    def __init__(self, folder: Path, rank: int, sets: Sequence[tuple[str, str]]):
        self.path = folder / FOLDER / f"rank-{rank}.bin"
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                content = {"format": 1, "sets": [{"title": title, "key": key} for title, key in sets]}
                write_atomic(self.path.parent / SETS, (json.dumps(content, indent=1) + "\n").encode())
            _remove_partial_block(self.path)

    def write(self, step: int, rows: np.ndarray) -> None:
        """`rows` are of `ROW`; `step` counts from 1."""
        if not len(rows):
            return
        head = np.array([(MAGIC, step, len(rows))], dtype=HEAD)
        with suppress(OSError):
            with self.path.open("ab", buffering=0) as stream:
                stream.write(head.tobytes() + rows.tobytes())
                size = stream.tell()
            if size > MOST:
                self.path.replace(self.path.with_suffix(".old.bin"))


def rows_of(sources: np.ndarray, records: np.ndarray, sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Documents with targets, those of one example together."""
    keys, place = np.unique(np.stack([sources, records]), axis=1, return_inverse=True)
    total, weight = (np.bincount(place.ravel(), values, keys.shape[1]) for values in (sums, weights))
    rows = np.zeros(keys.shape[1], dtype=ROW)
    rows["source"], rows["record"] = keys
    with np.errstate(invalid="ignore", divide="ignore"):
        rows["loss"] = np.clip(total / weight, -LARGEST, LARGEST)
    rows["weight"] = np.minimum(weight, LARGEST)
    return rows[weight > 0]


def read(folder: Path) -> dict[int, np.ndarray]:
    """The rows of each step that is kept, of all ranks."""
    by_step: dict[int, list[np.ndarray]] = {}
    ranks = {path.name.split(".")[0] for path in (folder / FOLDER).glob("rank-*.bin")}
    for rank in sorted(ranks):
        mine: dict[int, np.ndarray] = {}
        for name in (f"{rank}.old.bin", f"{rank}.bin"):
            with suppress(OSError):
                mine |= dict(_blocks((folder / FOLDER / name).read_bytes()))
        for step, rows in mine.items():
            by_step.setdefault(step, []).append(rows)
    return {step: _together(by_step[step]) for step in sorted(by_step)}


def read_sets(folder: Path) -> list[tuple[str, str]]:
    """Title and key of each data set; nothing where they cannot be read."""
    try:
        content = json.loads((folder / FOLDER / SETS).read_text(encoding="utf-8"))
        return [(str(data_set["title"]), str(data_set["key"])) for data_set in content["sets"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _together(parts: list[np.ndarray]) -> np.ndarray:
    """Several ranks may each have a part of a document."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate(parts)
    weights = rows["weight"].astype(np.float64)
    return rows_of(rows["source"].astype(np.int64), rows["record"].astype(np.int64), rows["loss"] * weights, weights)


def _blocks(content: bytes) -> Iterator[tuple[int, np.ndarray]]:
    """The step and the rows of each block that is whole."""
    at = 0
    while at + HEAD.itemsize <= len(content):
        head = np.frombuffer(content, dtype=HEAD, count=1, offset=at)[0]
        end = at + HEAD.itemsize + int(head["count"]) * ROW.itemsize
        if head["magic"] != MAGIC or end > len(content):
            return
        yield int(head["step"]), np.frombuffer(content, dtype=ROW, count=int(head["count"]), offset=at + HEAD.itemsize)
        at = end


def _remove_partial_block(path: Path) -> None:
    if not path.exists():
        return
    block_bytes = (HEAD.itemsize + rows.nbytes for _, rows in _blocks(path.read_bytes()))
    with path.open("rb+") as stream:
        stream.truncate(sum(block_bytes))
