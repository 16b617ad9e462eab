"""A run's events.jsonl, read while it grows: the whole history for a page, a digest of it for a list.

A line counts once it is complete. Where the file was replaced or has shrunk, it is read anew.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.train import events

STEP = b'{"event": "step"'
"""How the lines begin that a run has most of, as `EventLog` writes them."""
RECENT = 20
"""Steps over which speed is averaged."""
SPARKS = 40
"""Points of a sparkline."""
LONG = 2**18
BLOCK, SAMPLE = 2**15, 2**11
"""Bytes above which a file is glanced at first, and how many are read at its ends and between."""


class GrowingLog:
    """The history of a run as far as it is written; `update` reads only what was added since."""

    def __init__(self, folder: Path):
        self.path = folder / events.FILE
        self._forget()

    def _forget(self) -> None:
        self._history = events.History()
        self._offset = 0
        self._file: tuple[int, int] | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        return self._history.records

    def update(self) -> bool:
        """Whether anything was added, or all of it has changed."""
        try:
            stream = self.path.open("rb")
        except OSError:
            had_any = self._offset > 0
            self._forget()
            return had_any
        with stream:
            status = os.fstat(stream.fileno())
            is_other = self._file not in (None, (status.st_dev, status.st_ino)) or status.st_size < self._offset
            if is_other:
                self._forget()
            self._file = (status.st_dev, status.st_ino)
            stream.seek(self._offset)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._history.add_line(line)
        return is_other or bool(whole)


@dataclass(frozen=True)
class Digest:
    """What a list says of a run's events."""

    kind: str | None = None
    """Kind of the last event that says how the run stands: started, stopping, stopped or finished."""
    reason: str = ""
    began: float | None = None
    last: float | None = None
    """When the last event was written."""
    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    best: float | None = None
    """The lowest held-out loss."""
    held_out: float | None = None
    """The last one."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    memory: int | None = None
    sparks: tuple[float, ...] = ()
    is_exact: bool = True
    """Made from all events; else held-out losses are missing."""


def digest(folder: Path) -> Digest:
    """From all events, of which most are steps, and not parsed but for some."""
    try:
        content = (folder / events.FILE).read_bytes()
    except OSError:
        return Digest()
    starts, is_step = _lines(content)
    steps = starts[is_step]
    recent = list(_sound(_at(content, steps[-RECENT:])))
    history = events.History()
    for record in [*_sound(_at(content, starts[~is_step])), *recent[-1:]]:
        history.add(record)
    chosen = steps[:: max(1, len(steps) // SPARKS)]
    sparks = tuple(value for one in _sound(_at(content, chosen)) if (value := number(one.get("loss"))) is not None)
    return digest_of(history.records, recent, sparks)


def glance(folder: Path) -> Digest:
    """The digest from a long file's beginning, its end and some places between, in a fifth of the time: a list of
    hundreds of runs is there at once, and held-out losses, which may stand anywhere, follow."""
    try:
        fd = os.open(folder / events.FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Digest()
    try:
        size = os.fstat(fd).st_size
        if size <= LONG:
            return digest(folder)
        head = os.pread(fd, BLOCK, 0).split(b"\n")[:-1]
        tail = os.pread(fd, BLOCK, size - BLOCK).split(b"\n")[1:-1]
        between = [os.pread(fd, SAMPLE, BLOCK + place * (size - 2 * BLOCK) // SPARKS) for place in range(SPARKS)]
    except OSError:
        return Digest()
    finally:
        os.close(fd)
    recent = list(_sound([one for one in tail if one.startswith(STEP)][-RECENT:]))
    others = _sound(one for one in (*head, *tail) if not one.startswith(STEP))
    steps = (_first_step(one) for one in between)
    sparks = (number(one.get("loss")) for one in _sound(one for one in steps if one))
    found = digest_of([*others, *recent[-1:]], recent, tuple(one for one in sparks if one is not None))
    return replace(found, best=None, held_out=None, is_exact=False)


def _first_step(block: bytes) -> bytes:
    """The first step that begins and ends within a block."""
    start = block.find(b"\n" + STEP) + 1
    return block[start : block.find(b"\n", start)] if start else b""


def _lines(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where complete lines begin, and which of them are steps."""
    characters = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    is_step = np.ones(len(starts), dtype=bool)
    for place, letter in enumerate(STEP):
        is_step[is_step] = characters[np.minimum(starts[is_step] + place, len(content) - 1)] == letter
    return starts, is_step


def _at(content: bytes, starts: np.ndarray) -> list[bytes]:
    return [content[start : content.index(b"\n", start)] for start in starts]


def digest_of(records: list[dict[str, Any]], recent: list[dict[str, Any]], sparks: tuple[float, ...]) -> Digest:
    started = [one for one in records if one["event"] == "started"]
    said = [one for one in records if one["event"] in ("started", "stopping", "stopped", "finished")]
    evaluations = [one for one in events.comparable(records) if one["event"] == "evaluation"]
    losses = [value for one in evaluations if (value := number(one.get("loss"))) is not None]
    last = recent[-1] if recent else {}
    seconds = sum(number(one.get("seconds")) or 0.0 for one in recent)
    tokens = sum(number(one.get("tokens")) or 0.0 for one in recent)
    times = [value for one in (*records[-1:], *recent[-1:]) if (value := number(one.get("time"))) is not None]
    return Digest(
        kind=said[-1]["event"] if said else None,
        reason=str(said[-1].get("reason", "")) if said else "",
        began=number(started[0].get("time")) if started else None,
        last=max(times, default=None),
        total_steps=_whole(started[-1].get("total_steps")) if started else None,
        step=last.get("step", 0),
        loss=number(last.get("loss")),
        best=min(losses, default=None),
        held_out=losses[-1] if losses else None,
        step_seconds=seconds / len(recent) if seconds else None,
        tokens_per_second=tokens / seconds if seconds else None,
        memory=_whole(last.get("memory")),
        sparks=sparks,
    )


def number(value: Any) -> float | None:
    """A finite number, or None of anything else that a damaged file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _sound(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        record = events.parse(line)
        if record is not None and isinstance(record.get("step", 0), int):
            yield record
