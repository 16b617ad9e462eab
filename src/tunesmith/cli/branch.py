"""`tunesmith branch`: go on from a checkpoint of a run, in another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    before: Annotated[int, typer.Option("--before", help="Continue from the last checkpoint before this step.", min=1)],
    output: Annotated[Path, typer.Option("--output", help="Folder of the new run.")],
    exclude: Annotated[
        Path | None,
        typer.Option("--exclude", help="File of records to leave out from there on, as `tunesmith ui` writes it."),
    ] = None,
) -> None:
    """Start a new run from a checkpoint of another, without some records or with other settings."""
    from tunesmith.cli import output as screen

    screen.stage(f"Branching {folder}")
    from tunesmith.run.branch import branch

    made = branch(folder, before, output, exclude)
    screen.say(
        f"{output} goes on after step {made.step} of {folder}. Change what you like in {made.settings}, then "
        f"`tunesmith train {made.settings} --accept-changes`."
    )
