"""`tunesmith train`: fine-tune, or continue an unfinished run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.ranks import RanksOption, plan_for_ranks, start_ranks

if TYPE_CHECKING:
    from tunesmith.cli.display import Display
    from tunesmith.config.schema import Run
    from tunesmith.launch.rank_environment import RankEnvironment
    from tunesmith.measure.profile import StepProfiler
    from tunesmith.plan.plan import Plan
    from tunesmith.train import events
    from tunesmith.train.job import Job
    from tunesmith.train.loop import Outcome
    from tunesmith.train.phases import OutOfMemory

LEAK_ADVICE = "Take them out of the training data, or evaluate on other data; leave eval out to have records held out."


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)] = Path("run.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Obey this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    restarts: Annotated[
        int, typer.Option(help="When a rank dies, start all again from the last checkpoint, so many times.")
    ] = 0,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue a run whose settings or data have changed since.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track", envvar="TUNESMITH_TRACK", help="Tell a tracker, too: tensorboard, wandb, mlflow, trackio."
        ),
    ] = None,
) -> None:
    """Fine-tune. On a folder that holds an unfinished run: continue it."""
    import time

    started = time.monotonic()
    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.cli import display
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.train.trackers import read_names

    trackers = read_names(track or ())
    run, environment = _read(config, overrides or ()), read_rank_environment()
    folder, is_first = Path(run.output), environment.rank == 0
    _leave_finished(run, folder, accept_changes=accept_changes, speaks=is_first)
    screen = display.Display() if is_first else display.Silent()
    plan = display.read_plan_file(plan_file) if plan_file else None
    if not environment.is_started:
        if not screen.is_live:
            screen.stage("Starting")
        chosen = plan_for_ranks(run, plan, ranks)
        if (count := chosen.mesh.ranks) > 1:
            again = ["train", str(config), *(overrides or ()), *(["--plan", str(plan_file)] if plan_file else [])]
            again += [f"--track={name}" for name in trackers]
            once = ["--accept-changes"] if accept_changes else []
            start_ranks(again, count, plan=chosen, restarts=restarts, once=once, folder=folder)
            return
        output.stage("Loading torch and transformers")
    how = {"plan": plan, "ranks": ranks, "accept_changes": accept_changes}
    outcome, profiler = _train(run, environment, screen, started, how, trackers if is_first else ())
    if is_first:
        _say_outcome(outcome, folder, profiler)
    if not outcome.is_finished:
        raise typer.Exit(130 if "Ctrl-C" in outcome.reason else 143 if "SIGTERM" in outcome.reason else 0)


def _read(config: Path, overrides: Sequence[str]) -> Run:
    """The settings, after what must be known of them before torch starts and before a file of the run is there."""
    import os

    from tunesmith.config.load import load
    from tunesmith.data.prepare import check_output
    from tunesmith.run.folder import check_place

    run = load(config, overrides).run
    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_output(run)
    # torch's allocator then grows pieces instead of keeping ones that fit nothing any more.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if run.profile_steps:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks help nobody
    check_place(run)
    return run


def _leave_finished(run: Run, folder: Path, *, accept_changes: bool, speaks: bool) -> None:
    """End here where the run is finished and its result is there."""
    from tunesmith.cli import output
    from tunesmith.run import folder as run_folder

    summary = run_folder.read_summary(folder)
    if summary is not None and not (folder / summary["result"]).is_dir():
        if speaks:
            output.warn(f"The run in {folder} was finished, but its result is gone; it is made again.")
        return
    if summary is None or accept_changes:
        return
    before = run_folder.read_identity(folder)
    if speaks and before is not None and (changes := run_folder.changed_settings(before, run)):
        output.warn(f"Settings have changed since, which has no effect on a finished run: {'; '.join(changes)}.")
    if speaks:
        output.say(
            f"The run in {folder} is finished ({summary['steps']} steps); its result is {folder / summary['result']}. "
            "To train again, choose another output; to train on with other settings, add --accept-changes."
        )
    raise typer.Exit(0)


def _train(
    run: Run,
    environment: RankEnvironment,
    screen: Display,
    started: float,
    how: dict[str, Any],
    trackers: Sequence[str] = (),
) -> tuple[Outcome, StepProfiler | None]:
    """One rank's part of the run, or all of it. `how`: what is passed on to `prepare_run`."""
    from tunesmith.checkpoint.lock import RunLock
    from tunesmith.cli import output
    from tunesmith.infer.described import versions
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import start_run
    from tunesmith.train import events
    from tunesmith.train.loop import train
    from tunesmith.train.trackers import Trackers

    folder, is_first = Path(run.output), environment.rank == 0
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(RunLock(folder, warn=output.warn))
        stack.enter_context(screen)
        log = events.EventLog(folder) if is_first else None
        if log:
            stack.callback(log.close)

        def write(event: events.Event) -> None:
            if log:
                log.write(event)
                screen.show(event)

        def warn(message: str) -> None:
            write(events.Warned(message))

        told = stack.enter_context(Trackers(trackers, folder, run.model_dump(mode="json"), warn))

        def observe(event: events.Event) -> None:
            write(event)
            told.see(event)

        others = stack.enter_context(connected(environment))
        setting = start_run(run, others, **how, warn=warn, progress=screen.progress)
        if is_first:
            (folder / "summary.json").unlink(missing_ok=True)
            screen.show_plan(setting.plan)
            screen.stage("Loading the model")
        stack.enter_context(_memory_errors_in_words(setting.plan, folder, run, observe))
        job = assemble(setting, others, screen.progress)
        for message in job.warnings:
            if message not in setting.data.leaks:
                warn(message)
            elif not setting.is_continued:
                observe(events.Alert(0, "leak", message, LEAK_ADVICE))
        trained = sum(parameter.numel() for parameter in job.optimizer.weights.values())
        observe(events.Started(job.loader.total_steps, trained, versions()))
        profiler = _profiler(job, warn) if is_first else None
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
    from tunesmith.run.choose import plan_run
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
        made = plan_run(run, less)
    except UserError:
        return ""
    if made.memory.total > made.memory_limit:
        return " No other plan of these settings would take less: choose method: qlora, or a shorter sequence_length."
    changes = [one for one in plan_differences(plan, made) if "threads" not in one]
    said = f"{'; '.join(changes)}; predicted {made.memory.total / 2**30:.1f} GiB"
    return f" What would fit: {said}." if changes else ""


def _say_outcome(outcome: Outcome, folder: Path, profiler: StepProfiler | None) -> None:
    from tunesmith.cli import output
    from tunesmith.run.folder import read_run

    if not outcome.is_finished:
        where = "" if outcome.resumes_at == outcome.step else f" from step {outcome.resumes_at}"
        again = f"`tunesmith train` again continues{where}."
        output.say(f"Stopped after step {outcome.step} of {outcome.total_steps}; {again}")
        return
    if profiler and profiler.report:
        output.say(f"{profiler.report.bound} The profile is in {profiler.folder}.")
    talks = read_run(folder).objective not in ("reward", "classify", "embed")
    verb = "chat" if talks else "eval"
    output.say(f"Done. The trained weights are in {outcome.result}; try `tunesmith {verb} {folder}`.")


def _profiler(job: Job, warn: Callable[[str], None]) -> StepProfiler | None:
    if job.run.profile_steps is None:
        return None
    from tunesmith.measure.profile import StepProfiler

    first, last = map(int, job.run.profile_steps.split(":"))
    if first > job.loader.total_steps:
        warn(f"profile_steps begins at step {first}, and the run has {job.loader.total_steps}: none is profiled.")
    return StepProfiler(job, range(first, last + 1), job.folder / "profile", warn=warn)
