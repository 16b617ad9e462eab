"""What recording costs: events, losses of documents and of tokens, alerts, readings of the machine and of the weights.

    python benchmarks/recording.py --model MODEL [--config examples/demo/run.yaml] [--pairs 2] [key=value ...]
    python benchmarks/recording.py --model MODEL --in-turn [key=value ...]

Two answers. The first is exact: the seconds that the recording functions take inside a run, by name, as a share of the
run's steps. The second is what a user would see: whole runs with and without all of it, in turn, by the CPU time of
their processes, which other programs on the machine disturb least. Each run is a process of its own.

With --in-turn it is one run that records in some steps and not in others, in blocks, compared by their medians: what
kernels of the recording cost a GPU is in there, and a model is loaded and compiled once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
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
    "tunesmith.train.samples:SampleLog.write": "answers and token losses",
    "tunesmith.evaluate.loss:TokenLosses.see": "answers and token losses",
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
BLOCK, SETTLING = 6, 2
"""Steps that record, or do not, in a row; and how many of them are not counted, since steps overlap."""


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=Path, default=Path("examples/demo/run.yaml"))
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if options.in_turn:
        found = measure("in turn", options)
        print(found)
        print(f"wrote {write_result('recording', 'Steps of one run that record, and steps that do not', [found])}")
        return
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
        size = sum(one.stat().st_size for one in Path(folder, "run", "documents").glob("*"))
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    if way == "in turn":
        return {**found, "bytes_of_documents": size, "wall_seconds": round(time.monotonic() - began, 2)}
    steps, taken = found["step_seconds"], found["seconds_by"]
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
    steps = Steps(in_turn=way == "in turn")
    for place, name in FUNCTIONS.items():
        module, _, path = place.partition(":")
        owner_name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), owner_name)
        there, nothing = timed(getattr(owner, method), name, taken), silent(NOTHING.get(path))
        made = {"with": there, "without": nothing, "in turn": steps.switched(there, nothing)}[way]
        setattr(owner, method, made)
    from tunesmith.cli import main as cli

    try:
        cli.app(arguments, standalone_mode=False)
    finally:
        found = {"step_seconds": steps.seconds, "steps": steps.count, "seconds_by": taken}
        Path(said).write_text(json.dumps(steps.compared(taken) if way == "in turn" else found))


class Steps:
    """The time of all steps, as the loop counts it, and whether the present one records."""

    def __init__(self, *, in_turn: bool) -> None:
        from tunesmith.train.speed import Speed

        self.seconds, self.count, self.records = 0.0, 0, True
        self.each: dict[bool, list[float]] = {True: [], False: []}
        add, since = Speed.add, 0

        def counted(speed: Any, tokens: int, seconds: float, **more: Any) -> None:
            nonlocal since
            if "compiling" in more:  # the loop's own, not the display's
                self.seconds += seconds
                self.count += 1
                since += 1
                if in_turn and not more.get("is_warm_up"):
                    if since > SETTLING:
                        self.each[self.records].append(seconds)
                    if since >= BLOCK:
                        self.records, since = not self.records, 0
            add(speed, tokens, seconds, **more)

        Speed.add = counted

    def switched(self, there: Any, nothing: Any) -> Any:
        return lambda *given, **named: (there if self.records else nothing)(*given, **named)

    def compared(self, taken: dict[str, float]) -> dict[str, Any]:
        import torch

        on, off = (statistics.median(self.each[way]) if self.each[way] else 0.0 for way in (True, False))
        recording = sum(taken.values()) / max(1, self.count / 2)
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "steps": self.count,
            "steps_compared": [len(self.each[True]), len(self.each[False])],
            "step_seconds": {"recording": round(on, 5), "not": round(off, 5)},
            "share": on / off - 1 if off else None,
            "seconds_in_functions": round(recording, 6),
            "share_in_functions": recording / on if on else None,
            "seconds_by": {name: round(one, 5) for name, one in taken.items()},
        }


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
