"""Measures configurations of the planner's benchmark one after the other, as `pool.py` hands them out.

The layers are compiled on a model of three of them with a small vocabulary, which takes half a minute of a CPU
and little of the GPU's memory; the whole model then finds its layers compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pool
import torch
from planner import Configuration, few_layers, machine, peak, settle, shape_config
from planner_results import settled

from tunesmith.data.types import StepBatch
from tunesmith.kernels import flash4
from tunesmith.measure import bench
from tunesmith.plan.hardware import usable_cores
from tunesmith.plan.plan import Plan
from tunesmith.train.phases import PhaseMemory
from tunesmith.train.step import TrainStep

SECONDS = 0.6
"""Steps are timed for so long, and two at least."""
MOST_STEPS = 40
LEFT_OVER = 64 << 20
"""A process that cannot give back more than this is no place for another measurement."""
Turn = Callable[[], AbstractContextManager[None]]


def main() -> None:
    device = sys.argv[1]
    compiled: tuple[str, set[tuple[bool, ...]]] = ("", set())
    for order in pool.orders():
        one = Configuration(**order["configuration"])
        if one.layers != compiled[0]:
            torch._dynamo.reset()
            compiled = (one.layers, set())
        is_timed = order["limit_bytes"] is None
        found = attempt(one, device, order["cap_bytes"], is_timed=is_timed, is_compiled=one.way in compiled[1])
        compiled[1].add(one.way)
        is_last = give_back(device) > LEFT_OVER
        pool.say("result", is_last=is_last, **found)
        if is_last:
            break


def attempt(one: Configuration, device: str, cap: int, *, is_timed: bool, is_compiled: bool) -> dict[str, Any]:
    try:
        compiled_in = 0.0 if is_compiled else rehearse(one, device)
    except Exception as error:  # whatever it is, the other configurations are to be measured
        return {"failed": f"when compiling: {_words(error)}"}
    left = give_back(device)
    pool.ask_for_memory()
    try:
        found = measure(one, device, cap=cap, turn=pool.turn if is_timed else None)
        return found | {"compile_seconds": compiled_in, "left_over_bytes": left}
    except torch.OutOfMemoryError as error:
        reserved = torch.cuda.max_memory_reserved()
        return {"failed": "out of memory", "words": _words(error), "cap_bytes": cap, "reserved_bytes": reserved}
    except Exception as error:
        return {"failed": _words(error)}


def _words(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:400]


def rehearse(one: Configuration, device: str) -> float:
    """Compile what configurations with these layers need: the first layer differs from the others where the embedding
    is frozen, and checkpointed ones may differ from those that are not."""
    began = time.perf_counter()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    step, batch = build(few_layers(one), device)
    for _ in range(2):
        step(batch, bench.LEARNING_RATE)
    return since(began)


def measure(one: Configuration, device: str, *, cap: int | None = None, turn: Turn | None = None) -> dict[str, Any]:
    """Memory at the memory phases of a step and, in its turn, the seconds of one, through the trainer's own code."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap or 1 << 60) / torch.cuda.mem_get_info()[1]))
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step, batch = build(one, device)
    found: dict[str, Any] = {"cap_bytes": cap, "tokens": batch.tokens, "document_length": document_length(batch)}
    found["has_flash_attention_4"] = flash4.is_available()
    found |= {"build_seconds": since(began), "build_peak_bytes": peak_bytes(device)}
    watched = PhaseMemory(step.model, step.optimizer)

    def run() -> float:
        before = time.perf_counter()
        step(batch, bench.LEARNING_RATE)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - before

    found["first_step_seconds"] = round(run(), 2)
    found["first_step_peak_bytes"] = peak_bytes(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run()
    found["peak_bytes"] = peak_bytes(device)
    for phase, held in watched.held.items():
        found[f"{phase.replace(' ', '_')}_bytes"] = held
        found[f"peak_{phase.replace(' ', '_')}_bytes"] = watched.peaks[phase]
    if one.cuda_graphs:  # from the third step on; the allocator then holds what passes take, and does not count it
        for _ in range(2):
            run()
        found["recorded_reserved_bytes"] = torch.cuda.memory_reserved()
    if on_gpu:
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["context_bytes"] = context_bytes()
    if turn is not None:
        with turn():
            times = steady(lambda: step.launch(batch, bench.LEARNING_RATE), on_gpu)
            found["launch_seconds"] = launch_seconds(device)
        found["step_seconds"] = round(settled(times), 6)
        found["timed"] = [round(seconds, 5) for seconds in times]
    if one.cuda_graphs:
        found["has_recorded"] = step.capture is not None and step.capture.passes is not None
    return found


def build(one: Configuration, device: str) -> tuple[TrainStep, StepBatch]:
    bench.SHAPES[one.shape] = shape_config(one.shape)
    workload = bench.Workload(one.shape, one.method, one.micro_batch, one.length, one.is_packed, one.accumulation_steps)
    (batch,) = bench.batches(workload, 1)
    return bench.build(workload, plan_of(one, device), rank=one.rank, optimizer=one.optimizer), batch


def plan_of(one: Configuration, device: str) -> Plan:
    hardware = machine(device)
    task, choice = settle(one, hardware, device)
    chosen = {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}
    return Plan(
        **{name: value for name, value in chosen.items() if name in Plan.model_fields and name != "master_weights"},
        master_weights=choice.has_masters(task),
        device=device,
        threads=usable_cores(),
        precision=task.precision,
        sequence_length=one.length,
        sequences_per_step=one.micro_batch * one.accumulation_steps,
        learning_rate=bench.LEARNING_RATE,
        deterministic=False,
        memory=peak(task, choice).memory,
        memory_limit=0,
    )


def steady(launch: Callable[[], Callable[[], object]], on_gpu: bool) -> list[float]:
    """Seconds from the end of a step to the end of the next, on the device's clock. As in training, a step is launched
    before the result of the one before is waited for. The first does not count: what others had queued has to run
    out."""
    marks = [mark(on_gpu)]
    results: list[Callable[[], object]] = []
    began = time.perf_counter()
    while len(marks) <= MOST_STEPS:
        results.append(launch())
        marks.append(mark(on_gpu))
        if len(results) > 1:
            results.pop(0)()
        if len(marks) > 3 and time.perf_counter() - began > SECONDS:
            break
    for result in results:
        result()
    if on_gpu:
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(marks)]
    else:
        times = [after - before for before, after in itertools.pairwise(marks)]
    return times[1:]


def launch_seconds(device: str, count: int = 1000) -> float:
    """Of the CPU, to start one of many kernels that do nothing: what host-bound steps are made of."""
    tensor = torch.zeros(1, device=device)
    tensor.add_(1)
    began = time.perf_counter()
    for _ in range(count):
        tensor.add_(1)
    return (time.perf_counter() - began) / count


def mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def document_length(batch: Any) -> float:
    """Of the document a token is in, on average over tokens."""
    lengths = [length for one in batch.micro_batches for length in one.boundaries.diff().tolist()]
    return round(sum(length**2 for length in lengths) / sum(lengths), 1)


def peak_bytes(device: str) -> int:
    return bench.peak_memory(torch.device(device))


def context_bytes() -> int | None:
    """What the driver counts for this process beyond what the allocator holds."""
    with contextlib.suppress(Exception):  # not all systems tell
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory - torch.cuda.memory_reserved()
    return None


def give_back(device: str) -> int:
    """Free what a measurement took; the bytes that could not be freed."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
