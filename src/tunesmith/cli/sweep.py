"""A sweep, as `tunesmith train` and `tunesmith plan` have it: several runs in one process, over one base."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tunesmith.config.schema import Run
    from tunesmith.config.sweep import Variant
    from tunesmith.plan.plan import Plan
    from tunesmith.run.assemble import Shared
    from tunesmith.run.start import PreparedRun
    from tunesmith.train.loop import Outcome


def check_alone(plan_file: Path | None, ranks: int) -> None:
    """UserError where a sweep is given what is for one run."""
    from tunesmith.errors import UserError

    if plan_file is not None:
        raise UserError("--plan is for one run, and each variant of a sweep has a plan of its own; leave it out.")
    if ranks > 1:
        raise UserError(f"A sweep is one process on one device, and --ranks is {ranks}; leave --ranks or sweep out.")


def train_sweep(run: Run, trackers: Sequence[str] = (), *, accept_changes: bool) -> None:
    """Train the variants that are not finished, one after the other, and compare them all."""
    from tunesmith.checkpoint.lock import RunLock
    from tunesmith.cli import output
    from tunesmith.cli.training import check_run
    from tunesmith.config.sweep import variants
    from tunesmith.run import sweep

    folder, found = Path(run.output), variants(run)
    sweep.check_folder(folder)
    found = [replace(variant, run=check_run(variant.run)) for variant in found]
    output.say(f"A sweep of {len(found)} variants over {run.model}")
    output.stage("Loading torch and transformers")
    from tunesmith.run.assemble import Shared

    left = [variant for variant in found if not _is_left_finished(variant, accept_changes=accept_changes)]
    failures: dict[str, str] = {}
    outcome = None
    with ExitStack() as stack:
        for variant in left:
            stack.enter_context(RunLock(Path(variant.run.output), warn=output.warn))
        prepared = {variant.name: _prepare(variant, accept_changes=accept_changes) for variant in left}
        if prepared:
            show_plans({name: ready.plan for name, (ready, _) in prepared.items()})
        shared = Shared()
        said: set[str] = set()
        for variant in left:
            output.say()
            output.say(f"Variant {found.index(variant) + 1} of {len(found)}: {variant.name}", style="bold")
            outcome = _train_variant(*prepared.pop(variant.name), shared, said, failures, variant.name, trackers)
            sweep.write(folder, sweep.rows_of(found, failures))
            if outcome is not None and not outcome.is_finished:
                break
    _show_results(folder, found, failures)
    if outcome is not None and not outcome.is_finished:
        output.say("Stopped; `tunesmith train` again continues the sweep.")
        raise typer.Exit(130 if "Ctrl-C" in outcome.reason else 143 if "SIGTERM" in outcome.reason else 0)
    if failures:
        raise typer.Exit(1)


def show_plans(plans: dict[str, Plan]) -> None:
    """The variants beside each other, and the memory of them all."""
    from tunesmith.cli import output

    rows = [
        (
            name,
            f"{plan.learning_rate:g}",
            f"{plan.sequences_per_step * plan.sequence_length:,}",
            output.readable_bytes(plan.memory.total),
            f"{plan.time.total:.2f} s",
        )
        for name, plan in plans.items()
    ]
    columns = ("variant", "rate", "tokens a step", "memory", "a step")
    output.say(output.table(columns, rows, right=columns[1:]))
    largest = max(plan.memory.total for plan in plans.values())
    output.say(
        f"Memory of the whole sweep: {output.readable_bytes(largest)}, that of its largest variant: they train one "
        "after the other over the same base."
    )


def _is_left_finished(variant: Variant, *, accept_changes: bool) -> bool:
    """Whether there is nothing left to do; said where its settings have changed since."""
    from tunesmith.cli import output
    from tunesmith.run import folder as run_folder
    from tunesmith.run import sweep

    if not sweep.is_finished(variant):
        return False
    before = run_folder.read_identity(Path(variant.run.output))
    changes = run_folder.changed_settings(before, variant.run) if before else []
    if changes and accept_changes:
        return False
    output.say(f"{variant.name} is finished")
    if changes:
        output.warn(f"Settings have changed since, which has no effect on a finished run: {'; '.join(changes)}.")
    return True


def _prepare(variant: Variant, *, accept_changes: bool) -> tuple[PreparedRun, list[str]]:
    """What is known of a variant before any of them trains, and what was noticed on the way."""
    from tunesmith.cli import output
    from tunesmith.plan.hardware import probe
    from tunesmith.run.start import prepare_run

    warnings: list[str] = []
    ranks = 1 if probe().gpu_count > 1 else None
    how = {"accept_changes": accept_changes, "warn": warnings.append, "progress": output.progress}
    return prepare_run(variant.run, ranks=ranks, **how), warnings


def _train_variant(
    ready: PreparedRun,
    warnings: Sequence[str],
    shared: Shared,
    said: set[str],
    failures: dict[str, str],
    name: str,
    trackers: Sequence[str],
) -> Outcome | None:
    """To its end; None where its losses were no finite numbers, which is no reason to end the sweep. What was `said` of
    a variant before is in this one's log and not shown again."""
    import gc

    import torch

    from tunesmith.cli import display, output
    from tunesmith.cli.training import observed, train_prepared
    from tunesmith.parallel.ranks import Ranks
    from tunesmith.train import events
    from tunesmith.train.step import NotFinite

    started = time.monotonic()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        own = ready.run
        with display.Display(said) as screen, observed(Path(own.output), screen, own, trackers) as observe:
            for message in warnings:
                observe(events.Warned(message))
            outcome, _ = train_prepared(ready, Ranks(), screen, observe, started, shared)
        return outcome
    except NotFinite as error:
        failures[name] = str(error)
        output.error(str(error))
        return None
    finally:
        if ready.plan.is_compiled:
            torch.compiler.reset()  # each variant is compiled as it would be alone, whatever ranks were there before
        gc.collect()  # layers and what was made of them know each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _show_results(folder: Path, found: Sequence[Variant], failures: dict[str, str]) -> None:
    from tunesmith.cli import output
    from tunesmith.run import sweep

    rows = sweep.rows_of(found, failures)
    sweep.write(folder, rows)
    output.say()
    right = ("held-out loss", "before", "training loss", "steps", "time")
    output.say(output.table(sweep.COLUMNS, map(sweep.cells, rows), right=right))
    if note := sweep.note_on(rows):
        output.note(note)
    best = next((row.name for row in rows if row.is_best), None)
    tried = f"; try `tunesmith chat {shlex.quote(str(folder / best))}`" if best else ""
    output.say(f"The table is in {folder / sweep.TABLE}{tried}.")
