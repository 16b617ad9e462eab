"""`tunesmith bench`: the speed and memory of standard workloads here, against the other systems that are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...", help="lora-8b, lora-8b-packed, lora-8b-long, qlora-8b, qlora-70b, full-7b, tiny."
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure the other systems that are installed, too.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and variants.")] = False,
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the result is written.")] = Path("bench.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure standard workloads, each system in a process of its own."""
    import json

    from tunesmith.cli import output

    output.stage("Loading torch and transformers")
    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.disk import check_writable, writing
    from tunesmith.errors import UserError
    from tunesmith.measure import bench, compare
    from tunesmith.measure.results import document
    from tunesmith.plan.hardware import probe

    names = workloads or compare.default_workloads()
    unknown = [name for name in names if name not in bench.WORKLOADS]
    if unknown:
        raise UserError(f"There is no workload '{unknown[0]}'; there are {', '.join(bench.WORKLOADS)}.")
    if not to.absolute().parent.is_dir():
        raise UserError(f"The result cannot be written to {to}: there is no folder {to.absolute().parent}.")
    check_writable(to, "give --to another file")
    orders = [order for name in names for order in compare.orders(name, with_peers=peers, is_quick=quick)]
    rows: list[dict[str, Any]] = []
    machine = probe()
    for order in orders:
        output.note(f"{order.workload}: {order.system}, {order.variant}")
        output.stage("Measuring")
        rows.append(compare.carry_out(order, machine))
        if "failed" in rows[-1]:
            output.warn(f"{order.workload}: {order.system}, {order.variant}: {rows[-1]['failed']}")
    rows = compare.compare(rows)
    result = document("Training steps on standard workloads: Tunesmith against its peers", {"rows": rows})
    if as_json:
        output.print_json(result)
    else:
        columns = ("workload", "system", "variant", "tokens/s", "peak memory", "to the best peer", "")
        output.say(result["device"])
        output.say(output.table(columns, map(_cells, rows), right=columns[3:6]))
    with writing(to, "what was measured is above"):
        write_atomic(to, (json.dumps(result, indent=2) + "\n").encode())
    output.note(f"Written to {to}.")
    if any(row.get("spread", 0.0) > 0.3 for row in rows):
        output.warn("Steps took very different times, so something else keeps this machine busy; measure again.")
    if not any("failed" not in row for row in rows if row["system"] == "tunesmith"):
        raise UserError(f"Nothing could be measured; the first reason: {rows[0]['failed']}")


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    from tunesmith.cli.output import readable_bytes

    named = (row["workload"], row["system"], row["variant"])
    if "failed" in row:
        return (*named, None, None, None, row["failed"])
    ratio = f"{row['to_best_peer']:.2f} x" if "to_best_peer" in row else None
    return (*named, f"{row['tokens_per_second']:,.0f}", readable_bytes(row["peak_bytes"]), ratio, "")
