"""`tunesmith plan`: what would happen, and why, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)] = Path("run.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, for `train --plan`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how the run would be done, what memory it needs, and why."""
    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.cli import output
    from tunesmith.config.load import load

    run = load(config, overrides or ()).run
    from tunesmith.assemble import plan_run

    plan = plan_run(run)
    if save is not None:
        write_atomic(save, (plan.model_dump_json(indent=2) + "\n").encode())
    if as_json:
        output.print_json(plan.model_dump(mode="json"))
        return
    output.say(output.table(("plan", "", "why"), [(r.topic, r.choice, r.why) for r in plan.reasons]))
    output.say()
    sizes = [(name, output.readable_bytes(getattr(plan.memory, name))) for name in type(plan.memory).model_fields]
    sizes.append(("total, roughly", output.readable_bytes(plan.memory.total)))
    sizes.append(("may be used", output.readable_bytes(plan.memory_limit)))
    output.say(output.table(("memory", "bytes"), sizes, right=("bytes",)))
