"""Speed and memory of training steps on one GPU, ours and other systems', in one call.

    python benchmarks/gpu.py [--out FOLDER] [--deadline SECONDS] [--only TEXT ...]
    python benchmarks/gpu.py --collect FOLDER/gpu.jsonl ...

Each case runs in a process of its own. Several build and compile at once, and each is timed alone (`pool.py`). What
comes out is written to FOLDER/gpu.jsonl at once; the second form makes benchmarks/results/gpu.json of such files, with
our speed over that of the fastest other system on the same workload in the same call. `fast` cases may take what memory
they need; `tight` ones compute every layer again and save what else the workload says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pool import Order, Pool
from results import write_result

from tunesmith.measure.results import document

GIB = 2**30
WHAT = "Training steps on one GPU, random weights at published shapes: median of the steps after warm-up"


@dataclass(frozen=True)
class Case:
    workload: str
    system: str
    goal: str
    """`fast` or `tight`."""
    gib: float
    """Set aside for it on the GPU."""
    products: str = "bf16"
    recompute_layers: int = 0

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.system}, {self.goal}, {self.products}"


CASES = (
    Case("lora-8b", "tunesmith", "fast", 76, "fp8"),
    Case("lora-8b", "tunesmith", "fast", 80, recompute_layers=1),
    Case("lora-8b", "tunesmith", "tight", 30, "fp8", recompute_layers=32),
    Case("lora-8b", "unsloth", "fast", 82),
    Case("lora-8b", "unsloth", "tight", 40, recompute_layers=32),
    Case("qlora-8b", "tunesmith", "fast", 42, "fp8", recompute_layers=1),
    Case("qlora-8b", "tunesmith", "tight", 24, "fp8", recompute_layers=32),
    Case("qlora-8b", "unsloth", "fast", 42),
    Case("qlora-8b", "unsloth", "tight", 24, recompute_layers=32),
    Case("full-7b", "tunesmith", "fast", 106, "fp8"),
    Case("full-7b", "tunesmith", "fast", 110, recompute_layers=1),
    Case("full-7b", "liger", "fast", 110),
    Case("lora-8b-packed", "tunesmith", "fast", 76, "fp8"),
    Case("lora-8b-packed", "liger", "fast", 110),
    Case("lora-8b-packed", "trl", "fast", 120),
    Case("lora-8b-packed", "unsloth", "fast", 90),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no case is begun")
    parser.add_argument("--workers", type=int, default=5, help="processes at once")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--collect", nargs="+", type=Path, help="files to make the result of, instead of measuring")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES if not options.only or any(text in case.name for text in options.only)]
    measure(chosen, options.out, workers=options.workers, deadline=options.deadline)


def measure(cases: list[Case], folder: Path, *, workers: int, deadline: float) -> None:
    import torch

    budget = torch.cuda.get_device_properties(0).total_memory - (workers + 1) * GIB
    command = [sys.executable, str(Path(__file__).with_name("gpu_worker.py")), str(folder / "models")]
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    with (folder / "gpu.jsonl").open("a") as rows, (folder / "gpu.log").open("a") as log:
        rows.write(json.dumps({"document": document(WHAT, {})}) + "\n")
        pool = Pool(command, workers=workers, budget=budget, deadline=deadline, log=log, reuses_workers=False)
        for case in cases:
            size = int(case.gib * GIB)
            pool.add(Order(asdict(case), size=size, first_size=size))
        for order, found in pool.run():
            row = asdict(Case(**order.payload)) | found
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            print(f"{time.monotonic() - began:4.0f} s {Case(**order.payload).name}: {words(found)}", flush=True)


def words(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"]
    notes = "".join(f"; {note}" for note in found.get("notes", ()))
    return f"{found['tokens_per_second']:,.0f} tokens/s, {found['peak_bytes'] / GIB:.1f} GiB{notes}"


def collect(files: list[Path]) -> Path:
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    head = next(line["document"] for line in lines if "document" in line)
    rows = [line for line in lines if "document" not in line]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["system"] != "tunesmith" and "failed" not in row:
            key = row["workload"], row["goal"]
            best[key] = max(best.get(key, 0.0), row["tokens_per_second"])
    for row in rows:
        if "failed" not in row and row["system"] == "tunesmith" and (row["workload"], row["goal"]) in best:
            row["to_best_peer"] = round(row["tokens_per_second"] / best[row["workload"], row["goal"]], 3)
    order = {case.name: index for index, case in enumerate(CASES)}
    rows.sort(key=lambda row: order.get(Case(**{name: row[name] for name in Case.__dataclass_fields__}).name, 99))
    return write_result("gpu", WHAT, rows, about=head)


if __name__ == "__main__":
    main()
