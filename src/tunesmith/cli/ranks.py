"""Commands that run as several ranks: one process each, started by the first call of the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tunesmith.config.schema import Run
    from tunesmith.plan.plan import Plan

RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", min=1, help="Ranks to start on this machine: all its GPUs, or 1 on a CPU, when left out."),
]


def plan_for_ranks(run: Run, plan: Plan | None, asked: int | None) -> Plan:
    """The plan given, or one that is made now, by which ranks are started."""
    from tunesmith.cli import output
    from tunesmith.errors import UserError
    from tunesmith.model.prefetch import read_files
    from tunesmith.plan.models import check_there

    output.stage("Making the plan")
    check_there(run.model)
    read_files(run.model)
    from tunesmith.run.choose import launch_plan

    chosen = launch_plan(run, plan=plan, ranks=asked)
    count = chosen.mesh.ranks
    if asked not in (None, count) and plan:
        raise UserError(f"--ranks is {asked}, and the plan given is for {count}; leave one of the two out.")
    if asked not in (None, count):
        batch = f"{chosen.sequences_per_step} sequences of {chosen.sequence_length:,} tokens"
        raise UserError(
            f"--ranks is {asked}, but a step has {batch}, which so many cannot share; give --ranks {count}, or another "
            "batch_tokens."
        )
    return chosen


def ranks_to_start(asked: int | None, device: str = "auto") -> int:
    """How many ranks share the work of a command that can be cut at will; 1 in a process that is a rank already."""
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.plan.hardware import probe

    if read_rank_environment().is_started:
        return 1
    return asked or (probe().gpu_count if device != "cpu" else 1) or 1


def start_ranks(
    arguments: Sequence[str],
    count: int,
    *,
    plan: Plan | None = None,
    restarts: int = 0,
    once: Sequence[str] = (),
    folder: Path | None = None,
) -> None:
    """Run `tunesmith` with these arguments as `count` ranks; ends as the first of them that failed. `plan`: the one
    they are started for, which they then obey. `folder`: of the run, where ranks that hang leave word."""
    import os

    from tunesmith.cli import output
    from tunesmith.launch.local import run_tunesmith
    from tunesmith.launch.rank_environment import PLAN

    if plan is not None and plan.forward is not None:  # made for the data and the model as they are
        os.environ[PLAN] = plan.model_dump_json()

    output.clear_bottom()
    failure = run_tunesmith(arguments, count, restarts=restarts, warn=output.warn, once=once)
    if failure is None:
        return
    from tunesmith.train.hang import stacks

    for line in failure.report(count, stacks(folder) if folder else []):
        typer.echo(line, err=True)
    raise typer.Exit(failure.exit_code)
