"""`tunesmith train`: fine-tune, or continue an unfinished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tunesmith.measure.profile import StepProfiler
    from tunesmith.train.job import Job


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)] = Path("run.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Obey this plan instead of making one.")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue a run whose settings or data have changed since.")
    ] = False,
) -> None:
    """Fine-tune. On a folder that holds an unfinished run: continue it."""
    import os
    import time

    started = time.monotonic()
    from tunesmith.cli import display, output
    from tunesmith.config.load import load

    run = load(config, overrides or ()).run
    # Before torch starts: its allocator then grows pieces instead of keeping ones that fit nothing any more.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if run.profile_steps:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks help nobody
    folder = Path(run.output)
    from tunesmith.checkpoint import run_folder

    summary = run_folder.read_summary(folder)
    if summary is not None and not accept_changes:
        output.say(
            f"The run in {folder} is finished ({summary['steps']} steps); its result is {folder / summary['result']}. "
            "To train again, choose another output; to train on with other settings, add --accept-changes."
        )
        raise typer.Exit(0)
    screen = display.Display()
    plan = display.read_plan_file(plan_file) if plan_file else None
    screen.stage("Starting")
    from tunesmith.assemble import assemble, prepare_run, versions
    from tunesmith.checkpoint.store import RunLock
    from tunesmith.train import events
    from tunesmith.train.loop import train

    with RunLock(folder, warn=output.warn), screen:
        log = events.EventLog(folder)

        def observe(event: events.Event) -> None:
            log.write(event)
            screen.show(event)

        def warn(message: str) -> None:
            observe(events.Warned(message))

        setting = prepare_run(run, plan=plan, accept_changes=accept_changes, warn=warn, progress=screen.progress)
        (folder / "summary.json").unlink(missing_ok=True)
        screen.show_plan(setting.plan)
        screen.stage("Loading the model")
        job = assemble(setting)
        for message in job.warnings:
            warn(message)
        trained = sum(parameter.numel() for parameter in job.optimizer.parameters)
        observe(events.Started(job.loader.total_steps, trained, versions()))
        profiler = _profiler(job)
        outcome = train(job, observe, started=started, watch=profiler)
        if profiler:
            profiler.close()  # where the run ended before the last of its steps
        log.close()
    if not outcome.is_finished:
        output.say(f"Stopped after step {outcome.step} of {outcome.total_steps}; `tunesmith train` again continues.")
        raise typer.Exit(130 if "Ctrl-C" in outcome.reason else 143 if "SIGTERM" in outcome.reason else 0)
    if profiler and profiler.report:
        output.say(f"{profiler.report.bound} The profile is in {profiler.folder}.")
    output.say(f"Done. The trained weights are in {outcome.result}; try `tunesmith chat {folder}`.")


def _profiler(job: Job) -> StepProfiler | None:
    if job.run.profile_steps is None:
        return None
    from tunesmith.measure.profile import StepProfiler

    first, last = map(int, job.run.profile_steps.split(":"))
    return StepProfiler(job, range(first, last + 1), job.folder / "profile")
