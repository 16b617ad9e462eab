"""`tunesmith report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; RUN/report.html when left out.")] = None,
) -> None:
    """Write a run as one HTML file: curves, predicted and measured, plan, settings."""
    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.cli import output
    from tunesmith.disk import writing
    from tunesmith.ui.report import report

    made = report(folder).encode()
    path = folder / "report.html" if out is None else out
    with writing(path, "make room there or choose another file with --out"):
        write_atomic(path, made)
    output.say(f"{path} ({output.readable_bytes(len(made))}) opens in any browser, also offline")
