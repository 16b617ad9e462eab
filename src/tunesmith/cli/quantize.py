"""`tunesmith quantize`: a model in few bits, measured by layer and proved by the engine that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A run's folder, a model's folder, a .gguf file, or a hub name.")
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder for the quantized model.")],
    method: Annotated[str, typer.Option("--method", help="rtn, gptq, awq, fp8, int8-outliers or kmeans.")] = "gptq",
    bits: Annotated[
        int | None, typer.Option("--bits", help="4 or 8; 4 when left out, where the method has it.")
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", help="Weights that share a scale; 128, 64 or 32, as rows allow.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Calibrate on these files instead of the run's training data."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Documents to calibrate on.")] = 64,
    act_order: Annotated[
        bool, typer.Option("--act-order/--no-act-order", help="GPTQ: columns with large inputs first.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a model to 4 or 8 bits, show what that costs by layer, and check that it loads and its outputs agree."""
    from tunesmith.cli import output
    from tunesmith.disk import writing

    output.stage(f"Reading {target}")
    from tunesmith.quantize.methods import ROUNDS_INPUTS
    from tunesmith.quantize.quantize import quantize_model
    from tunesmith.quantize.report import COLUMNS

    with writing(to, "make room there, or give --to another folder"):
        options = {"method": method, "bits": bits, "group": group, "act_order": act_order, "samples": samples}
        made = quantize_model(target, to, **options, data=data or (), progress=output.progress, say=output.warn)
    report, proof = made.report, made.proof
    if as_json:
        shown = {"folder": str(made.folder), **report.as_dict(), "proof": proof.as_dict() if proof else None}
        output.print_json({**shown, "not_proved": made.missing or None, "notes": list(made.notes)})
        return
    output.say(output.table(COLUMNS, report.rows(), right=COLUMNS[1:]))
    output.say(
        f"Perplexity on {report.documents} {report.data} documents: {report.before:.4f} before, "
        f"{report.after:.4f} after ({report.cost:+.2%})."
    )
    output.say(f"Quantized {target} to {made.folder} ({report.title}); quantization.svg shows it by layer.")
    if proof is None:
        output.warn(f"Not proved: {made.missing}")
        return
    measured = "" if method in ROUNDS_INPUTS else "says what was measured, and "
    output.say(
        f"Proved by {proof.engine} on {proof.places} places: it {measured}finds the same token likeliest as the full "
        f"model at {proof.agreement:.1%}."
    )
