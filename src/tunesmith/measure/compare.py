"""Standard workloads through ours and through other systems: what is measured of each, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tunesmith.measure.bench import SHAPES, WORKLOADS, build, cut_by, facts_of, measure, plan_for, planned, run_of
from tunesmith.measure.peers import available, measure_peer
from tunesmith.plan.hardware import Hardware, probe
from tunesmith.plan.plan import Plan
from tunesmith.plan.search import predicted_memory

PLANNED = "planned"
RESULT = "RESULT "
"""Begins the line in which a measuring process says what it found."""


@dataclass(frozen=True)
class Order:
    """One measurement to be made."""

    workload: str
    system: str
    variant: str
    """`planned`, as `train` would do it; or by hand: `bf16`, `fp32`, `fp8`, or one of them with `checkpoint`."""
    device: str
    warmup: int
    steps: int

    @property
    def checkpoints_layers(self) -> bool:
        return "checkpoint" in self.variant


def orders(name: str, *, with_peers: bool, is_quick: bool) -> list[Order]:
    """What to measure of a workload on this machine: ours in its variants, then the peers that are installed."""
    on_gpu = torch.cuda.is_available()
    plain = "bf16" if on_gpu else "fp32"
    by_hand, theirs = [plain], [plain]
    if on_gpu and torch.cuda.get_device_capability() >= (8, 9):
        by_hand.append("fp8")
    if on_gpu and not is_quick:
        by_hand.append(f"{by_hand[-1]} checkpoint")
        theirs.append(f"{plain} checkpoint")
    workload = WORKLOADS[name]
    if workload.is_low_memory:
        by_hand, with_peers = [f"{by_hand[-1].split()[0]} checkpoint"], False
    ours = [PLANNED, *(f"by hand: {variant}" for variant in by_hand)]
    peers = available(workload, on_gpu=on_gpu) if with_peers else []
    pairs = [("tunesmith", variant) for variant in ours] + [(peer, variant) for peer in peers for variant in theirs]
    counts = {"warmup": 1, "steps": 3} if is_quick or workload.is_low_memory else {"warmup": 3, "steps": 6}
    device = "cuda" if on_gpu else "cpu"
    return [Order(name, system, variant, device, **counts) for system, variant in pairs]


def plan_of(order: Order, hardware: Hardware) -> Plan:
    workload = WORKLOADS[order.workload]
    if order.variant == PLANNED:
        return planned(workload, hardware)
    layers = SHAPES[workload.shape]["num_hidden_layers"]
    plan = plan_for(
        workload,
        device=order.device,
        matmul_dtype="fp8" if "fp8" in order.variant else "plain",
        checkpointed_layers=layers if order.checkpoints_layers else 0,
        compiled=order.device == "cuda",
    )
    if order.checkpoints_layers:
        plan = plan.changed(**workload.saving)
    return plan if order.device == "cuda" else plan.changed(cuda_graphs=False)


def shortage(order: Order, hardware: Hardware) -> str | None:
    """Why a measurement would run out of memory, found without loading anything; None where it fits. Of a peer, what
    the same would take here: it is not known to take less."""
    workload = WORKLOADS[order.workload]
    plan = plan_of(order, hardware)
    if order.variant != PLANNED:  # as `build` makes them where a plan says nothing: in the precision of what is trained
        states = "bf16" if workload.method == "full" and order.device == "cuda" else "fp32"
        plan = plan.changed(optimizer_states=states)
    need = predicted_memory(run_of(workload), plan, facts_of(workload), hardware)
    if order.device == "cuda":
        free, owner = hardware.gpus[0].free, hardware.gpus[0].name
    else:
        free, owner = hardware.available, "this machine"
    if need <= free:
        return None
    return f"needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {owner}"


def carry_out(order: Order, hardware: Hardware | None = None) -> dict[str, Any]:
    """Make a measurement in a process of its own; a row of the result, with `failed` where it did not work, or cannot
    on this hardware."""
    row: dict[str, Any] = {"workload": order.workload, "system": order.system, "variant": order.variant}
    if hardware is not None and (why := shortage(order, hardware)) is not None:
        return row | {"failed": why}
    first = "import unsloth; " if order.system == "unsloth" else ""  # it must come before torch
    code = f"{first}import sys; from tunesmith.measure.compare import work; work(sys.argv[1])"
    settings = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asdict(order))],
        capture_output=True,
        text=True,
        errors="replace",
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, **settings},
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if found:
        return row | json.loads(found[-1].removeprefix(RESULT))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"[\w.]+(Error|Exception)\b", line)]
    is_killed = done.returncode == -signal.SIGKILL  # as the system does when it has no more memory
    reason = (errors or said or [f"exit code {done.returncode}"])[-1][:300]
    return row | {"failed": "out of memory" if is_killed or "OutOfMemory" in done.stderr else reason}


def work(order_json: str) -> None:
    """The other process: one measurement, printed as a line of JSON."""
    order = Order(**json.loads(order_json))
    workload = WORKLOADS[order.workload]
    counts = {"warmup": order.warmup, "steps": order.steps}
    if order.system == "tunesmith":
        plan = plan_of(order, probe())
        found = measure(build(workload, plan), cut_by(plan, workload), **counts)
    else:
        found = measure_peer(
            order.system, workload, device=order.device, checkpointing=order.checkpoints_layers, **counts
        )
    print(RESULT + json.dumps(asdict(found)), flush=True)


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its speed relative to the fastest peer on the same workload."""
    best: dict[str, float] = {}
    for row in rows:
        if row["system"] != "tunesmith" and "failed" not in row:
            best[row["workload"]] = max(best.get(row["workload"], 0.0), row["tokens_per_second"])
    return [
        row | {"to_best_peer": round(row["tokens_per_second"] / best[row["workload"]], 3)}
        if "failed" not in row and row["workload"] in best
        else row
        for row in rows
    ]


def default_workloads() -> list[str]:
    """What is worth measuring here: without a GPU the large models would take days, and some do in any case unless
    asked for."""
    if not torch.cuda.is_available():
        return ["tiny"]
    return [name for name, workload in WORKLOADS.items() if name != "tiny" and not workload.is_low_memory]
