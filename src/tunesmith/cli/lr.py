"""`tunesmith lr`: a short range test of the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.ranks import RanksOption, plan_for_ranks, start_ranks

if TYPE_CHECKING:
    from tunesmith.measure.rate_range import RateRange

ROWS = 12
"""Of the table; the picture has every step."""


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)] = Path("run.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=10, max=1000, help="Steps, each with a higher rate.")] = 60,
    lowest: Annotated[
        float | None, typer.Option(help="First rate; a hundredth of the plan's when left out.", show_default=False)
    ] = None,
    highest: Annotated[
        float | None, typer.Option(help="Last rate; a hundred times the plan's when left out.", show_default=False)
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Obey this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a few steps with growing learning rates, and suggest one. The run itself is not touched."""
    import tempfile

    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.cli import display
    from tunesmith.config.load import load
    from tunesmith.disk import check_writable, writing
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.run.folder import check_place

    run = load(config, overrides or ()).run
    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_place(run)
    _check(lowest, highest)
    plan = display.read_plan_file(plan_file) if plan_file else None
    folder = Path(run.output) / "lr"
    advice = "make room there, or set output to another folder"
    with writing(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "report.json", advice)
    environment = read_rank_environment()
    if not environment.is_started and (chosen := plan_for_ranks(run, plan, ranks)).mesh.ranks > 1:
        given = {"steps": steps, "lowest": lowest, "highest": highest, "plan": plan_file}
        flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words = ["lr", str(config), *(overrides or ()), *flags, *(["--json"] if as_json else [])]
        start_ranks(words, chosen.mesh.ranks, plan=chosen)
        return
    output.stage("Loading torch and transformers")
    from tunesmith.measure.rate_range import SPAN, rates_between, try_rates, write
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import start_run

    with tempfile.TemporaryDirectory(prefix="tunesmith-lr-") as own, connected(environment) as others:
        there = run.model_copy(update={"output": others.tell(own)})
        how = {"plan": plan, "ranks": None if environment.is_started else 1, "saves": False}
        setting = start_run(there, others, **how, warn=output.warn, progress=output.progress)
        output.stage("Loading the model")
        job = assemble(setting, others)
        planned = job.plan.learning_rate
        first, last = lowest or planned / SPAN, highest or planned * SPAN
        _check(first, last)
        found = try_rates(job, rates_between(first, last, steps), output.progress)
        others.wait()  # before the folder is gone
        is_first = others.is_first
    if not is_first:
        return
    with writing(folder, advice):
        files = write(found, folder)
    if as_json:
        output.print_json(found.as_json() | {"folder": str(folder), "files": files})
    else:
        show(found, folder)


def show(found: RateRange, folder: Path) -> None:
    from tunesmith.cli import output

    tried = found.tried
    count = min(ROWS, len(tried))
    shown = [tried[round(index * (len(tried) - 1) / (count - 1))] for index in range(count)]
    rows = [(f"{one.rate:.2e}", f"{one.loss:.4f}", f"{one.smoothed:.4f}") for one in shown]
    columns = ("learning rate", "loss", "moving average")
    output.say(output.table(columns, rows, right=columns))
    if found.has_diverged:
        output.say(f"Stopped there: from {tried[-1].rate:.2g} on the loss diverges.")
    output.say()
    suggested = f"learning_rate: {found.suggested:.2g}" if found.suggested else "No rate is suggested"
    output.say(f"{suggested} ({found.reason}).")
    output.say(f"The picture is {folder / 'rates.svg'}.")


def _check(lowest: float | None, highest: float | None) -> None:
    from tunesmith.errors import UserError

    for name, value in (("lowest", lowest), ("highest", highest)):
        if value is not None and not 0 < value < 1e6:
            raise UserError(f"--{name} is {value:g}; a learning rate is a number above 0, such as 1e-5.")
    if lowest is not None and highest is not None and highest <= 1.1 * lowest:
        raise UserError(f"--lowest is {lowest:g} and --highest {highest:g}: there are no rates between them.")
