"""A run from its settings to its end, as `tunesmith train` has it alone or as a variant of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunesmith.cli.display import Display
    from tunesmith.config.schema import Run
    from tunesmith.measure.profile import StepProfiler
    from tunesmith.parallel.ranks import Ranks
    from tunesmith.plan.plan import Plan
    from tunesmith.run.assemble import Shared
    from tunesmith.run.start import PreparedRun
    from tunesmith.train import events
    from tunesmith.train.job import Job
    from tunesmith.train.loop import Outcome
    from tunesmith.train.phases import OutOfMemory

LEAK_ADVICE = "Take them out of the training data, or evaluate on other data; leave eval out to have records held out."


def check_run(run: Run) -> Run:
    """The run as it is trained, after a look at what of its settings can be wrong before anything of it is there."""
    from tunesmith.data.prepare import check_output
    from tunesmith.run.folder import check_place

    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_output(run)
    check_place(run)
    return run


@contextmanager
def observed(
    folder: Path, screen: Display, run: Run, trackers: Sequence[str] = (), *, is_first: bool = True
) -> Iterator[Callable[[events.Event], None]]:
    """What is told of each event: the run's log, the screen and trackers, on the first rank."""
    from tunesmith.train import events
    from tunesmith.train.trackers import Trackers

    log = events.EventLog(folder) if is_first else None

    def write(event: events.Event) -> None:
        if log:
            log.write(event)
            screen.show(event)

    def warn(message: str) -> None:
        write(events.Warned(message))

    try:
        with Trackers(trackers if is_first else (), folder, run.model_dump(mode="json"), warn) as told:

            def observe(event: events.Event) -> None:
                write(event)
                told.see(event)

            yield observe
    finally:
        if log:
            log.close()


def train_prepared(
    ready: PreparedRun,
    others: Ranks,
    screen: Display,
    observe: Callable[[events.Event], None],
    started: float,
    shared: Shared | None = None,
) -> tuple[Outcome, StepProfiler | None]:
    """A run from its weights to its end; `shared`: what it has in common with those before and after it."""
    from tunesmith.infer.described import versions
    from tunesmith.run.assemble import assemble
    from tunesmith.train import events
    from tunesmith.train.loop import train

    run, folder = ready.run, Path(ready.run.output)
    if others.is_first:
        (folder / "summary.json").unlink(missing_ok=True)
        if shared is None:
            screen.show_plan(ready.plan)
        screen.stage("Loading the model")
    with _memory_errors_in_words(ready.plan, folder, run, observe), ExitStack() as stack:
        job = stack.enter_context(closing(assemble(ready, others, screen.progress, shared)))
        for message in job.warnings:
            if message not in ready.data.leaks:
                observe(events.Warned(message))
        trained = sum(parameter.numel() for parameter in job.optimizer.weights.values())
        observe(events.Started(job.loader.total_steps, trained, versions()))
        for message in ready.data.leaks if not ready.is_continued else ():  # a start forgets what was at steps before
            observe(events.Alert(0, "leak", message, LEAK_ADVICE))
        profiler = _profiler(job, lambda message: observe(events.Warned(message))) if others.is_first else None
        outcome = train(job, observe, started=started, watch=profiler, progress=screen.progress)
        if profiler:
            profiler.close()  # where the run ended before the last of its steps
    return outcome, profiler


@contextmanager
def _memory_errors_in_words(
    plan: Plan, folder: Path, run: Run | None = None, observe: Callable[[events.Event], None] = lambda _: None
) -> Iterator[None]:
    """Memory that ran out is no fault of ours that had to be reported, and something can be done about it."""
    from tunesmith.errors import UserError
    from tunesmith.train import events
    from tunesmith.train.phases import OutOfMemory, is_out_of_memory

    try:
        yield
    except Exception as error:
        found = error if isinstance(error, OutOfMemory) else None
        if found is None and not is_out_of_memory(error):
            raise
        is_on_gpu = found.is_on_gpu if found else "OutOfMemory" in type(error).__name__
        predicted, limit = (f"{size / 2**30:.1f} GiB" for size in (plan.memory.total, plan.memory_limit))
        evidence = (
            f"The memory of {'the GPU' if is_on_gpu else 'this machine'} ran out, though {predicted} of {limit} were "
            f"predicted to do.{_held_and_predicted(plan, found)}"
        )
        advice = (
            f"End other programs that use it, or lower micro_batch or raise checkpointed_layers in "
            f"{folder / 'plan.json'}, or choose a shorter sequence_length in a new output; `tunesmith train` then goes "
            f"on from the last checkpoint.{_what_would_fit(run, plan, found)}"
        )
        observe(events.Alert(found.step if found else 0, "out of memory", evidence, advice, is_fatal=True))
        raise UserError(f"{evidence} {advice}") from error


def _held_and_predicted(plan: Plan, found: OutOfMemory | None) -> str:
    """What was allocated, by what it was for, beside what the plan had said."""
    said = {name: size for name, size in plan.memory.model_dump().items() if size >= 2**20}
    largest = sorted(said.items(), key=lambda pair: -pair[1])[:5]
    parts = [f"{name} {size / 2**30:.2f} GiB" for name, size in largest]
    predicted = f" Predicted at the peak ({plan.peak or 'of a step'}): {', '.join(parts)}." if parts else ""
    if found is None:
        return predicted
    held = [f"{name} {size / 2**30:.2f} GiB" for name, size in found.held.items()]
    of = f", of which {', '.join(held)}" if held else ""
    return f" Allocated at the most: {found.peak / 2**30:.2f} GiB{of}.{predicted}"


def _what_would_fit(run: Run | None, plan: Plan, found: OutOfMemory | None) -> str:
    """The plan for a device that has less by as much as this run took more than was predicted, or a tenth less."""
    from tunesmith.errors import UserError
    from tunesmith.plan.hardware import probe
    from tunesmith.run.choose import new_plan
    from tunesmith.run.folder import plan_differences

    if run is None:
        return ""
    share = 0.9
    if found is not None and found.is_on_gpu and found.peak:
        share = min(share, plan.memory.allocated / found.peak)
    try:
        hardware = probe()
        gpus = tuple(gpu.changed(free=int(share * plan.memory_limit)) for gpu in hardware.gpus)
        less = hardware.changed(gpus=gpus, available=int(share * plan.memory_limit) * hardware.processes)
        made = new_plan(run, less)
    except UserError:
        return ""
    if made.memory.total > made.memory_limit:
        return " No other plan of these settings would take less: choose method: qlora, or a shorter sequence_length."
    changes = [one for one in plan_differences(plan, made) if "threads" not in one]
    said = f"{'; '.join(changes)}; predicted {made.memory.total / 2**30:.1f} GiB"
    return f" What would fit: {said}." if changes else ""


def _profiler(job: Job, warn: Callable[[str], None]) -> StepProfiler | None:
    if job.run.profile_steps is None:
        return None
    from tunesmith.measure.profile import StepProfiler

    first, last = map(int, job.run.profile_steps.split(":"))
    if first > job.loader.total_steps:
        warn(f"profile_steps begins at step {first}, and the run has {job.loader.total_steps}: none is profiled.")
    return StepProfiler(job, range(first, last + 1), job.folder / "profile", warn=warn)
