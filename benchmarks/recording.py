"""What recording costs: events, losses of documents, alerts, readings of the machine and of the weights.

    python benchmarks/recording.py --model MODEL [--config examples/demo/run.yaml] [--pairs 2] [key=value ...]

Two answers. The first is exact: the seconds that the recording functions take inside a run, by name, as a share of the
run's steps. The second is what a user would see: whole runs with and without all of it, in turn, by the CPU time of
their processes, which other programs on the machine disturb least. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import write_result

FUNCTIONS = {
    "tunesmith.train.events:EventLog.write": "events",
    "tunesmith.train.documents:DocumentLog.write": "losses of documents",
    "tunesmith.train.step:_Documents.add": "sums by document",
    "tunesmith.train.step:_Documents.send": "sums by document",
    "tunesmith.train.step:_Documents.found": "sums by document",
    "tunesmith.train.alerts:Alerts.see": "alerts",
    "tunesmith.train.alerts:Alerts.see_machine": "alerts",
    "tunesmith.train.machine:Machine.after_step": "machine",
    "tunesmith.train.phases:PhaseMemory.now": "memory by category",
    "tunesmith.train.vitals:Vitals.see_step": "vitals",
    "tunesmith.train.vitals:Vitals.see_weights": "vitals",
}
"""All that is recorded or looked at in a step; and what it is called in the results."""
NOTHING: dict[str, Any] = {
    "Alerts.see": [],
    "Alerts.see_machine": [],
    "PhaseMemory.now": {},
    "_Documents.found": (None, []),
}
"""What those return that must return something, in a run that records nothing."""


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=Path, default=Path("examples/demo/run.yaml"))
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    rows = []
    for pair in range(options.pairs):
        for way in ("with", "without") if pair % 2 == 0 else ("without", "with"):
            rows.append({"recording": way, **measure(way, options)})
            print(rows[-1], flush=True)
    shares = [row["share_of_steps"] for row in rows if row["recording"] == "with"]
    seconds = {
        way: sum(row["cpu_seconds"] for row in rows if row["recording"] == way) / options.pairs
        for way in ("with", "without")
    }
    whole = seconds["with"] / seconds["without"] - 1
    print(f"recording takes {max(shares):.3%} of the steps' time; whole runs differ by {whole:+.2%} of their CPU time")
    what = "What recording costs on the demo: inside its steps, and whole runs with and without"
    print(f"wrote {write_result('recording', what, rows)}")


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        said = Path(folder) / "said.json"
        given = [f"model={options.model}", f"output={folder}/run", *options.overrides]
        command = [sys.executable, __file__, "--child", way, str(said), "train", str(options.config), *given]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        before = os.times()
        began = time.monotonic()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found = json.loads(said.read_text())
        size = sum(one.stat().st_size for one in Path(folder, "run", "documents").glob("*")) if way == "with" else 0
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    steps = found.pop("step_seconds")
    taken = found["seconds_by"]
    return {
        "steps": found["steps"],
        "step_seconds": round(steps, 3),
        "recording_seconds": round(sum(taken.values()), 5),
        "recording_seconds_by": {name: round(one, 5) for name, one in taken.items()},
        "share_of_steps": sum(taken.values()) / steps if steps else 0.0,
        "bytes_of_documents": size,
        "wall_seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(used, 2),
    }


def child(way: str, said: str, arguments: list[str]) -> None:
    """`tunesmith ARGUMENTS` with its recording functions timed, or replaced by nothing."""
    taken: dict[str, float] = {}
    for place, name in FUNCTIONS.items():
        module, _, path = place.partition(":")
        owner_name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        made = timed(getattr(owner, method), name, taken) if way == "with" else silent(NOTHING.get(path))
        setattr(owner, method, made)
    steps = Steps()
    from tunesmith.cli import main as cli

    try:
        cli.app(arguments, standalone_mode=False)
    finally:
        found = {"step_seconds": steps.seconds, "steps": steps.count, "seconds_by": taken}
        Path(said).write_text(json.dumps(found))


class Steps:
    """The time of all steps, as the loop counts it."""

    def __init__(self) -> None:
        from tunesmith.train.speed import Speed

        self.seconds, self.count = 0.0, 0
        add = Speed.add

        def counted(speed: Any, tokens: int, seconds: float, **more: Any) -> None:
            if "compiling" in more:  # the loop's own, not the display's
                self.seconds += seconds
                self.count += 1
            add(speed, tokens, seconds, **more)

        Speed.add = counted


def timed(function: Any, name: str, taken: dict[str, float]) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            taken[name] = taken.get(name, 0.0) + time.perf_counter() - began

    return call


def silent(answer: Any) -> Any:
    return lambda *_, **__: answer


if __name__ == "__main__":
    main()
