"""What sharding costs where there is nothing to share, and offloading where it is not needed: on one GPU, over NCCL.

    python benchmarks/gpu_strategies.py [--layers 6] [--deadline SECONDS] [--only full full-32k lora qlora host]
    python benchmarks/gpu_strategies.py --collect FOLDER/gpu_strategies.json

The plans are made by hand: on one GPU the planner takes the plain path, and these go through FSDP all the same.
Each strategy trains Llama-3-8B's shape with few layers, random weights, and is timed between two timings of the plain
path, whose model stays beside it; all of a group by one process, alone on the GPU (`pool.py`), after it has compiled
beside the others. What FSDP copies does not depend on the tokens of a step, so all weights are trained with two numbers
of them. `host` is the whole 8B shape, all weights trained, with AdamW's states in fp32 on the GPU and in host
memory. Writes gpu_strategies.json into the folder that RESULTS names, or benchmarks/results. The second takes such a
file into the one there: what was measured again replaces what was, whose share of the plain path is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool
from gpu import SETTINGS
from gpu_worker import device, give_back, settled
from results import FOLDER, write_result

GIB = 2**30
LINK = 55e9
"""Bytes a second that the host link of such a GPU carries each way."""
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "hybrid", "hierarchical")
QUANTIZED = {
    "zero3, int8 collectives": {
        "sharding": "zero3",
        "quantized_all_gather": "int8",
        "quantized_reduce_scatter": "int8",
    }
}
WAYS: dict[str, dict[str, dict[str, str]]] = {
    "full": {name: {"sharding": name} for name in SHARDINGS} | QUANTIZED,
    "lora": {name: {"sharding": name} for name in SHARDINGS},
    "qlora": {"zero3": {"sharding": "zero3"}},
}
SEQUENCES = {"full": 4, "full-32k": 8, "lora": 8, "qlora": 8}
"""Of 4,096 tokens, in a step of a group; its method is what its name begins with."""
SIZES = {"full": (112, 34), "full-32k": (122, 38), "lora": (80, 18), "qlora": (70, 16), "host": (115, 24)}
"""GiB set aside for each group, and while it compiles on two layers."""
SHAPES = {"cuda": "llama3-8b", "cpu": "tiny"}
WARMUP, STEPS, AGAIN = 2, 12, 6
"""Steps of a way, and of the plain one after it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--deadline", type=float, default=240.0)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the processes say")
    parser.add_argument("--collect", type=Path, help="a file to take into benchmarks/results")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    os.environ.update({**SETTINGS, "TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ})
    command = [sys.executable, __file__, "--work"]
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with options.log.open("a") as log:
        budget = 125 * GIB
        ways = {"reuses_workers": False, "patience": math.inf}
        at_work = pool.Pool(command, workers=4, budget=budget, deadline=options.deadline, log=log, **ways)
        for name in options.only:
            payload = {"group": name, "layers": options.layers}
            size, first = (gib * GIB for gib in SIZES[name])
            at_work.add(pool.Order(payload, size=size, first_size=first, turn_seconds=240))
        for order, found in at_work.run():
            rows += found.get("rows") or [{"method": order.payload["group"], "way": "all", **found}]
            print(f"{time.monotonic() - began:4.0f} s {order.payload['group']}", flush=True)
    rows.sort(key=lambda row: list(SIZES).index(row.get("group", row["method"])))
    for row in rows:
        print(words(row), flush=True)
    what = f"Strategies on one GPU against the plain path, 8B shape with {options.layers} layers"
    print(f"wrote {write_result('gpu_strategies', what, rows)}")


def collect(path: Path) -> Path:
    kept, new = (json.loads(file.read_text(encoding="utf-8")) for file in (FOLDER / path.name, path))
    rows = {(row["group"], row["way"]): row for row in kept["numbers"]}
    for row in (one for one in new["numbers"] if "failed" not in one):
        before = rows.get((row["group"], row["way"]), {})
        row |= {"commit": new["commit"], "date": new["date"]}
        if before.get("tokens") == row["tokens"] and row["way"] != "plain":
            row["earlier"] = [*before.get("earlier", []), before["share_of_plain"]]
        rows[row["group"], row["way"]] = row
    order = list(SIZES)
    numbers = sorted(rows.values(), key=lambda row: order.index(row["group"]))
    return write_result("gpu_strategies", kept["what"], numbers, {name: new[name] for name in new if name != "numbers"})


def words(row: dict[str, Any]) -> str:
    name = f"{row.get('group', row['method']):8} {row['way']:24}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    link = f"  link alone {row['link_seconds']:.2f} s of {row['step_seconds']:.2f}" if "link_seconds" in row else ""
    return (
        f"{name} {row['tokens_per_second']:9,.0f} tokens/s  {row['share_of_plain']:6.1%}  "
        f"{row['peak_bytes'] / GIB:6.1f} GiB  loss {row['loss']:.4f}{link}"
    )


# a process of its own for each group


def work() -> None:
    from tunesmith.measure import bench

    order = next(pool.orders())
    shape = SHAPES[device()]
    bench.SHAPES["cut"] = {**bench.SHAPES[shape], "num_hidden_layers": order["layers"]}
    measure = in_host_memory(shape) if order["group"] == "host" else strategies(order["group"])
    rows = []
    try:
        rows.extend(measure)
    except Exception as error:
        rows.append({"method": order["group"], "way": "plain", "failed": reason(error)})
    pool.say("result", rows=[{"group": order["group"], **row} for row in rows])


def strategies(group: str) -> Iterator[dict[str, Any]]:
    from tunesmith.measure import bench

    method = group.partition("-")[0]
    workload = bench.Workload("cut", method, SEQUENCES[group], 4096 if device() == "cuda" else 64)
    for sharding in ("none", "zero3"):  # what a layer is compiled to, which all ways have in common
        rehearse(workload, sharding=sharding)
    pool.ask_for_memory()
    with settled():
        plain, first = begin(workload)
        yield {"method": method, "way": "plain", "share_of_plain": 1.0, "tokens": tokens(workload), **first}
        before = first["step_seconds"]
        for name, changes in WAYS[method].items():
            give_back()
            try:
                step, found = begin(workload, **changes)
            except Exception as error:  # the others are to be measured all the same
                yield {"method": method, "way": name, "failed": reason(error)}
                continue
            del step
            give_back()
            after = bench.measure(plain, workload, warmup=1, steps=AGAIN).step_seconds
            share = (before + after) / 2 / found["step_seconds"]
            yield {
                "method": method,
                "way": name,
                "share_of_plain": round(share, 4),
                "tokens": tokens(workload),
                **found,
            }
            before = after


def in_host_memory(shape: str) -> Iterator[dict[str, Any]]:
    """The states of a whole model, and what the link alone would take to bring them and take them back at once."""
    from tunesmith.measure import bench

    workload = bench.Workload(shape, "full", 4, 4096 if device() == "cuda" else 64)
    kept: dict[str, Any] = {"master_weights": False, "checkpointed_layers": bench.SHAPES[shape]["num_hidden_layers"]}
    rehearse(workload, **kept)
    pool.ask_for_memory()
    with settled():
        plain = 0.0
        for way, offload in (("plain", "none"), ("host", "host")):
            step, found = begin(workload, warmup=2, steps=3, offload_optimizer=offload, **kept)
            states = sum(value.nbytes for state in step.optimizer.states() for value in state.values())
            plain = plain or found["step_seconds"]
            found["share_of_plain"] = round(plain / found["step_seconds"], 4)
            moved = {"moved_bytes": states, "link_seconds": round(states / LINK, 3)} if way == "host" else {}
            yield {"method": "full", "way": f"8B, states: {way}", "tokens": tokens(workload), **found, **moved}
            del step
            give_back()


def tokens(workload: Any) -> int:
    return workload.sequences * workload.length


def begin(workload: Any, *, warmup: int = WARMUP, steps: int = STEPS, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A training step made anew, and its speed and memory without what others hold."""
    import torch

    from tunesmith.measure import bench

    held = torch.cuda.memory_allocated() if device() == "cuda" else 0
    step = build(workload, **changes)
    found = bench.measure(step, workload, warmup=warmup, steps=steps)
    names = ("tokens_per_second", "step_seconds", "loss", "spread")
    return step, {"peak_bytes": found.peak_bytes - held, **{name: getattr(found, name) for name in names}}


def rehearse(workload: Any, **changes: Any) -> None:
    from tunesmith.measure import bench

    few = bench.few_layers(workload)
    step = build(few, **changes | ({"checkpointed_layers": 2} if changes.get("checkpointed_layers") else {}))
    for batch in bench.batches(few, 2):
        step(batch, bench.LEARNING_RATE)
    del step, batch
    give_back()


def build(workload: Any, **changes: Any) -> Any:
    from tunesmith.measure import bench

    on_gpu = device() == "cuda"
    plan = bench.plan_for(workload, device=device(), matmul_dtype="plain", checkpointed_layers=0, compiled=on_gpu)
    usual = {"master_weights": workload.method == "full", "optimizer_states": "fp32"}
    return bench.build(workload, plan.changed(**usual | changes))


def reason(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        main()
