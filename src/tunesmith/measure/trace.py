"""What a trace of training steps says: time by region, kernels, memory by category, and what bounds the run.

Pure functions of the trace that was written; all figures are those of its last whole step. Memory is categorised by the
region a block was allocated in and the one it was freed in; what was there before comes from the model and the
optimizer.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGIONS = ("data", "forward", "loss", "backward", "optimizer", "communication", "wait")
"""In the last the CPU waits for the GPU, so as not to be more than a step ahead of it."""
CATEGORIES = ("weights", "optimizer", "gradients", "activations", "loss", "other")
"""In the order they are stacked; fp32 masters count as optimizer."""
TOP = 15
COLUMNS = 600
"""Points of time in the memory picture."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """One kind of kernel (on a CPU: operator, without what it calls) within the step."""

    name: str
    calls: int
    seconds: float
    share: float
    """Of the step."""


@dataclass(frozen=True)
class MemoryPicture:
    """Bytes by category over a step, and at its peak."""

    seconds: list[float]
    bytes: dict[str, list[int]]
    peak_bytes: int
    at_peak: dict[str, int]


@dataclass(frozen=True)
class Analysis:
    """What a trace says about its last whole step. On a GPU a step lasts from the end of the kernels of the one before
    to the end of its own, whenever the CPU launched them."""

    step_seconds: float
    host_seconds: dict[str, float]
    """Of the CPU, by region."""
    device_seconds: dict[str, float]
    """Of kernels on a GPU, by the region that started them; empty on a CPU."""
    coverage: float
    """Share of the CPU's time for the step that lies in a region."""
    busy: float | None
    """Share of the step in which a GPU was computing."""
    kernels: list[Kernel]
    kinds: dict[str, float]
    """Seconds of kernels by kind: matmuls, attention, communication, other."""
    calls: int
    memory: MemoryPicture


def read_trace(path: Path) -> list[Event]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def analyse(events: list[Event], *, on_gpu: bool, baseline: dict[str, int]) -> Analysis:
    """The figures of the last whole step; `baseline` has the bytes by category when the trace began."""
    marks = [event for event in events if event.get("cat") == "user_annotation" and event.get("ph") == "X"]
    start, end = max(_span(event) for event in marks if event["name"] == "step")
    everywhere = sorted((*_span(event), event["name"]) for event in marks if event["name"] in REGIONS)
    regions = _Regions(everywhere)
    inside = [(max(a, start), min(b, end), name) for a, b, name in everywhere if b > start and a < end]
    host: Counter[str] = Counter()
    for a, b, name in inside:
        host[name] += b - a
    covered = _union([(a, b) for a, b, _ in inside])
    length = end - start
    if on_gpu:
        on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        launched = _launched(events)
        kernels = [event for event in on_device if start <= launched(event) < end]
        # Copies to and from the host run beside what is computed, and are no work of the GPU's own.
        computing = [(*_span(event), launched(event)) for event in on_device if event["cat"] != "gpu_memcpy"]
        began = max([start, *(b for _, b, at in computing if at < start)])
        ended = max([began, *(b for _, b, at in computing if start <= at < end)])
        length = ended - began or length
        times = [(event["name"], event["dur"]) for event in kernels]
        busy = _union([(max(a, began), min(b, ended)) for a, b, _ in computing if b > began and a < ended]) / length
        device = _by_region(kernels, launched, regions)
    else:
        operators = [
            event
            for event in events
            if event.get("cat") == "cpu_op" and event.get("ph") == "X" and start <= event["ts"] < end
        ]
        times, busy, device = _self_times(operators), None, {}
    calls = Counter(name for name, _ in times)
    spent: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for name, duration in times:
        spent[name] += duration
        kinds[kind_of(name)] += duration
    return Analysis(
        step_seconds=length / 1e6,
        host_seconds={name: host[name] / 1e6 for name in REGIONS if host[name]},
        device_seconds={name: device[name] / 1e6 for name in (*REGIONS, "elsewhere") if device.get(name)},
        coverage=round(covered / (end - start), 4),
        busy=None if busy is None else round(busy, 4),
        kernels=[
            Kernel(name, calls[name], time / 1e6, round(time / length, 4)) for name, time in spent.most_common(TOP)
        ],
        kinds={name: time / 1e6 for name, time in kinds.most_common()},
        calls=len(times),
        memory=memory_over(events, regions, start, end, on_gpu=on_gpu, baseline=baseline),
    )


def what_bounds(found: Analysis, *, will_replay: bool = False) -> tuple[str, str]:
    """What the step waits for, in one word and in one sentence. `will_replay`: training replays captured passes, and
    this step did not."""
    step = found.step_seconds
    data = found.host_seconds.get("data", 0.0) / step
    if data > 0.2 and (found.busy is None or found.busy < 0.9):
        return "data", f"Data bound the run: {data:.0%} of a step passes before its batch is there."
    if found.busy is not None and found.busy < 0.85:
        helps = "larger micro-batches or compiled layers help"
        if will_replay:
            helps = "in training most of them are captured, and started at once"
        return "host", (
            f"The host bounds the run: the GPU computes for {found.busy:.0%} of a step only, while the CPU is "
            f"busy starting {found.calls:,} kernels; {helps}."
        )
    by_region = found.device_seconds or found.host_seconds
    total = sum(found.kinds.values()) or step
    if (share := found.kinds.get("communication", 0.0) / total) > 0.25:
        return "communication", f"Communication bounds the run: it takes {share:.0%} of the kernels' time."
    if (share := by_region.get("optimizer", 0.0) / step) > 0.3:
        return "optimizer", (
            f"The optimizer bounds the run: {share:.0%} of a step; more tokens a step (batch_tokens) spread it."
        )
    compute = (found.kinds.get("matmuls", 0.0) + found.kinds.get("attention", 0.0)) / total
    if compute >= 0.5:
        return "compute", f"Compute bounds the run: matmuls and attention take {compute:.0%} of its time."
    if found.busy is None and found.calls and step / found.calls < 50e-6:
        return "host", (
            f"The host bounds the run: {found.calls:,} small operations of {step / found.calls * 1e6:.0f} us each cost "
            "more to start than to do; larger micro-batches help."
        )
    return "memory bandwidth", (
        f"Memory bandwidth bounds the run: {1 - compute:.0%} of its time goes into operations that pass over memory "
        "rather than into matmuls and attention."
    )


WORDS = {
    "data": "Waiting for data",
    "forward": "The forward pass",
    "loss": "The loss",
    "backward": "The backward pass",
    "optimizer": "The optimizer",
    "communication": "Communication",
    "wait": "Waiting for the GPU",
}
"""Of the regions, to begin a sentence with."""


def largest_region(found: Analysis) -> str:
    """Which region takes most of a step, in a sentence: of the GPU's time where there is one, else of the host's."""
    by_region = {name: spent for name, spent in (found.device_seconds or found.host_seconds).items() if name in WORDS}
    if not by_region:
        return "No region of the step takes any time."
    name = max(by_region, key=lambda region: by_region[region])
    whose = "of the GPU's time" if found.device_seconds else "of a step"
    whole = sum(found.device_seconds.values()) or found.step_seconds
    return f"{WORDS[name]} takes most: {by_region[name] / whole:.0%} {whose}."


def memory_over(
    events: list[Event],
    regions: _Regions,
    start: float,
    end: float,
    *,
    on_gpu: bool,
    baseline: dict[str, int],
) -> MemoryPicture:
    """Bytes by category from `start` to `end`. A block made in the backward pass is a gradient if it lives on to the
    optimizer; one that the optimizer makes and keeps is its state."""
    changes = sorted(
        (
            (event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and (event["args"].get("Device Type") == 1) == on_gpu
        ),
        key=lambda change: change[0],
    )
    freed_at: list[float | None] = [None] * len(changes)
    allocated: dict[Any, int] = {}
    owner: list[int | None] = [None] * len(changes)
    for index, (time, address, size) in enumerate(changes):
        if size > 0:
            allocated[address] = index
        elif (made := allocated.pop(address, None)) is not None:
            freed_at[made] = time
            owner[index] = made
    category = [
        _category(regions.at(time), None if (freed := freed_at[index]) is None else regions.at(freed), freed is None)
        for index, (time, _, _) in enumerate(changes)
    ]
    now = {name: baseline.get(name, 0) for name in CATEGORIES}
    times, series, peak, at_peak = [start], [dict(now)], -1, dict(now)
    for index, (time, _, size) in enumerate(changes):
        if time >= end:
            break
        name = category[made] if size <= 0 and (made := owner[index]) is not None else category[index]
        if size <= 0 and owner[index] is None:
            name = "other"  # made before the trace began
        now[name] += size
        if time < start:
            series[0] = dict(now)
            continue
        times.append(time)
        series.append(dict(now))
    for phase in series:
        if (total := sum(phase.values())) > peak:
            peak, at_peak = total, phase
    times.append(end)
    series.append(dict(now))
    chosen = _thinned(times, series)
    return MemoryPicture(
        seconds=[(times[index] - start) / 1e6 for index in chosen],
        bytes={name: [series[index][name] for index in chosen] for name in CATEGORIES},
        peak_bytes=peak,
        at_peak=at_peak,
    )


_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("communication", r"nccl|all_reduce|all_gather|reduce_scatter|c10d"),
        ("attention", r"flash|fmha|attention|_attn"),
        (
            "matmuls",
            r"gemm|nvjet|cutlass|xmma|matmul|scaled_mm|triton_tem|mkldnn|aten::(mm|addmm|bmm|baddbmm|linear)$",
        ),
    )
)


def kind_of(kernel: str) -> str:
    """What a kernel or operator does, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


class _Regions:
    """Which region a moment lies in; regions do not overlap."""

    def __init__(self, spans: list[tuple[float, float, str]]):
        self.spans = spans
        self.starts = [span[0] for span in spans]

    def at(self, time: float) -> str | None:
        index = bisect.bisect_right(self.starts, time) - 1
        return self.spans[index][2] if index >= 0 and time <= self.spans[index][1] else None


def _category(made_in: str | None, freed_in: str | None, is_kept: bool) -> str:
    if made_in == "forward":
        return "activations"
    if made_in == "loss":
        return "loss"
    if made_in == "backward":
        return "gradients" if is_kept or freed_in == "optimizer" else "activations"
    if made_in == "optimizer" and is_kept:
        return "optimizer"
    return "other"


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _launched(events: list[Event]) -> Callable[[Event], float]:
    """When the host started a kernel, which correlation ids tell; when it ran, where they do not."""
    started = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    return lambda kernel: started.get(kernel.get("args", {}).get("correlation"), kernel["ts"])


def _by_region(kernels: list[Event], launched: Callable[[Event], float], regions: _Regions) -> dict[str, float]:
    """Time of kernels by the region of the host that started them."""
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[regions.at(launched(kernel)) or "elsewhere"] += kernel["dur"]
    return found


def _self_times(operators: list[Event]) -> list[tuple[str, float]]:
    """Each operator's time without that of the operators it calls, which lie within it on the same thread."""
    by_thread = defaultdict(list)
    for event in operators:
        by_thread[event["tid"]].append(event)
    found = []
    for mine in by_thread.values():
        open_ones: list[list[Any]] = []  # end, name, own time
        for event in sorted(mine, key=lambda one: (one["ts"], -one["dur"])):
            start, end = _span(event)
            while open_ones and open_ones[-1][0] <= start:
                found.append(tuple(open_ones.pop()[1:]))
            if open_ones:
                open_ones[-1][2] -= event["dur"]
            open_ones.append([end, event["name"], event["dur"]])
        found += [tuple(one[1:]) for one in open_ones]
    return found


def _thinned(times: list[float], series: list[dict[str, int]]) -> list[int]:
    """Of every stretch of time the moment with the most memory, so that no peak is lost; first and last always."""
    start, length = times[0], (times[-1] - times[0]) or 1.0
    best: dict[int, int] = {}
    for index, time in enumerate(times):
        column = min(COLUMNS - 1, int((time - start) / length * COLUMNS))
        if column not in best or sum(series[index].values()) > sum(series[best[column]].values()):
            best[column] = index
    return sorted({0, *best.values(), len(times) - 1})
