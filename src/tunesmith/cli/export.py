"""`tunesmith export`: a run in the form another engine loads, proved by that engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="safetensors, adapter, gguf, gguf-adapter, onnx, compressed-tensors or bitsandbytes.",
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help="Type of the weights: f16, bf16, f32, q8_0, q4_0 or a K-quant for gguf; int8, int4, fp8 or nvfp4 for "
            "compressed-tensors; fp32, bf16 or fp16 for safetensors and adapter.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="New folder; RUN/export/FORMAT-TYPE when left out.")] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Compare on these files instead of the run's held-out data.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm: check safetensors, adapter or compressed-tensors in vLLM, which takes a minute to start."
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="OWNER/NAME", help="Also upload it to this repository on the hub.")
    ] = None,
) -> None:
    """Export a run to another format, load it back with the engine that runs it, and check that its outputs agree."""
    from tunesmith.cli import output
    from tunesmith.disk import writing

    output.stage(f"Reading {folder}")
    from tunesmith.export.export import export_run
    from tunesmith.run.there import why_checkpoint

    with writing(out or folder / "export", "make room there, or give --out another folder"):
        options = {"kind": kind, "out": out, "push": push, "data": data or (), "engine": engine}
        made = export_run(folder, to, **options, progress=output.progress, say=output.warn)
    if made.step is not None:
        output.note(why_checkpoint(folder, made.step))
    output.say(f"Exported {folder} to {made.folder} ({to}, {made.kind}).")
    proof = made.proof
    if proof is None:
        output.warn(f"Not proved: {made.missing}")
        return
    share = f", {proof.adapter_share:.1%} of the adapter is in it" if proof.adapter_share is not None else ""
    output.say(
        f"Proved by {proof.engine} on {proof.places} places of {proof.data} data: the same likeliest token at "
        f"{proof.agreement:.2%}, log-probabilities within {proof.largest:.2g}, perplexity {proof.perplexity:.4f} "
        f"({proof.reference_perplexity:.4f} by {proof.reference}){share}."
    )
    if push is not None:
        output.say(f"It is on the hub as {push}.")
