"""`tunesmith network`: how fast ranks exchange tensors, within this machine and between machines."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Ranks to start on this machine: all its GPUs, or 2 on a CPU, when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure all-reduce, all-gather, reduce-scatter and all-to-all by size, and keep the speed for the planner.

    Started by torchrun on several machines, it measures within and between them.
    """
    import dataclasses
    import sys

    from tunesmith.cli import output

    output.stage("Looking at this machine")
    from tunesmith.errors import UserError
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.plan.hardware import probe

    environment = read_rank_environment()
    if not environment.is_started:
        from tunesmith.launch.local import run_ranks

        count = ranks or len(probe().gpus) or 2
        if count < 2:
            raise UserError("There is one GPU here, and a network is between two: start this by torchrun on several.")
        output.clear_bottom()
        failure = run_ranks([sys.executable, "-m", "tunesmith", "network", *["--json"][: int(as_json)]], count)
        if failure is not None:
            raise UserError(failure.message or failure.words(count))
        return
    output.stage("Measuring")
    import torch

    from tunesmith.measure.network import keep, measure
    from tunesmith.parallel.ranks import connected

    with connected(environment) as together:
        has_gpu = torch.cuda.is_available()
        device = torch.device("cuda", environment.local_rank) if has_gpu else torch.device("cpu")
        found = measure(together, device)
        if environment.rank != 0:
            return
        kept = keep(found, together, torch.cuda.get_device_name() if has_gpu else None)
    if as_json:
        output.print_json({"measured": [dataclasses.asdict(one) for one in found], "kept": kept})
        return
    rows = [
        (
            one.reach,
            one.ranks,
            one.collective,
            output.readable_bytes(one.bytes),
            f"{1e3 * one.seconds:.3f}",
            f"{one.algorithm / 1e9:.2f}",
            f"{one.bus / 1e9:.2f}",
        )
        for one in found
    ]
    columns = ("between", "ranks", "collective", "size", "ms", "GB/s", "bus GB/s")
    output.say(output.table(columns, rows, right=columns[3:]))
    for name, speed in kept.items():
        output.say(f"Kept for the planner: {name}, {speed / 1e9:.2f} GB/s")
