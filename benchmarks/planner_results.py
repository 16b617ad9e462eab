"""What the planner's benchmark measured, kept in one file, and held against what the present model predicts for it."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner import Configuration, machine, settle
from results import write_result

from tunesmith.plan import memory, speed
from tunesmith.plan.plan import Phase
from tunesmith.plan.task import MARGIN


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Of a result, or of what the benchmark wrote while it measured; there each with when and by which code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        content = json.loads(text)
        rows = content["numbers"]["rows"]
        about = {name: value for name, value in content.items() if name != "numbers"}
        return [{"document": about, **rows[0]}, *rows[1:]]
    rows, about = [json.loads(line) for line in text.splitlines() if line.strip()], {}
    for row in rows:
        about = row.get("document", about)
        row |= {name: about[name] for name in ("date", "commit") if name in about}
    return rows


def collect(files: list[Path], *, held_out: Literal["none", "half", "all"] = "none") -> Path:
    """Write what was measured into benchmarks/results; where something was measured again, the later counts.

    `held_out`: what these files add to the first is marked so, all of it or the half that its names choose; what was
    measured before was in view all the same. A time that does not count says why, as `time_left_out`."""
    kept: dict[tuple[str, int | None], dict[str, Any]] = {}
    about: dict[str, Any] = {}
    for file in files:
        for row in read_rows(file):
            about = about or row.get("document", {})
            row.pop("document", None)
            if "failed" in row and (row["failed"] != "out of memory" or row["limit_bytes"] is None):
                print(f"left out: {row['name']}: {row['failed']}", file=sys.stderr)
                continue
            if row.get("timed") and "time_left_out" not in row and (why := why_left_out(row)):
                print(f"its time is left out, {why}: {row['name']}: {row['timed']}", file=sys.stderr)
                row["time_left_out"] = why
            if row.get("timed"):
                row["step_seconds"] = round(settled(row["timed"]), 6)
            key = row["name"], row["limit_bytes"]
            is_meant = held_out == "all" or (held_out == "half" and is_in_the_half(row["name"]))
            if is_meant and file is not files[0] and (key not in kept or kept[key].get("is_held_out")):
                row["is_held_out"] = True
            kept[key] = row
    return write_result("planner", about["what"], {"rows": list(kept.values())}, about)


def why_left_out(row: dict[str, Any]) -> str:
    """Why a time does not count; empty where it does."""
    if row["configuration"].get("cuda_graphs") and not row.get("has_recorded", True):
        return "not recorded"
    return "" if is_steady(row["timed"]) else "not steady"


def was_recorded(row: dict[str, Any]) -> bool:
    """False where passes were to be recorded and the allocator then held less than a step takes: no pool of theirs."""
    if not row["configuration"].get("cuda_graphs") or "peak_bytes" not in row:
        return True
    return row.get("has_recorded", row.get("recorded_reserved_bytes", row["peak_bytes"]) >= row["peak_bytes"])


def is_steady(times: list[float]) -> bool:
    """Whether the later half of the steps, and two at least, took about as long. One alone is taken as it is: the one
    before it, on the same queue, was not counted."""
    last = times[-max(2, len(times) // 2) :]
    return len(times) == 1 or max(last) - min(last) < 0.1 * statistics.median(last)


def settled(times: list[float]) -> float:
    """The median of the later half: first the CPU wakes up, and what others had queued runs out."""
    return statistics.median(times[len(times) // 2 :])


def is_in_the_half(name: str) -> bool:
    """By a hash of the name, whatever was measured."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0


@dataclass(frozen=True)
class Compared:
    """A recorded measurement beside what the present model predicts for it."""

    name: str
    predicted: Phase
    """The peak, loading included."""
    predicted_step: Phase
    """The peak of a step, which is what was measured."""
    predicted_speed: float
    measured_bytes: int | None
    """Allocated at the peak of a step; None where it ran out of memory."""
    measured_speed: float | None
    """Tokens a second; None where a limit was tried instead, or the time does not count."""
    limit: int | None
    """Memory of the GPU, the driver's part included, where it was limited."""
    is_held_out: bool = False
    """No constant of the model was chosen with it in view."""
    time_left_out: str = ""
    """Why the time does not count."""
    timed: int = 0
    """Steps whose median is the time."""
    commit: str = ""
    """Of the code that was measured; empty where it is that of the file."""
    was_recorded: bool = True
    """Where passes were to be recorded: there was memory for that."""

    @property
    def memory_error(self) -> float | None:
        return self.predicted_step.memory.allocated / self.measured_bytes - 1 if self.measured_bytes else None

    @property
    def speed_error(self) -> float | None:
        return self.predicted_speed / self.measured_speed - 1 if self.measured_speed else None

    @property
    def is_said_to_fit(self) -> bool:
        assert self.limit
        return self.predicted.memory.total <= (1 - MARGIN["known"]) * self.limit

    @property
    def does_fit(self) -> bool:
        """As planned: where passes could not be captured for want of memory, the step ran without."""
        return self.measured_bytes is not None and self.was_recorded


def compare(rows: list[dict[str, Any]], device: str = "cuda") -> list[Compared]:
    hardware = machine(device)
    found = []
    for row in rows:
        task, choice = settle(Configuration(**row["configuration"]), hardware, device, row.get("document_length"))
        phases = memory.timeline(task, choice)
        phase = memory.peak(phases)
        tokens = row.get("tokens", task.step_tokens)
        seconds = row.get("step_seconds") if "time_left_out" not in row else None
        context = row.get("context_bytes") or phase.memory.context
        found.append(
            Compared(
                name=row["name"],
                predicted=phase,
                predicted_step=memory.peak([one for one in phases if one.name != "loading"]),
                predicted_speed=tokens / speed.step_time(task, choice).total,
                measured_bytes=row.get("peak_bytes"),
                measured_speed=tokens / seconds if seconds else None,
                limit=row["limit_bytes"] and row["limit_bytes"] + context,
                is_held_out=row.get("is_held_out", False),
                time_left_out=row.get("time_left_out", ""),
                timed=len(row.get("timed", [])) if seconds else 0,
                commit=row.get("commit", ""),
                was_recorded=was_recorded(row),
            )
        )
    return found
