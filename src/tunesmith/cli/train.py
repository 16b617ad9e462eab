"""`tunesmith train`: fine-tune, or continue an unfinished run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.ranks import RanksOption, plan_for_ranks, start_ranks
from tunesmith.cli.training import check_run, observed, train_prepared

if TYPE_CHECKING:
    from tunesmith.cli.display import Display
    from tunesmith.config.schema import Run
    from tunesmith.launch.rank_environment import RankEnvironment
    from tunesmith.measure.profile import StepProfiler
    from tunesmith.train.loop import Outcome


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings; KEY=VALUE alone need no file.")] = Path(
        "run.yaml"
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    restarts: Annotated[
        int, typer.Option(help="When a rank dies, restart all from the last checkpoint, up to this many times.")
    ] = 0,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue a run although its settings or data have changed.")
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track", envvar="TUNESMITH_TRACK", help="Also log to a tracker: tensorboard, wandb, mlflow, trackio."
        ),
    ] = None,
) -> None:
    """Fine-tune, or continue the unfinished run in the output folder."""
    import time

    started = time.monotonic()
    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.cli import display
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.train.trackers import read_names

    trackers = read_names(track or ())
    run, environment = _read(config, overrides or ()), read_rank_environment()
    if run.sweep:
        from tunesmith.cli.sweep import check_alone, train_sweep

        check_alone(plan_file, max(ranks or 1, environment.ranks))
        train_sweep(run, trackers, accept_changes=accept_changes)
        return
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

    run = load(config, overrides).run
    # torch's allocator then grows pieces instead of keeping ones that fit nothing any more.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if run.profile_steps:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks help nobody
    return run if run.sweep else check_run(run)


def _leave_finished(run: Run, folder: Path, *, accept_changes: bool, speaks: bool) -> None:
    """End here where the run is finished and its result is there."""
    from tunesmith.cli import output
    from tunesmith.run import folder as run_folder

    summary = run_folder.read_summary(folder)
    if (lost := run_folder.lost_of_result(folder)) is not None:
        if speaks:
            output.warn(f"The run in {folder} was finished, but {lost} is gone; its result is made again.")
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
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.start import start_run
    from tunesmith.train import events

    folder, is_first = Path(run.output), environment.rank == 0
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(RunLock(folder, warn=output.warn))
        stack.enter_context(screen)
        observe = stack.enter_context(observed(folder, screen, run, trackers, is_first=is_first))

        def warn(message: str) -> None:
            observe(events.Warned(message))

        others = stack.enter_context(connected(environment))
        setting = start_run(run, others, **how, warn=warn, progress=screen.progress)
        return train_prepared(setting, others, screen, observe, started)


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
    talks = read_run(folder).objective not in ("reward", "classify", "classify_tokens", "embed")
    verb = "chat" if talks else "eval"
    output.say(f"Done. The trained weights are in {outcome.result}; try `tunesmith {verb} {shlex.quote(str(folder))}`.")
