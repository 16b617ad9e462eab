"""Two hosts with a link that is slowed step by step: what a step takes by each way of sharing the weights.

    python benchmarks/two_hosts.py [--megabits 1000 200 40] [--times 2]        (as root)

The hosts are network namespaces of this machine, two ranks on each, started by `tunesmith launch hosts`. Each way is
one run of full fine-tuning, two micro-batches a step, whose link is slowed while it trains; what crosses the link is
counted by the kernel. The planner, told what a plain connection between the hosts carries, makes its choice for each
speed, of all ways and of those without stages, and its prediction for each way. Writes
benchmarks/results/two_hosts.json. The model is so small that on a slow link communication is all that counts: these
times say how the ways compare, nothing about a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from hosts import Hosts, two_hosts  # noqa: E402
from tunesmith.plan.plan import Plan  # noqa: E402

IN_INT8 = {"quantized_all_gather": "int8", "quantized_reduce_scatter": "int8"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"sharding": "zero3", "mesh": {"shard": 4}},
    "hierarchical": {"sharding": "hierarchical", "mesh": {"replicate": 2, "shard": 2}},
    "hybrid": {"sharding": "hybrid", "mesh": {"replicate": 2, "shard": 2}},
    "int8": {"sharding": "hierarchical", "mesh": {"replicate": 2, "shard": 2}, **IN_INT8},
    "pipeline": {"sharding": "ddp", "mesh": {"pipeline": 2, "replicate": 2}},
}
WHOLE = [name for name, way in WAYS.items() if "pipeline" not in way["mesh"]]
"""Those that share weights alone, without cutting the model into stages."""
PATIENCE = 300
"""Seconds for a step, or for a run to start."""
MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_key_value_heads": 4}
SEQUENCES = 8
MEASURED = 3
"""Steps at each speed, after one during which it changed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, nargs="+", default=[1000, 200, 40], help="speeds, fastest first")
    parser.add_argument("--times", type=int, default=2, help="runs of each way, of which the fastest counts")
    from results import write_result

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this
    given = parser.parse_args()
    rows = measure(given.megabits, given.times)
    what = "Two hosts of two ranks with a slow link between them: seconds of a step of full fine-tuning"
    print(write_result("two_hosts", what, rows).read_text())


def measure(megabits: list[float], times: int = 1) -> list[dict[str, Any]]:
    """For each speed: seconds and megabytes over the link of a step by each way, and what the planner would choose."""
    with tempfile.TemporaryDirectory(prefix="tunesmith-two-hosts-") as name, two_hosts() as hosts:
        folder = prepare(Path(name))
        rows: list[dict[str, Any]] = []
        for speed in megabits:
            hosts.slow(speed)
            measured = hosts.bandwidth()
            rows.append({"megabits": speed, "measured_megabits": round(measured * 8 / 1e6, 1)})
            planned = {way: plan_for(folder, measured, way).time.total for way in WAYS}
            rows[-1] |= {"planner": choice(folder, measured), "planner_whole": choice(folder, measured, pipeline=1)}
            rows[-1] |= {f"{way}_predicted": round(seconds, 2) for way, seconds in planned.items()}
        for way in [way for _ in range(times) for way in WAYS]:
            for row, (seconds, sent) in zip(rows, run(hosts, folder, way, megabits), strict=True):
                row[f"{way}_seconds"] = min(round(seconds, 2), row.get(f"{way}_seconds", float("inf")))
                row[f"{way}_megabytes"] = round(sent / 1e6, 1)
        for row in rows:
            for name, ways in {"fastest": WAYS, "fastest_whole": WHOLE}.items():
                row[name] = min(ways, key=lambda way: row[f"{way}_seconds"])
    return rows


def prepare(folder: Path) -> Path:
    """Model, data and settings; a plan for each way."""
    from tiny import write_data
    from tiny_model import make_tiny_model
    from tunesmith.config.load import from_mapping
    from tunesmith.plan.plan import Mesh
    from tunesmith.run.choose import new_plan

    model = make_tiny_model(folder / "model", **MODEL)
    write_data(folder / "train.jsonl", 200)
    settings = {
        "model": str(model),
        "method": "full",
        "data": [{"path": str(folder / "train.jsonl")}],
        "sequence_length": 32,
        "batch_tokens": SEQUENCES * 32,
        "steps": 100_000,
        "learning_rate": 1e-4,
        "save_every": 100_000,
        "precision": "fp32",
        "device": "cpu",
        "output": "run",
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    plan = new_plan(from_mapping(settings))
    for name, way in WAYS.items():
        changes = {**way, "mesh": Mesh(**way["mesh"]), "threads": 1, "micro_batch": 1}
        (folder / f"{name}.json").write_text(plan.changed(**changes).model_dump_json())
    return folder


def choice(folder: Path, network: float, **pins: Any) -> str:
    """The way that the planner takes over a network of so many bytes a second, or what else it takes."""
    chosen = plan_for(folder, network, **pins)
    taken = (chosen.sharding, chosen.quantized_all_gather, chosen.mesh.pipeline)
    for name, way in WAYS.items():
        if taken == (way["sharding"], way.get("quantized_all_gather", "plain"), way["mesh"].get("pipeline", 1)):
            return name
    return f"{chosen.sharding}, {chosen.mesh.pipeline} stages"


def plan_for(folder: Path, network: float, way: str | None = None, **pins: Any) -> Plan:
    """The planner's own, or its prediction for a way."""
    from tunesmith.config.load import load
    from tunesmith.plan.hardware import probe, shared
    from tunesmith.plan.models import read_facts
    from tunesmith.plan.search import search

    settings = load(folder / "run.yaml", ()).run
    hardware = shared(probe(), ranks=2, nodes=2).changed(network=network)
    if way is not None:
        mesh = {"replicate": 1, "shard": 1, "pipeline": 1, **WAYS[way]["mesh"]}
        pins |= {
            "quantized_all_gather": "plain",
            "quantized_reduce_scatter": "plain",
            "schedule": "1f1b",
            **WAYS[way],
            **mesh,
        }
        pins.pop("mesh")
    return search(settings, read_facts(settings.model), hardware, pins={"micro_batch": 1, **pins}).plan


def run(hosts: Hosts, folder: Path, way: str, megabits: list[float]) -> list[tuple[float, float]]:
    """Seconds and bytes over the link of a step, at each speed."""
    hosts.slow(megabits[0])
    output = Path(tempfile.mkdtemp(prefix=f"{way}-", dir=folder))
    command = [sys.executable, "-m", "tunesmith", "launch", "hosts", "run.yaml", f"output={output}"]
    command += ["--hosts", ",".join(hosts.names), "--ranks", "2", "--reach", hosts.reach, "--plan", f"{way}.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TUNESMITH_CACHE": str(folder / "cache")}
    found = []
    with output.with_suffix(".log").open("w") as log:
        started = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            for speed in megabits:
                seconds = wait_for_steps(started, output, log.name, 2 if speed == megabits[0] else 0)
                hosts.slow(speed)
                first = len(seconds) + 1  # the step during which the speed changed does not count
                wait_for_steps(started, output, log.name, first)
                before = hosts.sent()
                seconds = wait_for_steps(started, output, log.name, first + MEASURED)[first : first + MEASURED]
                found.append((statistics.median(seconds), (hosts.sent() - before) / MEASURED))
        finally:
            hosts.slow(megabits[0])
            started.send_signal(signal.SIGTERM)
            started.wait(120)
    return found


def wait_for_steps(started: subprocess.Popen, output: Path, log: str, count: int) -> list[float]:
    """The seconds of each step done, once there are so many."""
    from tunesmith.train import events

    give_up = time.monotonic() + PATIENCE
    while True:
        seconds = [one["seconds"] for one in events.read(output) if one["event"] == "step"]
        if len(seconds) >= count:
            return seconds
        if started.poll() is not None or time.monotonic() > give_up:
            raise SystemExit(f"The run over two hosts has stopped or hangs:\n{Path(log).read_text()}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
