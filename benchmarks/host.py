"""What the CPU needs to launch a layer's kernels, forward and backward, and where it spends that time.

    python benchmarks/host.py [--device cpu] [--layers 16] [--top 30] [--only TEXT]

Layers are narrow and tokens few, so that a GPU waits for the CPU; small models train at this speed. Each way of
training is measured in a process of its own. Times are those of the fastest of some steps, without the profiler; the
profile has the backward pass too, which is run by the same thread for that. On a CPU the layers' own arithmetic counts.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import subprocess
import sys
import time
from typing import Any

from results import write_result

WAYS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "full, fp8": {"method": "full", "matmul_dtype": "fp8"},
    "lora": {"method": "lora"},
    "lora, fp8": {"method": "lora", "matmul_dtype": "fp8"},
    "lora, fp8, checkpointed": {"method": "lora", "matmul_dtype": "fp8", "checkpoint": True},
    "lora, fp8, recorded": {"method": "lora", "matmul_dtype": "fp8", "cuda_graphs": True},
    "qlora": {"method": "qlora"},
    "qlora, fp8": {"method": "qlora", "matmul_dtype": "fp8"},
}
TOKENS = 256
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--only", default="", help="Ways whose name has this in it.")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.device, options.layers, options.top)))
        return
    rows = []
    for way in WAYS:
        if options.only not in way:
            continue
        command = [sys.executable, *sys.argv, "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{way}: {row['layer_ms']} ms a layer, {row['step_ms']} ms a step\n{row.pop('profile')}", flush=True)
        rows.append({"way": way, **row})
    print(f"wrote {write_result('host', 'Time of the CPU to launch a layer, forward and backward', rows)}")


def measure(way: str, device: str, layers: int, top: int) -> dict[str, Any]:
    import torch

    from tunesmith.measure import bench

    torch.autograd.set_multithreading_enabled(False)
    chosen = WAYS[way]
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    few = {"vocab_size": 512, "max_position_embeddings": TOKENS}
    found = {}
    for count in (layers, layers // 2):  # what is outside of the layers drops out of the difference
        bench.SHAPES["narrow"] = {**shape, **few, "num_hidden_layers": count}
        workload = bench.Workload("narrow", chosen["method"], 1, TOKENS)
        plan = bench.plan_for(
            workload,
            device=device,
            matmul_dtype=chosen.get("matmul_dtype", "plain"),
            checkpointed_layers=count if chosen.get("checkpoint") else 0,
            compiled=True,
        )
        step = bench.build(workload, plan.model_copy(update={"cuda_graphs": chosen.get("cuda_graphs", False)}))
        (batch,) = bench.batches(workload, 1)
        times = [launch(step, batch) for _ in range(STEPS)]
        found[count] = min(times) * 1000
        if count == layers:
            profile = profiled(step, batch, top)
    each = (found[layers] - found[layers // 2]) / (layers - layers // 2)
    return {"layer_ms": round(each, 3), "step_ms": round(found[layers], 2), "layers": layers, "profile": profile}


def launch(step: Any, batch: Any) -> float:
    """Seconds until everything of a step is queued."""
    from tunesmith.measure.bench import LEARNING_RATE

    began = time.perf_counter()
    result = step.launch(batch, LEARNING_RATE)
    seconds = time.perf_counter() - began
    result()
    return seconds


def profiled(step: Any, batch: Any, top: int) -> str:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(5):
        launch(step, batch)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(top)
    return text.getvalue()


if __name__ == "__main__":
    main()
