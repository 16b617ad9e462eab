"""Measures one case of `gpu.py`, handed out by `pool.py`: `gpu_worker.py MODELS`."""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pool

PROFILED = 3
"""Steps, launched ahead as in training."""
TOP = 60


def main() -> None:
    order = next(pool.orders())
    if order["system"] == "unsloth":
        import unsloth  # noqa: F401  (wants to come before torch)
    try:
        found = measure(order, Path(sys.argv[1]))
    except Exception as error:
        import traceback

        traceback.print_exc()
        is_memory = "OutOfMemory" in type(error).__name__
        found = {"failed": "out of memory" if is_memory else f"{type(error).__name__}: {str(error)[:200]}"}
    pool.say("result", **found)


def measure(case: dict[str, Any], models: Path) -> dict[str, Any]:
    from tunesmith.measure import bench
    from tunesmith.measure.peers import measure_peer
    from tunesmith.parallel.compile import news

    workload = bench.WORKLOADS[case["workload"]]
    counts = {"warmup": 3, "steps": 6, "turn": pool.turn}
    if case["system"] != "tunesmith":
        recompute = case["recompute_layers"] > 0
        found = measure_peer(case["system"], workload, device="cuda", recompute=recompute, models=models, **counts)
        return asdict(found)
    plan = bench.plan_for(
        workload,
        device="cuda",
        products="fp8" if case["products"] == "fp8" else "plain",
        recompute_layers=case["recompute_layers"],
        compiled=True,
    )
    if case["goal"] == "tight":
        plan = plan.model_copy(update=dict(workload.saving))
    step = bench.build(workload, plan)
    found = asdict(bench.measure(step, workload, **counts))
    if (compiled := news()) is not None:
        found |= {"compile_seconds": round(compiled.seconds, 1), "notes": compiled.notes}
    with pool.turn():
        return found | {"profile": profile(step, workload)}


def profile(step: Any, workload: Any) -> dict[str, Any]:
    """Where the time of a step goes: the share in which a kernel ran, and the kernels that took the longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    from tunesmith.measure import bench

    made = bench.batches(workload, PROFILED)
    with recorded(activities=[ProfilerActivity.CUDA]) as trace:
        results = [step.launch(batch, bench.LEARNING_RATE) for batch in made]
        for result in results:
            result()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset")]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in kernels:
        name = re.sub(r"\s+", " ", event["name"])[:160]
        times[name] += event["dur"]
        calls[name] += 1
    return {
        "busy": round(busy / (end - spans[0][0]), 4),
        "kernel_ms": round(busy / PROFILED / 1000, 2),
        "kernels": [
            {"name": name, "calls": round(calls[name] / PROFILED, 1), "ms": round(time / PROFILED / 1000, 3)}
            for name, time in itertools.islice(times.most_common(), TOP)
        ],
    }


if __name__ == "__main__":
    main()
