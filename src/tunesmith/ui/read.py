"""What the pages say of a run, out of its folder alone: the trainer is never asked.

A folder may be half-written, damaged or of another version; what cannot be read is said in `problems`, and the rest is
shown. Everything is plain JSON without NaN.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import UserError
from tunesmith.evaluate import verdicts
from tunesmith.run.folder import no_run, read_json, refuse_sweep
from tunesmith.train import events
from tunesmith.ui.log import RECENT, Digest, GrowingLog, digest_of, number
from tunesmith.ui.thin import PIXELS, smoothed, thinned

QUIET = 120.0
"""Seconds without an event after which a run on a file system without locks counts as ended."""
WARNINGS = 200
"""Warnings that are shown, the last ones."""
FIGURES = 24
"""Curves of one kind (data sets, figures) that are drawn, at most."""


@dataclass(frozen=True)
class Settled:
    """What is written when a run begins, and when it ends."""

    settings: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    problems: tuple[str, ...]


def read_settled(folder: Path) -> Settled:
    problems: list[str] = []

    def part(name: str) -> dict[str, Any]:
        try:
            found = read_json(folder / name)
        except UserError:
            problems.append(f"{name} cannot be read")
            return {}
        if found is not None and not isinstance(found, dict):
            problems.append(f"{name} is damaged")
        return found if isinstance(found, dict) else {}

    settings = part("run.json").get("settings")
    if not isinstance(settings, dict):
        problems.append("run.json holds no settings")
    return Settled(
        settings if isinstance(settings, dict) else {}, part("plan.json"), part("summary.json"), tuple(problems)
    )


def is_held(folder: Path) -> bool | None:
    """Whether a process writes this run; None where the file system has no locks. A shared lock is tried for a moment,
    which a run that begins just then waits for."""
    try:
        fd = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False


def state_of(folder: Path, found: Digest, settled: Settled) -> tuple[str, str]:
    """running, stopping, finished, stopped or failed; and why, where there is more to say."""
    held = is_held(folder)
    if held is None:
        held = found.kind == "started" and found.last is not None and time.time() - found.last < QUIET
    if held:
        return ("stopping", found.reason) if found.kind == "stopping" else ("running", "" if found.step else "starting")
    if settled.summary or found.kind == "finished":
        return "finished", ""
    if found.kind == "stopped":
        return "stopped", found.reason
    return "failed", "its process ended without finishing or stopping; `tunesmith train` continues it"


def overview(folder: Path, found: Digest, settled: Settled) -> dict[str, Any]:
    """What stands in a list of runs, and at the top of a run's page."""
    state, why = state_of(folder, found, settled)
    settings = settled.settings
    left = None
    if state == "running" and found.step_seconds and found.total_steps:
        left = max(0, found.total_steps - found.step) * found.step_seconds
    return {
        "state": state,
        "why": why,
        "model": text(settings.get("model")),
        "method": text(settings.get("method")),
        "objective": text(settings.get("objective", "sft")),
        "data": data_names(settings.get("data")),
        "step": found.step,
        "total_steps": found.total_steps,
        "loss": found.loss,
        "best": found.best,
        "held_out": found.held_out,
        "is_exact": found.is_exact,
        "tokens_per_second": found.tokens_per_second,
        "memory": found.memory,
        "memory_limit": number(settled.plan.get("memory_limit")),
        "began": found.began,
        "last": found.last,
        "left": left,
        "sparks": [compact(value) for value in found.sparks],
        "problems": list(settled.problems),
    }


def page(folder: Path, log: GrowingLog, *, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """All that the page of one run shows; its curves between two steps, where those are given."""
    settled = read_settled(folder)
    records = log.records
    recent = [one for one in records[-4 * RECENT :] if one["event"] == "step"][-RECENT:]
    found = digest_of(records, recent or _last_steps(records), ())
    top = overview(folder, found, settled)
    started = next((one for one in reversed(records) if one["event"] == "started"), {})
    return top | {
        "trained_parameters": number(started.get("trained_parameters")),
        "versions": flat(started.get("versions")),
        "result": text(settled.summary.get("result")),
        "curves": curves(records, steps=steps),
        "clip": number(settled.settings.get("max_grad_norm")),
        "predicted": prediction(settled.plan),
        "measured": measured(records),
        "plan": reasons(settled.plan),
        "plan_facts": flat({key: settled.plan[key] for key in settled.plan if key not in PREDICTIONS}),
        "checkpoints": checkpoints(folder, records),
        "routers": routers(records),
        "alerts": alerts(records),
        "verdicts": verdicts_of(folder),
        "profile": profile_of(folder),
        "warnings": [
            {"time": number(one.get("time")), "message": text(one.get("message"))}
            for one in records
            if one["event"] in ("warning", "note")
        ][-WARNINGS:],
        "settings": flat(settled.settings),
    }


def alerts(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last of them, each with its evidence and what to do."""
    said = [one for one in records if one["event"] == "alert"][-WARNINGS:]
    parts = ("name", "evidence", "advice")
    return [
        {"step": one.get("step"), "time": number(one.get("time"))} | {part: text(one.get(part)) for part in parts}
        for one in said
    ]


def verdicts_of(folder: Path) -> list[dict[str, Any]]:
    """What `tunesmith eval --against` has found, the newest first."""
    words = ("task", "measure", "verdict")
    numbers = ("value", "against", "difference", "low", "high", "p", "items", "items_to_tell")
    return [
        {
            "time": number(one.get("time")),
            "against": text(one.get("against")),
            "summary": text(one.get("summary")),
            "rows": [
                {name: text(row.get(name)) for name in words} | {name: number(row.get(name)) for name in numbers}
                for row in one["results"]
                if isinstance(row, Mapping)
            ],
        }
        for one in reversed(verdicts.read(folder / "evaluations"))
    ]


def profile_of(folder: Path) -> dict[str, Any] | None:
    """What `profile_steps` has recorded of a step."""
    try:
        found = read_json(folder / PROFILE)
    except UserError:
        return None
    if not isinstance(found, Mapping):
        return None
    analysis = found.get("analysis")
    analysis = analysis if isinstance(analysis, Mapping) else {}
    kernels = analysis.get("kernels")
    kernels = [one for one in kernels if isinstance(one, Mapping)] if isinstance(kernels, list) else []
    regions = flat(analysis.get("device_seconds")) or flat(analysis.get("host_seconds"))
    names = ("step", "tokens_per_second", "tflops", "share_of_peak")
    return {name: number(found.get(name)) for name in names} | {
        "device": text(found.get("device")),
        "bound": text(found.get("bound_by")),
        "step_seconds": number(analysis.get("step_seconds")),
        "busy": number(analysis.get("busy")),
        "regions": {text(name): number(seconds) for name, seconds in regions.items()},
        "kernels": [
            {"name": text(one.get("name"))} | {name: number(one.get(name)) for name in ("calls", "seconds", "share")}
            for one in kernels[:12]
        ],
    }


PROFILE = "profile/report.json"
PREDICTIONS = frozenset(
    {"memory", "phases", "time", "reasons", "version", "peak", "memory_limit", "host_memory", "disk"}
)


def _last_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(itertools.islice((one for one in reversed(records) if one["event"] == "step"), RECENT))[::-1]


def curves(records: Sequence[Mapping[str, Any]], *, steps: tuple[int, int] | None = None) -> dict[str, Any]:
    """Everything that has a course over the steps: rows that share `step`, `tokens` and `seconds`, and held-out points.
    `is_thinned` says that there are steps which are not among the rows."""
    done = {one["step"]: one for one in records if one["event"] == "step"}
    evaluations = {one["step"]: one for one in records if one["event"] == "evaluation" and "step" in one}
    numbers = sorted(done.keys() | evaluations.keys())
    rows = [done.get(step, {}) for step in numbers]
    columns = {
        name: [_value(row.get(name)) for row in rows] for name in ("loss", "learning_rate", "grad_norm", "memory")
    }
    columns["smoothed"] = smoothed(columns["loss"])
    columns["tokens_per_second"] = [_value(_rate(row)) for row in rows]
    tokens = list(itertools.accumulate(number(row.get("tokens")) or 0.0 for row in rows))
    seconds = list(itertools.accumulate(number(row.get("seconds")) or 0.0 for row in rows))
    data = by_name(rows, "losses")
    figures = by_name(rows, "figures")
    memory_by = by_name(rows, "memory_by")  # of some steps
    looked_at = {place for place, row in enumerate(rows) if row.get("memory_by")} if memory_by else set()
    looked_at = set(sorted(looked_at)[:: max(1, len(looked_at) // PIXELS)])
    shown = [place for place, step in enumerate(numbers) if steps is None or steps[0] <= step <= steps[1]]
    begin, end = (shown[0], shown[-1] + 1) if shown else (0, 0)
    wanted = [columns["loss"], columns["grad_norm"], columns["tokens_per_second"], *figures.values()]
    kept = thinned([one[begin:end] for one in wanted])
    evaluated = {place for place, step in enumerate(numbers) if step in evaluations}  # few, and shown beyond the range
    balance = _balance(records, numbers)
    looked_at |= {place for place, row in enumerate(balance) if row}
    places = sorted(evaluated | looked_at | {begin + int(place) for place in kept})

    def pick(values: Sequence[float]) -> list[float | None]:
        return [compact(values[place]) for place in places]

    held_out = [evaluations.get(numbers[place], {}) for place in places]
    return {
        "step": [numbers[place] for place in places],
        "tokens": pick(tokens),
        "seconds": pick(seconds),
        **{name: pick(values) for name, values in columns.items()},
        "data": {name: pick(smoothed(values)) for name, values in data.items()} if len(data) > 1 else {},
        "figures": {name: pick(values) for name, values in figures.items()},
        "memory_by": {name: _points([values[place] for place in places]) for name, values in memory_by.items()},
        "routers": {
            name: _points(values)
            for name, values in by_name([{"routers": balance[place]} for place in places], "routers").items()
        },
        "held_out": {name: _points(values) for name, values in by_name(held_out, "losses", "loss").items()},
        "held_out_figures": {name: _points(values) for name, values in by_name(held_out, "figures").items()},
        "tasks": _task_points(held_out),
        "skipped": [step for step, one in done.items() if one.get("skipped") is True][-1000:],
        "is_thinned": len(kept) < end - begin,
        "whole": {
            name: [compact(values[0]), compact(values[-1])] if values else [0, 0]
            for name, values in (("step", numbers), ("tokens", tokens), ("seconds", seconds))
        },
    }


def _balance(records: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[dict[str, float]]:
    """The busiest expert's share in the least even layer, and in the middle one, in times the mean, of each step in
    which routers were looked at."""
    found: dict[int, dict[str, float]] = {}
    for one in records:
        given = one.get("busiest") if one["event"] == "routers" else None
        busiest = [value for each in (given if isinstance(given, list) else []) if (value := number(each)) is not None]
        if busiest and "step" in one:
            found[one["step"]] = {"least even layer": max(busiest), "middle layer": statistics.median(busiest)}
    return [found.get(step, {}) for step in steps]


def routers(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the routers of an MoE model did when they were looked at last, by layer."""
    last = next((one for one in reversed(records) if one["event"] == "routers"), None)
    if last is None:
        return None
    names = ("layers", "busiest", "entropy", "idle")
    columns = [[number(value) for value in last[name]] if isinstance(last.get(name), list) else [] for name in names]
    shares = last.get("shares")
    experts = [len(one) if isinstance(one, list) else 0 for one in shares] if isinstance(shares, list) else []
    rows = [dict(zip((*names, "experts"), row, strict=True)) for row in zip(*columns, experts, strict=False)]
    return {"step": number(last.get("step")), "rows": rows}


def by_name(rows: Sequence[Mapping[str, Any]], field: str, overall: str = "") -> dict[str, list[float]]:
    """The columns of a field that holds figures by name; with `overall`, another field beside them where there are
    several names or none."""
    names = dict.fromkeys(name for row in rows if isinstance(row.get(field), Mapping) for name in row[field])
    found = {
        str(name): [_value(row[field].get(name) if isinstance(row.get(field), Mapping) else None) for row in rows]
        for name in itertools.islice(names, FIGURES)
    }
    if overall and len(found) != 1 and any(overall in row for row in rows):
        found = {"all": [_value(row.get(overall)) for row in rows]} | found
    return found


def _points(values: Sequence[float]) -> list[list[float | None]]:
    """Place and value of each value of a column that has few."""
    return [[place, compact(value)] for place, value in enumerate(values) if math.isfinite(value)]


def _task_points(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[list[float | None]]]]:
    """Place and score, with its interval, of each evaluation that has them, by task and measure."""
    found: dict[str, dict[str, list[list[float | None]]]] = {}
    for place, row in enumerate(rows):
        tasks = row.get("tasks")
        for title, measures in itertools.islice(tasks.items() if isinstance(tasks, Mapping) else (), FIGURES):
            for name, score in itertools.islice(measures.items() if isinstance(measures, Mapping) else (), FIGURES):
                numbers = [number(one) for one in score] if isinstance(score, list) and len(score) == 3 else [None]
                if numbers[0] is not None:
                    each = found.setdefault(str(title), {}).setdefault(str(name), [])
                    each.append([place, *(one if one is None else compact(one) for one in numbers)])
    return found


def prediction(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan has said before the run began."""
    memory = {name: value for name, one in flat(plan.get("memory")).items() if (value := number(one))}
    seconds = {name: value for name, one in flat(plan.get("time")).items() if (value := number(one))}
    on_gpu = plan.get("device") == "cuda"  # whose allocator counts neither context nor fragmentation
    beyond = sum(memory.get(name, 0.0) for name in ("context", "fragmentation")) if on_gpu else 0.0
    arithmetic = sum(seconds.get(name, 0.0) for name in ("matmuls", "attention"))
    a_step = (number(plan.get("sequences_per_step")) or 0.0) * (number(plan.get("sequence_length")) or 0.0)
    return {
        "memory": sum(memory.values()) - beyond if memory else None,
        "memory_by": memory,
        "memory_of": predicted_phases(plan),
        "memory_limit": number(plan.get("memory_limit")),
        "step_seconds": sum(seconds.values()) or None,
        "seconds_by": seconds,
        "tokens_per_second": a_step / sum(seconds.values()) if seconds else None,
        "arithmetic_tokens_per_second": a_step / arithmetic if arithmetic else None,
    }


def predicted_phases(plan: Mapping[str, Any]) -> dict[str, float]:
    """What the plan has said of the categories that a run measures (`train.phases`)."""
    given = plan.get("phases")
    phases = {
        str(one.get("name")): {name: number(size) or 0.0 for name, size in flat(one.get("memory")).items()}
        for one in (given if isinstance(given, list) else [])
        if isinstance(one, Mapping)
    }
    forward, update = phases.get("end of the forward pass", {}), phases.get("optimizer step", {})
    found = {
        "weights and states": sum(forward.get(name, 0.0) for name in ("weights", "adapter", "master", "optimizer")),
        "activations": forward.get("activations", 0.0),
        "gradients": update.get("gradients", 0.0),
    }
    return {name: size for name, size in found.items() if size}


def measured(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the run has said at its end."""
    event = next((one for one in reversed(records) if one["event"] == "finished"), None)
    if event is None:
        return None
    names = ("seconds", "tokens_per_second", "predicted_tokens_per_second", "measured_memory", "predicted_memory")
    memory = event.get("memory")
    pairs = memory.items() if isinstance(memory, Mapping) else ()
    return {name: number(event.get(name)) for name in names} | {
        "memory": {
            str(name): [number(one) for one in pair]
            for name, pair in pairs
            if isinstance(pair, list) and len(pair) == 2
        },
        "spent": {name: number(one) for name, one in flat(event.get("spent")).items()},
    }


def reasons(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    given = plan.get("reasons")
    found = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    return [{name: text(one.get(name)) for name in ("topic", "choice", "why")} for one in found]


def checkpoints(folder: Path, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last 200 checkpoints that were written, and which of them are still there."""
    try:
        there = {one.name for one in os.scandir(folder / "checkpoints") if one.is_dir()}
    except OSError:
        there = set()
    said = [one for one in records if one["event"] == "checkpoint" and "step" in one][-200:]
    return [
        {
            "step": one["step"],
            "time": number(one.get("time")),
            "seconds": number(one.get("seconds")),
            "is_there": f"step-{one['step']:08}" in there,
        }
        for one in said
    ]


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings in which runs differ, by run; `output` always does."""
    names = sorted({name for one in settings.values() for name in one} - {"output"})
    rows = [{"name": name, "values": {run: one.get(name) for run, one in settings.items()}} for name in names]
    return [row for row in rows if len({repr(value) for value in row["values"].values()}) > 1]


def flat(mapping: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, without those that are not set."""
    made: dict[str, Any] = {}
    for key, value in mapping.items() if isinstance(mapping, Mapping) else ():
        if isinstance(value, Mapping):
            made |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            made |= flat({str(place): one for place, one in enumerate(value, start=1)}, f"{prefix}{key}.")
        elif value is not None and value != []:
            made[f"{prefix}{key}"] = value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return made


def data_names(data: Any) -> list[str]:
    sources = data if isinstance(data, list) else [data]
    found = (one.get("path") or one.get("hub") if isinstance(one, Mapping) else one for one in sources)
    return [text(one) for one in found if one]


def text(value: Any) -> str:
    return "" if value is None else str(value).encode("utf-8", "replace").decode()


def compact(value: float | None) -> float | None:
    """Six digits, which no chart shows more of; None of what is no number."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _value(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def _rate(row: Mapping[str, Any]) -> float | None:
    seconds, tokens = number(row.get("seconds")), number(row.get("tokens"))
    return tokens / seconds if seconds and tokens else None


def open_log(folder: Path) -> GrowingLog:
    """The history of the run in `folder`; refused where there is none."""
    if not (folder / "run.json").is_file() and not (folder / events.FILE).is_file():
        refuse_sweep(folder)
        raise no_run(folder)
    log = GrowingLog(folder)
    log.update()
    return log
