"""`tunesmith merge`: the adapter into the base, proved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    to: Annotated[Path, typer.Option("--to", help="New folder for the merged model.")],
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; the base model's own when left out.")
    ] = None,
) -> None:
    """Merge a run's adapter into its base model, and check that the logits agree."""
    from tunesmith.cli import output
    from tunesmith.disk import writing
    from tunesmith.errors import UserError

    if precision not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--precision is {precision}; it can be fp32, bf16 or fp16.")
    output.stage(f"Merging {folder}")
    from tunesmith.run.merge import merge_run
    from tunesmith.run.there import why_checkpoint

    with writing(to, "make room there, or give --to another folder"):
        merged = merge_run(folder, to, precision=precision, progress=output.progress)
    if merged.step is not None:
        output.note(why_checkpoint(folder, merged.step))
    output.say(f"Merged {merged.adapters} adapters into {merged.folder} ({merged.precision}).")
    if merged.bits is not None:
        output.say(
            f"The run trained over a base rounded to {merged.bits} bits; the adapter is merged into the base as its "
            "files have it, and the proof is about that. Try the merged model by `tunesmith chat` first."
        )
    output.say(
        f"Proved on the files written: logits differ from base + adapter by {merged.difference:.1e} "
        f"(the adapter itself changes them by {merged.effect:.1e})."
    )
