"""`tunesmith lr`: a short range test of the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.ranks import RanksOption

if TYPE_CHECKING:
    from tunesmith.measure.rate_range import RateRange

ROWS = 12
"""Of the table; the picture has every step."""


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings; KEY=VALUE alone need no file.")] = Path(
        "run.yaml"
    ),
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
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a few steps with growing learning rates, and suggest one. The run itself is not touched."""
    from tunesmith.cli import output
    from tunesmith.cli.aside import ADVICE, prepare_aside
    from tunesmith.disk import writing

    _check(lowest, highest)
    options = {"steps": steps, "lowest": lowest, "highest": highest}
    aside = prepare_aside(
        "lr", config, overrides or (), options, plan_file=plan_file, ranks=ranks, as_json=as_json
    )  # fmt: skip
    if aside is None:
        return
    with aside.job() as (job, others):
        from tunesmith.measure.rate_range import SPAN, rates_between, try_rates, write

        planned = job.plan.learning_rate
        first, last = lowest or planned / SPAN, highest or planned * SPAN
        _check(first, last)
        found = try_rates(job, rates_between(first, last, steps), output.progress)
    if not others.is_first:
        return
    with writing(aside.folder, ADVICE):
        files = write(found, aside.folder)
    if as_json:
        output.print_json(found.as_json() | {"folder": str(aside.folder), "files": files})
    else:
        show(found, aside.folder)


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
