"""Profiles of training steps: a trace for Perfetto, memory by category, the top kernels, and what bounds the run.

Steps run through the same code as in training; `StepProfiler` stands around them (`train.loop.Watch`). All figures are
read out of the trace that was written, by pure functions, and are those of its last whole step. Memory is categorised
by the region a block was allocated in and the one it was freed in; what was there before comes from the model and the
optimizer.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tunesmith import disk
from tunesmith.config.schema import Run
from tunesmith.data.types import StepBatch
from tunesmith.plan.catalogue import find_gpu
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.models import read_facts
from tunesmith.plan.plan import Plan
from tunesmith.train.job import Job
from tunesmith.train.loop import loss_scale_of, rate_of, step_of

REGIONS = ("data", "forward", "loss", "backward", "optimizer", "communication", "wait")
"""In the last the processor waits for the GPU, so as not to be more than a step ahead of it."""
CATEGORIES = ("weights", "optimizer", "gradients", "activations", "loss", "other")
"""In the order they are stacked; fp32 masters count as optimizer."""
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")
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
    to the end of its own, whenever the processor launched them."""

    step_seconds: float
    host_seconds: dict[str, float]
    """Of the processor, by region."""
    device_seconds: dict[str, float]
    """Of kernels on a GPU, by the region that started them; empty on a CPU."""
    coverage: float
    """Share of the processor's time for the step that lies in a region."""
    busy: float | None
    """Share of the step in which a GPU was computing."""
    kernels: list[Kernel]
    kinds: dict[str, float]
    """Seconds of kernels by kind: products, attention, communication, other."""
    calls: int
    memory: MemoryPicture


@dataclass(frozen=True)
class Report:
    device: str
    step: int
    tokens: int
    tokens_per_second: float
    tflops: float
    """Of the model's own arithmetic, recomputation not counted."""
    share_of_peak: float | None
    """Of the device's peak in this precision, where the catalogue knows it."""
    bound: str
    bound_by: str
    analysis: Analysis
    measured_peak: int
    """Peak of memory as the allocator counts it, for comparison with the picture's."""
    files: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        made = asdict(self)
        memory = made["analysis"]["memory"]
        del memory["seconds"], memory["bytes"]  # the picture has them
        return made


class StepProfiler:
    """Profiles the steps of a range (counted from 1) and writes what it finds into a folder.

    As in training, a step is launched before the one before has ended on the GPU. There the step after them is recorded
    by the allocator, with the place of each allocation: that slows a step down, so it is not done while time is
    measured.
    """

    def __init__(
        self,
        job: Job,
        steps: range,
        folder: Path,
        *,
        replays: bool = True,
        warn: Callable[[str], None] | None = None,
    ):
        """`replays`: the steps are those of training, in which recorded passes are replayed. `warn`: told of a profile
        that could not be written, which is then no error: it is not what a run is for."""
        assert len(steps)
        self.job = job
        self.steps = steps
        self.folder = folder
        self.replays = replays
        self.warn = warn
        self.report: Report | None = None
        self.snapshot: Path | None = None
        self._profile: torch.profiler.profile | None = None
        self._baseline: dict[str, int] = {}
        self._last_whole: int | None = None

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if self._profile is not None and step not in self.steps:
            self.close()
        if step in self.steps:
            if self._profile is None and self.report is None:
                self._start()
            with record_function("step"):
                yield
            self._last_whole = step
            if step == self.steps[-1]:
                self.close()
        elif step == self.steps.stop and self.job.device.type == "cuda":
            with self._allocations_recorded():
                yield
        else:
            yield

    def close(self) -> None:
        """Stop, and write what there is; nothing where no step was whole."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        profile.stop()
        if self._last_whole is not None:
            with self._warned():
                self.report = self._write(profile, self._last_whole)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.job.device)
        self._baseline = _baseline(self.job)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.start()

    def _write(self, profile: torch.profiler.profile, step: int) -> Report:
        job = self.job
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "trace.json.gz"
        profile.export_chrome_trace(str(trace))
        on_gpu = job.device.type == "cuda"
        analysis = analyse(read_trace(trace), on_gpu=on_gpu, baseline=self._baseline)
        picture = self.folder / "memory.svg"
        picture.write_text(memory_svg(analysis.memory), encoding="utf-8")
        batch = job.loader.step((step - 1) % job.loader.total_steps)
        facts = read_facts(job.run.model, trust_remote_code=job.run.trust_remote_code)
        tflops = model_flops(facts, job.run, batch) / analysis.step_seconds / 1e12
        peak = peak_tflops(job.plan, torch.cuda.get_device_name(job.device)) if on_gpu else None
        bound_by, why = what_bounds(analysis, will_replay=job.plan.is_recorded and not self.replays)
        report = Report(
            device=torch.cuda.get_device_name(job.device) if on_gpu else "CPU",
            step=step,
            tokens=batch.tokens,
            tokens_per_second=round(batch.tokens / analysis.step_seconds, 1),
            tflops=float(f"{tflops:.4g}"),
            share_of_peak=round(tflops / peak, 4) if peak else None,
            bound=f"{largest_region(analysis)} {why}",
            bound_by=bound_by,
            analysis=analysis,
            measured_peak=torch.cuda.max_memory_allocated(job.device) if on_gpu else analysis.memory.peak_bytes,
            files=[trace.name, picture.name, "report.json"],
        )
        (self.folder / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        return report

    @contextmanager
    def _allocations_recorded(self) -> Iterator[None]:
        """A snapshot of the allocator after the step, with its history, as JSON: a pickle runs code when opened."""
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=200_000)
        try:
            yield
            content = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        with self._warned():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.snapshot = self.folder / "allocations.json.gz"
            with gzip.open(self.snapshot, "wt", encoding="utf-8", compresslevel=3) as file:
                json.dump(content, file, default=str)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # of a trace cut short by a full disk, the rest
            if self.warn is None:
                raise
            why = disk.reason(error) or f"{type(error).__name__}: {error}"
            self.warn(f"The profile could not be written to {self.folder}: {why}; training goes on without it.")


def profile_job(job: Job, folder: Path, *, steps: int = 2) -> Report:
    """Warm up, profile `steps` steps, write the profile into `folder`. The job's weights change; nothing is saved.

    Passes are not replayed, even where the plan has them recorded: a replay shows no allocation."""
    on_gpu = job.device.type == "cuda"
    warmup = 3 if on_gpu else 1  # compiled layers are done after two, and the GPU's clock has settled
    watch = StepProfiler(job, range(warmup + 1, warmup + steps + 1), folder, replays=False)
    train_step = step_of(job, loss_scale_of(job))
    train_step.recorder = None
    job.model.train()
    batches = itertools.chain.from_iterable(job.loader.iterate() for _ in itertools.count())
    underway: Callable[[], object] | None = None
    try:
        for step in range(1, warmup + steps + 1 + on_gpu):
            if on_gpu and step == warmup + 1:
                torch.cuda.reset_peak_memory_stats(job.device)
            with watch(step):
                with record_function("data"):
                    batch = next(batches)
                before, underway = underway, train_step.launch(batch, rate_of(job, batch.step))
                if before:
                    before()
        if underway:
            underway()
    finally:
        watch.close()
    assert watch.report
    if watch.snapshot:
        watch.report.files.append(watch.snapshot.name)
    return watch.report


# reading a trace


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


_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("communication", r"nccl|all_reduce|all_gather|reduce_scatter|c10d"),
        ("attention", r"flash|fmha|attention|_attn"),
        (
            "products",
            r"gemm|nvjet|cutlass|xmma|matmul|scaled_mm|triton_tem|mkldnn|aten::(mm|addmm|bmm|baddbmm|linear)$",
        ),
    )
)


def kind_of(kernel: str) -> str:
    """What a kernel or operator does, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


def what_bounds(found: Analysis, *, will_replay: bool = False) -> tuple[str, str]:
    """What the step waits for, in one word and in one sentence. `will_replay`: training replays recorded passes, and
    this step did not."""
    step = found.step_seconds
    data = found.host_seconds.get("data", 0.0) / step
    if data > 0.2 and (found.busy is None or found.busy < 0.9):
        return "data", f"Data bound the run: {data:.0%} of a step passes before its batch is there."
    if found.busy is not None and found.busy < 0.85:
        helps = "larger micro-batches or compiled layers help"
        if will_replay:
            helps = "in training most of them are recorded, and started at once"
        return "host", (
            f"The host bounds the run: the GPU computes for {found.busy:.0%} of a step only, while the processor is "
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
    compute = (found.kinds.get("products", 0.0) + found.kinds.get("attention", 0.0)) / total
    if compute >= 0.5:
        return "compute", f"Compute bounds the run: matrix products and attention take {compute:.0%} of its time."
    if found.busy is None and found.calls and step / found.calls < 50e-6:
        return "host", (
            f"The host bounds the run: {found.calls:,} small operations of {step / found.calls * 1e6:.0f} us each cost "
            "more to start than to do; larger micro-batches help."
        )
    return "memory bandwidth", (
        f"Memory bandwidth bounds the run: {1 - compute:.0%} of its time goes into operations that pass over memory "
        "rather than into products and attention."
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
    for moment in series:
        if (total := sum(moment.values())) > peak:
            peak, at_peak = total, moment
    times.append(end)
    series.append(dict(now))
    chosen = _thinned(times, series)
    return MemoryPicture(
        seconds=[(times[index] - start) / 1e6 for index in chosen],
        bytes={name: [series[index][name] for index in chosen] for name in CATEGORIES},
        peak_bytes=peak,
        at_peak=at_peak,
    )


def memory_svg(memory: MemoryPicture) -> str:
    """Memory by category over the step, stacked."""
    width, height, left, top = 860, 360, 70, 40
    length = memory.seconds[-1] or 1.0
    highest = max(1, memory.peak_bytes) * 1.05
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if highest > u)

    def x(second: float) -> str:
        return f"{left + second / length * width:.1f}"

    def y(size: float) -> str:
        return f"{top + height - size / highest * height:.1f}"

    text = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 150} {top + height + 50}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{left}" y="22" {text}>Memory over one step; peak {memory.peak_bytes / unit:.2f} {name}</text>',
    ]
    below = [0] * len(memory.seconds)
    for category, colour in zip(CATEGORIES, COLOURS, strict=True):
        above = [low + size for low, size in zip(below, memory.bytes[category], strict=True)]
        edge = _steps(memory.seconds, above) + _steps(memory.seconds, below)[::-1]
        points = " ".join(f"{x(second)},{y(size)}" for second, size in edge)
        parts.append(f'<polygon points="{points}" fill="{colour}"><title>{category}</title></polygon>')
        below = above
    for index, (category, colour) in enumerate(reversed(list(zip(CATEGORIES, COLOURS, strict=True)))):
        row = top + 10 + 20 * index
        size = memory.at_peak[category] / unit
        parts.append(f'<rect x="{left + width + 8}" y="{row}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 25}" y="{row + 11}" {text}>{category} {size:.2f}</text>')
    for tick in range(5):
        size = highest * tick / 4
        parts.append(f'<text x="{left - 6}" y="{y(size)}" text-anchor="end" {text}>{size / unit:.1f} {name}</text>')
        second = length * tick / 4
        place = f'x="{x(second)}" y="{top + height + 18}" text-anchor="middle"'
        parts.append(f"<text {place} {text}>{second * 1e3:.0f} ms</text>")
    parts.append(f'<text x="{left + width + 8}" y="{top + 150}" {text}>in {name}, at the peak</text>')
    return "\n".join([*parts, "</svg>", ""])


# arithmetic


def model_flops(facts: ModelFacts, run: Run, batch: StepBatch) -> float:
    """Of one step, by the usual count: twice the matrices a token passes through, the same again for the gradient of
    activations and, where all weights are trained, of weights; attention over what each token can see; the head for
    target tokens alone."""
    lengths = [length for micro in batch.micro_batches for length in micro.boundaries.diff().tolist()]
    attention = sum(length * facts.attention_flops(length) for length in lengths if length)
    passes = 3 if run.method == "full" else 2
    targets = sum(int((micro.weights > 0).sum()) for micro in batch.micro_batches)
    return passes * 2 * (facts.active * batch.tokens + facts.embedding * targets) + 3 * attention


def peak_tflops(plan: Plan, name: str) -> float | None:
    """What the device's maker promises for the plan's arithmetic."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    if plan.products == "fp8" and gpu.fp8:
        return gpu.fp8
    return gpu.fp32 if plan.precision == "fp32" else gpu.half


# helpers


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


def _baseline(job: Job) -> dict[str, int]:
    """Bytes by category between two steps."""
    optimizer = job.optimizer
    states = [value for state in optimizer.states() for value in state.values()]
    if optimizer.has_masters:
        states += optimizer.masters.values()
    weights = [value for module in job.model.modules() for value in _tensors_of(module)]
    seen: set[int] = set()
    found = {
        "weights": _storage_bytes(weights, job.device, seen),
        "optimizer": _storage_bytes(states, job.device, seen),
    }
    if job.device.type == "cuda":
        found["other"] = torch.cuda.memory_allocated(job.device) - sum(found.values())
    return found


def _tensors_of(module: torch.nn.Module) -> Iterator[Any]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from vars(module).values()


def _storage_bytes(values: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    total = 0
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device.type != device.type:
            continue
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            total += _storage_bytes([getattr(value, name) for name in names], device, seen)
        elif (storage := value.untyped_storage()).data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


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


def _steps(seconds: list[float], sizes: list[int]) -> list[tuple[float, int]]:
    """The corners of a staircase: a size holds until the next."""
    corners = []
    for index, (second, size) in enumerate(zip(seconds, sizes, strict=True)):
        if index:
            corners.append((second, sizes[index - 1]))
        corners.append((second, size))
    return corners
