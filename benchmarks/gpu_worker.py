"""Measures one case of `gpu.py`, handed out by `pool.py`: `gpu_worker.py MODELS`.

What a case compiles is compiled on two of its layers, which need little of the GPU's memory, so that many workers do
that at once; the whole model then finds its layers compiled, and has the memory for some seconds only.

`gpu_worker.py MODELS WORKLOAD` writes the model that some systems want to load from a disk, and measures nothing.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_profile
import pool

SETTLE_SECONDS = 0.5
"""What others had queued on the GPU when they were stopped has to run out."""
Case = dict[str, Any]
Turn = Callable[[], AbstractContextManager[object]]


def main() -> None:
    models = Path(sys.argv[1])
    if len(sys.argv) > 2:
        from tunesmith.measure import bench, peers

        peers.saved(bench.WORKLOADS[sys.argv[2]], models, device())
        return
    case = next(pool.orders())
    if case["system"] == "unsloth":
        os.environ["UNSLOTH_COMPILE_LOCATION"] = str(models / f"unsloth-{os.getpid()}")
        import unsloth  # noqa: F401  (wants to come before torch)
    try:
        found = measure_ours(case) if case["system"] == "tunesmith" else measure_theirs(case, models)
    except Exception as error:
        traceback.print_exc()
        is_memory = "OutOfMemory" in type(error).__name__
        found = {"failed": "out of memory" if is_memory else f"{type(error).__name__}: {str(error)[:200]}"}
    pool.say("result", **found)


def measure_ours(case: Case) -> dict[str, Any]:
    from tunesmith.measure import bench
    from tunesmith.parallel.compile import news

    began = time.monotonic()
    workload = bench.WORKLOADS[case["workload"]]
    few = bench.few_layers(workload)
    step = build(case, few)
    for batch in bench.batches(few, 2):
        step(batch, bench.LEARNING_RATE)
    del step, batch
    found: dict[str, Any] = {"rehearsal_seconds": round(time.monotonic() - began, 1)}
    compiled = news()
    found |= {"left_over_bytes": give_back()}
    pool.ask_for_memory()
    step = build(case, workload)
    with ExitStack() as alone:
        found |= asdict(bench.measure(step, workload, **counts(case), turn=lambda: lasting(alone)))
        trace = None if workload.is_low_memory or step.device.type != "cuda" else gpu_profile.record(step, workload)
    if trace is not None:
        found["profile"] = gpu_profile.read(trace)
    again = news()
    found["compile_seconds"] = round(compiled.seconds, 1) if compiled else 0.0
    found["compile_again_seconds"] = round(again.seconds, 1) if again else 0.0
    found["notes"] = [note for one in (compiled, again) if one for note in one.notes]
    return found


def build(case: Case, workload: Any) -> Any:
    from tunesmith.measure import bench

    layers = bench.SHAPES[workload.shape]["num_hidden_layers"]
    plan = bench.plan_for(
        workload,
        device=device(),
        matmul_dtype="fp8" if case["matmul_dtype"] == "fp8" else "plain",
        checkpointed_layers=min(layers, case["checkpointed_layers"]),
        compiled=device() == "cuda",
    )
    if case["goal"] == "low memory":
        plan = plan.model_copy(update=dict(workload.saving))
    return bench.build(workload, plan.model_copy(update={"cuda_graphs": case["cuda_graphs"]}))


def measure_theirs(case: Case, models: Path) -> dict[str, Any]:
    from tunesmith.measure import bench
    from tunesmith.measure.peers import measure_peer, saved

    workload = bench.WORKLOADS[case["workload"]]

    def measure(one: Any, turn: Turn = nullcontext, **few: int) -> dict[str, Any]:
        chosen = {"device": device(), "checkpoint": case["checkpointed_layers"] > 0, "models": models}
        return asdict(measure_peer(case["system"], one, **chosen, turn=turn, **few))

    began = time.monotonic()
    found: dict[str, Any] = {"notes": []}
    few = 4096 if case["system"] == "trl" else None  # words: it makes all logits at once
    try:
        measure(bench.few_layers(workload, vocabulary=few), warmup=1, steps=1)
    except Exception as error:  # not what is measured: the whole model then compiles for itself
        traceback.print_exc()
        found["notes"].append(f"with two layers: {type(error).__name__}: {str(error)[:200]}")
    found |= {"rehearsal_seconds": round(time.monotonic() - began, 1), "left_over_bytes": give_back()}
    if needs_files(case):
        saved(workload, models, device())
    pool.ask_for_memory()
    return found | measure(workload, turn=settled, **counts(case))


def needs_files(case: Case) -> bool:
    """Whether the system loads its model from a disk."""
    return case["system"] == "unsloth" or (case["system"] != "tunesmith" and case["workload"].startswith("qlora"))


def counts(case: Case) -> dict[str, int]:
    return {"warmup": case["warmup"], "steps": case["steps"]}


@contextmanager
def settled() -> Iterator[None]:
    with pool.turn():
        time.sleep(SETTLE_SECONDS)
        yield


def lasting(alone: ExitStack) -> AbstractContextManager[None]:
    """A turn that lasts until `alone` is closed."""
    alone.enter_context(settled())
    return nullcontext()


def give_back() -> int:
    """Free what was used so far; the bytes that could not be freed."""
    import torch

    gc.collect()
    if device() != "cuda":
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
