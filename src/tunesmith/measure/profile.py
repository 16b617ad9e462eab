"""Profiles of training steps: a trace for Perfetto, a picture of memory, and a report of what bounds the run.

Steps run through the same code as in training; `StepProfiler` stands around them (`train.loop.Watch`) and records. What
the trace says is read by `trace.py`, and drawn by `picture.py`.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tunesmith import disk
from tunesmith.config.schema import Run
from tunesmith.data.types import StepBatch
from tunesmith.errors import UserError
from tunesmith.measure.picture import memory_svg
from tunesmith.measure.trace import Analysis, analyse, largest_region, read_trace, what_bounds
from tunesmith.plan.catalogue import find_gpu
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.models import read_facts
from tunesmith.plan.plan import Plan
from tunesmith.train.job import Job
from tunesmith.train.loop import loss_scale_of, rate_of, step_of


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

    As in training, a step is launched before the one before has ended on the GPU. There the step after them is captured
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
        """`replays`: the steps are those of training, in which captured passes are replayed. `warn`: told of a profile
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
        bound_by, why = what_bounds(analysis, will_replay=job.plan.cuda_graphs and not self.replays)
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


def profile_job(job: Job, folder: Path, *, steps: int = 2) -> Report | None:
    """Warm up, profile `steps` steps, write the profile into `folder`. The job's weights change; nothing is saved. Of
    several ranks the first is profiled.

    Passes are not replayed, even where the plan has them captured: a replay shows no allocation."""
    if job.roll_out is not None:
        raise UserError(f"Steps of objective: {job.run.objective} begin with answers, which are not profiled yet.")
    on_gpu = job.device.type == "cuda"
    warmup = 3 if on_gpu else 1  # compiled layers are done after two, and the GPU's clock has settled
    watch = None
    if job.ranks.is_first:
        watch = StepProfiler(job, range(warmup + 1, warmup + steps + 1), folder, replays=False)
    train_step = step_of(job, loss_scale_of(job))
    train_step.capture = None
    job.model.train()
    batches = itertools.chain.from_iterable(job.loader.iterate() for _ in itertools.count())
    underway: Callable[[], object] | None = None
    try:
        for step in range(1, warmup + steps + 1 + on_gpu):
            if on_gpu and step == warmup + 1:
                torch.cuda.reset_peak_memory_stats(job.device)
            with watch(step) if watch else nullcontext():
                with record_function("data"):
                    batch = next(batches)
                before, underway = underway, train_step.launch(batch, rate_of(job, batch.step))
                if before:
                    before()
        if underway:
            underway()
    finally:
        if watch:
            watch.close()
    if watch is None:
        return None
    assert watch.report
    if watch.snapshot:
        watch.report.files.append(watch.snapshot.name)
    return watch.report


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
    if plan.matmul_dtype == "fp8" and gpu.fp8:
        return gpu.fp8
    return gpu.fp32 if plan.precision == "fp32" else gpu.half


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
