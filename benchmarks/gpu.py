"""Speed and memory of training steps on one GPU, ours and other systems', in one call.

    python benchmarks/gpu.py [--out FOLDER] [--deadline SECONDS] [--only TEXT ...]
    python benchmarks/gpu.py --collect FOLDER/gpu.jsonl ...
    python benchmarks/gpu.py --compare FOLDER/gpu.jsonl

Each case runs in a process of its own. Several compile at once, on models of two layers; each then builds its whole
model when there is memory for it, and is timed alone (`pool.py`). What comes out is written to FOLDER/gpu.jsonl; the
second form takes such files, oldest first, into benchmarks/results/gpu.json, with our speed over that of the fastest
other system on the same workload; the third holds ours against those there, after a change that should alter nothing,
in gpu_again.json: the speeds against others stay those of one call. Cases of goal `throughput` may take what memory
they need; those of `low memory` checkpoint every layer and save what else the workload says. Two take minutes, and are
measured only when `--only` names them: `long`, `70b`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import gpu_profile
from gpu_worker import needs_files
from pool import TURN_SECONDS, Order, Pool
from results import read_rows, write_result

from tunesmith.measure.results import document

GIB = 2**30
TOP = 25
"""Kernels of a profile that are kept in the result."""
WHAT = "Training steps on one GPU, random weights at published shapes: median of the steps after warm-up"
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # of each worker: there are nearly as many as the CPU has cores
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
}
"""Of the workers' environment."""


@dataclass(frozen=True)
class Case:
    workload: str
    system: str
    goal: str
    """`throughput` or `low memory`."""
    gib: float
    """Set aside for it on the GPU."""
    matmul_dtype: str = "bf16"
    checkpointed_layers: int = 0
    first_gib: float = 9
    """While it compiles on two layers."""
    warmup: int = 3
    steps: int = 6
    cuda_graphs: bool = False
    """Ours: with passes captured as CUDA graphs, as the planner has them for this workload."""
    turn_seconds: float = TURN_SECONDS
    """The most it may be alone."""
    is_large: bool = False
    """Takes minutes: measured when asked for by name."""

    @property
    def name(self) -> str:
        return name_of(asdict(self))


CASES = (
    Case("lora-8b", "tunesmith", "throughput", 78, "fp8"),
    Case("lora-8b", "tunesmith", "throughput", 78),
    Case("lora-8b", "tunesmith", "low memory", 30, "fp8", checkpointed_layers=32),
    Case("lora-8b", "unsloth", "throughput", 82),
    Case("lora-8b", "unsloth", "low memory", 40, checkpointed_layers=32),
    Case("qlora-8b", "tunesmith", "throughput", 44, "fp8", checkpointed_layers=1, cuda_graphs=True),
    Case("qlora-8b", "tunesmith", "low memory", 24, "fp8", checkpointed_layers=32, cuda_graphs=True),
    Case("qlora-8b", "unsloth", "throughput", 42),
    Case("qlora-8b", "unsloth", "low memory", 24, checkpointed_layers=32),
    Case("full-7b", "tunesmith", "throughput", 106, "fp8", first_gib=13),
    Case("full-7b", "tunesmith", "throughput", 106, first_gib=13),
    Case("full-7b", "liger", "throughput", 110, first_gib=13),
    Case("lora-8b-packed", "tunesmith", "throughput", 78, "fp8"),
    Case("lora-8b-packed", "liger", "throughput", 110),
    Case("lora-8b-packed", "trl", "throughput", 120),
    Case("lora-8b-packed", "unsloth", "throughput", 90),
    Case("qlora-70b", "tunesmith", "low memory", 60, "fp8", 80, warmup=1, steps=3, is_large=True),
    Case(
        "lora-8b-long",
        "tunesmith",
        "low memory",
        115,
        "fp8",
        32,
        first_gib=40,
        warmup=0,
        steps=1,
        turn_seconds=300,
        is_large=True,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no case is begun")
    parser.add_argument("--workers", type=int, default=16, help="processes at once")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--collect", nargs="+", type=Path, help="files to take into the result, instead of measuring")
    parser.add_argument("--compare", type=Path, help="a file to hold against the result, instead of measuring")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    if options.compare:
        print(f"wrote {again(options.compare)}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    measure(choose(options.only), options.out, workers=options.workers, deadline=options.deadline)


def choose(only: list[str]) -> list[Case]:
    """The smallest first: while they are measured one after the other, the large ones compile beside them."""
    chosen = [
        case
        for case in CASES
        if any(case.workload.endswith(text) if case.is_large else text in case.name for text in only or [""])
        and (only or not case.is_large)
    ]
    return sorted(chosen, key=lambda case: case.gib)


def measure(cases: list[Case], folder: Path, *, workers: int, deadline: float) -> None:
    import torch

    has_gpu = torch.cuda.is_available()
    budget = torch.cuda.get_device_properties(0).total_memory - (workers + 3) * GIB if has_gpu else 1 << 60
    os.environ.update({**SETTINGS, **os.environ})
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="tunesmith-gpu-") as models,
        ExitStack() as ends,
        (folder / "gpu.jsonl").open("a") as rows,
        (folder / "gpu.log").open("a") as log,
    ):
        command = [sys.executable, str(Path(__file__).with_name("gpu_worker.py")), models]
        ends.callback(write_models(cases, command, log))
        rows.write(json.dumps({"document": document(WHAT, {})}) + "\n")
        # The largest may wait until the others are done: none of them has the memory for long.
        ways = {"reuses_workers": False, "patience": math.inf}
        pool = Pool(command, workers=workers, budget=budget, deadline=deadline, log=log, **ways)
        for case in cases:
            sizes = {"size": int(case.gib * GIB), "first_size": int(case.first_gib * GIB)}
            pool.add(Order(asdict(case), **sizes, turn_seconds=case.turn_seconds))
        for order, found in pool.run():
            rows.write(json.dumps(order.payload | found) + "\n")
            rows.flush()
            print(f"{time.monotonic() - began:4.0f} s {name_of(order.payload)}: {words(found)}", flush=True)


def write_models(cases: list[Case], command: list[str], log: IO[str]) -> Callable[[], None]:
    """Begin to write what systems want to load from a disk; what is returned ends that."""
    shapes = {case.workload for case in cases if needs_files(asdict(case))}
    writing = [subprocess.Popen([*command, workload], stdout=log, stderr=log) for workload in shapes]

    def end() -> None:
        for process in writing:
            process.kill()
            process.wait()

    return end


def name_of(row: dict[str, Any]) -> str:
    return f"{row['workload']}, {row['system']}, {row['goal']}, {row['matmul_dtype']}"


def words(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"]
    notes = "".join(f"; {note}" for note in found.get("notes", ()))
    return f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_bytes'] / GIB:.1f} GiB{notes}"


def collect(files: list[Path]) -> Path:
    """Of each case the newest row, with the speeds of those before it; one that failed only where none did not. What is
    in the result already is older."""
    about: dict[str, Any] = {}
    kept = {name_of(row): row for row in read_rows("gpu")}
    for file in files:
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "document" in line:
                about = line["document"]
                continue
            name, row = name_of(line), settle(line) | {"date": about["date"], "commit": about["commit"]}
            before = kept.get(name)
            keeps_before = before is not None and "failed" in row and "failed" not in before
            if before is not None:
                print(f"left out: {name}: {words(row if keeps_before else before)}", file=sys.stderr)
            if not keeps_before:
                if before is not None and "failed" not in before:
                    row["earlier"] = [*before.get("earlier", []), round(before["tokens_per_second"])]
                kept[name] = row
    order = {case.name: index for index, case in enumerate(CASES)}
    rows = sorted(kept.values(), key=lambda row: order.get(name_of(row), len(order)))
    return write_result("gpu", WHAT, compare(rows), about=about)


def again(file: Path) -> Path:
    """Speed and memory of our cases in `file` over those in the result; those of other cases stay."""
    before = {name_of(row): row for row in read_rows("gpu")}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    about = next(line["document"] for line in lines if "document" in line)
    rows = {row["case"]: row for row in read_rows("gpu_again")}
    for row in (line for line in lines if "tokens_per_second" in line):
        known = before[name_of(row)]
        rows |= {
            name_of(row): {
                "case": name_of(row),
                "commit": about["commit"],
                "tokens_per_second_before": round(known["tokens_per_second"]),
                "tokens_per_second": round(row["tokens_per_second"]),
                "speed_ratio": round(row["tokens_per_second"] / known["tokens_per_second"], 4),
                "memory_ratio": round(row["peak_bytes"] / known["peak_bytes"], 4),
                "commit_before": known["commit"],
            }
        }
    what = "The same training steps on one GPU after layers were prepared by one pipeline, over those before"
    return write_result("gpu_again", what, list(rows.values()), about=about | {"what": what})


def settle(row: dict[str, Any]) -> dict[str, Any]:
    """Of the profile the share of a step in which a kernel ran (the step as timed, since recording slows the CPU
    down), what the time went to, and the kernels at the top."""
    if "profile" not in row:
        return row
    profile = row["profile"]
    busy = min(1.0, profile["kernel_ms"] / row["step_seconds"] / 1000)
    kinds = gpu_profile.kinds(profile, matmul_dtype=row["matmul_dtype"])
    kept = {"kernel_ms": profile["kernel_ms"], "kinds": kinds, "kernels": profile["kernels"][:TOP]}
    return row | {"busy": round(busy, 4), "profile": kept}


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours with their speed over that of the fastest other system on the same workload with the same goal."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["system"] != "tunesmith" and "failed" not in row:
            key = row["workload"], row["goal"]
            best[key] = max(best.get(key, 0.0), row["tokens_per_second"])
    return [
        row | {"to_best_peer": round(row["tokens_per_second"] / best[row["workload"], row["goal"]], 3)}
        if row["system"] == "tunesmith" and "failed" not in row and (row["workload"], row["goal"]) in best
        else row
        for row in rows
    ]


if __name__ == "__main__":
    main()
