"""Measures one case of `gpu.py`, handed out by `pool.py`: `gpu_worker.py MODELS`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pool


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
    ).model_copy(update={"offload_activations": case["offload_activations"]})
    return asdict(bench.measure(bench.build(workload, plan), workload, **counts))


if __name__ == "__main__":
    main()
