"""What happened in a run, as typed records: one JSON object a line in events.jsonl.

The file only ever grows. After a kill the run continues from a checkpoint, so some steps may stand in it twice; a
`resumed` record says from where, and `read` gives the history as if the run had never been interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tunesmith.disk import writing

FILE = "events.jsonl"


Score = tuple[float, float | None, float | None]
"""Of a task, and the ends of its interval of 95%, where there is one."""


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str]


@dataclass(frozen=True)
class Started(Event):
    kind = "started"
    total_steps: int
    trained_parameters: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Resumed(Event):
    kind = "resumed"
    step: int
    has_other_held_out: bool = False
    """Evaluations from here are of other data than those before."""


@dataclass(frozen=True)
class Step(Event):
    kind = "step"
    step: int
    """Steps done."""
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    target_tokens: float
    """Sum of the target weights, which is their number unless messages have weights of their own."""
    seconds: float
    memory: int
    """Peak bytes on the device so far."""
    losses: dict[str, float] = field(default_factory=dict)
    """Loss by data set."""
    skipped: bool = False
    """fp16 only: the gradients overflowed and the weights stayed as they were."""
    figures: dict[str, float] = field(default_factory=dict, metadata={"is_optional": True})
    """What the objective reports besides its loss: of preferences the accuracy, margin and rewards."""
    figures_of: dict[str, dict[str, float]] = field(default_factory=dict, metadata={"is_optional": True})
    """The same by data set."""
    memory_by: dict[str, int] = field(default_factory=dict, metadata={"is_optional": True})
    """Bytes on the device by what they are for, in steps in which that is looked at, as far as the device tells."""
    waited: float = field(default=0.0, metadata={"is_logged": False})
    """Seconds in which nothing was computed, for want of data. Not logged, as it depends on the sitting."""
    is_warm_up: bool = field(default=False, metadata={"is_logged": False})
    """One of the first of a sitting, or layers were compiled in it: its time says nothing about the others. Not logged:
    the history of a run does not depend on its sittings."""


@dataclass(frozen=True)
class Compiled(Event):
    """Layers were compiled during a step."""

    kind = "compiled"
    step: int
    seconds: float


@dataclass(frozen=True)
class Evaluation(Event):
    kind = "evaluation"
    step: int
    loss: float
    """Over all held-out target tokens."""
    losses: dict[str, float]
    target_tokens: float
    seconds: float
    figures: dict[str, float] = field(default_factory=dict, metadata={"is_optional": True})
    figures_of: dict[str, dict[str, float]] = field(default_factory=dict, metadata={"is_optional": True})
    tasks: dict[str, dict[str, Score]] = field(default_factory=dict, metadata={"is_optional": True})
    """By task and measure."""


class HasBalance(Protocol):
    """How evenly one router has dealt out tokens (`model.routers.Balance`)."""

    @property
    def shares(self) -> list[float]: ...
    @property
    def busiest(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def idle(self) -> int: ...


@dataclass(frozen=True)
class Routers(Event):
    """How evenly the routers of an MoE model have dealt out the tokens of a step, now and then; lists by router."""

    kind = "routers"
    step: int
    layers: list[int]
    """The number of the layer that each is in, from 0."""
    busiest: list[float]
    """The share of the busiest expert, in times the mean."""
    entropy: list[float]
    """Of the experts' shares: 1 where all are equal, 0 where one has all."""
    idle: list[int]
    """Experts without a token."""
    shares: list[list[float]]
    """Of the choices, by expert."""

    @classmethod
    def of(cls, step: int, layers: list[int], routers: Sequence[HasBalance]) -> Routers:
        return cls(
            step,
            layers,
            [round(balance.busiest, 4) for balance in routers],
            [round(balance.entropy, 4) for balance in routers],
            [balance.idle for balance in routers],
            [balance.shares for balance in routers],
        )


@dataclass(frozen=True)
class Checkpointed(Event):
    kind = "checkpoint"
    step: int
    seconds: float


@dataclass(frozen=True)
class Warned(Event):
    kind = "warning"
    message: str


@dataclass(frozen=True)
class Noted(Event):
    """Something worth knowing that nobody needs to act on."""

    kind = "note"
    message: str


@dataclass(frozen=True)
class Alert(Event):
    """Something about the run that somebody should look at (`train.alerts`)."""

    kind = "alert"
    step: int
    """Steps done."""
    name: str
    """What it is: `loss spike`, `overfitting`."""
    evidence: str
    advice: str
    is_fatal: bool = field(default=False, metadata={"is_logged": False})
    """The run ends with it, and its error says the same."""


@dataclass(frozen=True)
class Stopping(Event):
    """Somebody asked the run to stop, and it will as soon as it can."""

    kind = "stopping"
    reason: str


@dataclass(frozen=True)
class Stopped(Event):
    kind = "stopped"
    step: int
    reason: str


@dataclass(frozen=True)
class Finished(Event):
    kind = "finished"
    step: int
    seconds: float
    """From the start of the program."""
    tokens_per_second: float
    """Of all steps, without what they compiled."""
    predicted_memory: int
    measured_memory: int
    predicted_tokens_per_second: float = 0.0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes predicted and measured, by what they are for, as far as the device tells."""
    spent: dict[str, float] = field(default_factory=dict)
    """The seconds, by what they were spent on; those of `training` are the ones that `tokens_per_second` counts."""


KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


class EventLog:
    """Appends events to the run's file, from any thread; a line that a kill cut short is removed first."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._lock = threading.Lock()
        with writing(self.path, "make room there or choose another output"):
            _remove_partial_line(self.path)
            self._stream = self.path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        record = {"event": event.kind, "time": round(time.time(), 3), **dataclasses.asdict(event)}
        for of_record in dataclasses.fields(event):
            is_left_out = of_record.metadata.get("is_optional", False) and not record[of_record.name]
            if is_left_out or not of_record.metadata.get("is_logged", True):
                del record[of_record.name]
        try:
            with self._lock:
                self._stream.write(json.dumps(record, allow_nan=False) + "\n")
                self._stream.flush()
        except OSError:
            pass  # a full disk costs lines of the log, not the run; the checkpoint's warning tells the user

    def close(self) -> None:
        with contextlib.suppress(OSError):  # writes what is left, which a full disk refuses once more
            self._stream.close()


class History:
    """Events as one history: what a resumed run did again replaces what it did before.

    A sitting that was killed before its first checkpoint is begun anew, which no `resumed` record says.
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._lines = 0
        self._damaged: list[int] = []
        self._has_just_started = False

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them; and a warning, where lines of the file could not be read."""
        if not self._damaged:
            return self._records
        lines = "1 line" if len(self._damaged) == 1 else f"{len(self._damaged)} lines"
        message = f"{lines} of {FILE} cannot be read and are left out of the history; the first is line "
        time = self._records[-1].get("time", 0.0) if self._records else 0.0
        return [*self._records, {"event": Warned.kind, "time": time, "message": f"{message}{self._damaged[0]}."}]

    def add_line(self, line: bytes) -> None:
        """A line of the file, whole; a damaged one does not lose the others."""
        self._lines += 1
        if (record := parse(line)) is not None:
            self.add(record)
        elif _is_damaged(line):
            self._damaged.append(self._lines)

    def add(self, record: dict[str, Any]) -> None:
        if record["event"] == "started":
            self._has_just_started = True
        elif "step" in record:
            if record["event"] == "resumed":
                self._forget_after(record["step"])
            elif self._has_just_started:
                self._forget_after(-1)
            self._has_just_started = False
        self._records.append(record)

    def _forget_after(self, step: int) -> None:
        self._records = [old for old in self._records if not _is_after(old, step)]


def read(folder: Path) -> list[dict[str, Any]]:
    """The run's events as one history."""
    history = History()
    if (folder / FILE).exists():
        with (folder / FILE).open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):  # else it is being written, or was cut short by a kill
                    history.add_line(line)
    return history.records


def damage(records: list[dict[str, Any]]) -> str | None:
    """What `read` says of lines that it left out."""
    last = records[-1] if records else {}
    return last["message"] if last.get("event") == Warned.kind and "cannot be read and" in last["message"] else None


def comparable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without evaluations of other held-out data than the newest ones are of."""
    changes = (
        n for n, record in enumerate(records) if record["event"] == Resumed.kind and record.get("has_other_held_out")
    )
    begins = max(changes, default=0)
    return [record for n, record in enumerate(records) if n >= begins or record["event"] != Evaluation.kind]


def parse(line: str | bytes) -> dict[str, Any] | None:
    """The record of a line; None of one that was cut short by a kill, or that another version wrote."""
    record = _object(line)
    return record if record is not None and record.get("event") in KINDS else None


def _object(line: str | bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_sound = isinstance(record, dict) and isinstance(record.get("event"), str)
    return record if is_sound and isinstance(record.get("step", 0), int) else None


def _is_damaged(line: bytes) -> bool:
    """Neither empty nor an event, be it one of another version."""
    return bool(line.strip()) and _object(line) is None


def _is_after(record: dict[str, Any], step: int) -> bool:
    return record.get("step", -1) > step and record["event"] != "resumed"


def _remove_partial_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as stream:
        size = stream.seek(0, os.SEEK_END)
        while size > 0:
            start = max(0, size - 4096)
            stream.seek(start)
            block = stream.read(size - start)
            newline = block.rfind(b"\n")
            if newline >= 0:
                stream.truncate(start + newline + 1)
                return
            size = start
        stream.truncate(0)
