"""Two hosts with a link that is slowed step by step: what a step takes by each way of sharing the weights.

    python benchmarks/two_hosts.py [--megabits 1000 200 40]        (as root)

The hosts are network namespaces of this machine, two ranks on each, started by `tunesmith launch hosts`. Each way is
one run of full fine-tuning, two micro-batches a step, whose link is slowed while it trains; what crosses the link is
counted by the kernel. The planner, told what a plain connection between the hosts carries, makes its choice for each
speed. Writes benchmarks/results/two_hosts.json. The model is so small that on a slow link communication is all that
counts: these times say how the ways compare, nothing about a machine.
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

IN_INT8 = {"gather": "int8", "reduce": "int8"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"sharding": "zero3", "mesh": {"shard": 4}},
    "hierarchical": {"sharding": "hierarchical", "mesh": {"replicate": 2, "shard": 2}},
    "hybrid": {"sharding": "hybrid", "mesh": {"replicate": 2, "shard": 2}},
    "int8": {"sharding": "hierarchical", "mesh": {"replicate": 2, "shard": 2}, **IN_INT8},
}
PATIENCE = 300
"""Seconds for a step, or for a run to start."""
MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_key_value_heads": 4}
SEQUENCES = 8
MEASURED = 3
"""Steps at each speed, after one during which it changed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, nargs="+", default=[1000, 200, 40], help="speeds, fastest first")
    from results import write_result

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this
    rows = measure(parser.parse_args().megabits)
    what = "Two hosts of two ranks with a slow link between them: seconds of a step of full fine-tuning"
    print(write_result("two_hosts", what, rows).read_text())


def measure(megabits: list[float]) -> list[dict[str, Any]]:
    """For each speed: seconds and megabytes over the link of a step by each way, and what the planner would choose."""
    with tempfile.TemporaryDirectory(prefix="tunesmith-two-hosts-") as name, two_hosts() as hosts:
        folder = prepare(Path(name))
        rows: list[dict[str, Any]] = []
        for speed in megabits:
            hosts.slow(speed)
            measured = hosts.bandwidth()
            rows.append({"megabits": speed, "measured_megabits": round(measured * 8 / 1e6, 1)})
            rows[-1]["planner"] = choice(folder, measured)
        for way in WAYS:
            for row, (seconds, sent) in zip(rows, run(hosts, folder, way, megabits), strict=True):
                row[f"{way}_seconds"], row[f"{way}_megabytes"] = round(seconds, 2), round(sent / 1e6, 1)
        for row in rows:
            row["fastest"] = min(WAYS, key=lambda way: row[f"{way}_seconds"])
    return rows


def prepare(folder: Path) -> Path:
    """Model, data and settings; a plan for each way."""
    from tiny import write_data
    from tiny_model import make_tiny_model
    from tunesmith.assemble import plan_run
    from tunesmith.config.load import from_mapping
    from tunesmith.plan.plan import Mesh

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
    plan = plan_run(from_mapping(settings))
    for name, way in WAYS.items():
        changes = {**way, "mesh": Mesh(**way["mesh"]), "threads": 1, "micro_batch": 1}
        (folder / f"{name}.json").write_text(plan.changed(**changes).model_dump_json())
    return folder


def choice(folder: Path, network: float) -> str:
    """The way that the planner takes over a network of so many bytes a second, or what else it takes."""
    from tunesmith.config.load import load
    from tunesmith.plan.hardware import probe, shared
    from tunesmith.plan.models import read_facts
    from tunesmith.plan.search import search

    settings = load(folder / "run.yaml", ()).run
    hardware = shared(probe(), ranks=2, nodes=2).changed(network=network)
    chosen = search(settings, read_facts(settings.model), hardware, pins={"micro_batch": 1}).plan
    for name, way in WAYS.items():
        if (chosen.sharding, chosen.gather) == (way["sharding"], way.get("gather", "plain")):
            return name
    return chosen.sharding


def run(hosts: Hosts, folder: Path, way: str, megabits: list[float]) -> list[tuple[float, float]]:
    """Seconds and bytes over the link of a step, at each speed."""
    hosts.slow(megabits[0])
    output = folder / way
    command = [sys.executable, "-m", "tunesmith", "launch", "hosts", "run.yaml", f"output={output}"]
    command += ["--hosts", ",".join(hosts.names), "--ranks", "2", "--reach", hosts.reach, "--plan", f"{way}.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TUNESMITH_CACHE": str(folder / "cache")}
    found = []
    with (folder / f"{way}.log").open("w") as log:
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
