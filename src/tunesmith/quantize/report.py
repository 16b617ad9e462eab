"""What quantizing has cost, by layer and in all: as a table for the card, and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tunesmith.quantize.methods import Options
from tunesmith.quantize.rows import Rows
from tunesmith.quantize.walk import LayerError, Measured


@dataclass(frozen=True)
class Report:
    method: str
    bits: int
    group: int
    title: str
    before: float
    """Perplexity on the documents that are measured, of the model as it was; and quantized."""
    after: float
    target_tokens: float
    documents: int
    data: str
    """The kind of data that these are: held-out, where there is such."""
    calibration_tokens: int
    sample: float
    """Perplexity of the model as it was on the few documents of which each layer's is told."""
    layers: Sequence[LayerError]
    outliers: int | None = None

    @classmethod
    def of(
        cls,
        asked: Options,
        found: Measured,
        *,
        calibration_tokens: int,
        held_out: Rows,
        data: str,
        outliers: int,
    ) -> Report:
        return cls(
            asked.method, asked.bits, asked.group, asked.title, found.full, found.quantized,
            float(held_out.weights_bt.sum()), len(held_out), data, calibration_tokens, found.sample, found.layers,
            outliers if asked.method == "int8-outliers" and calibration_tokens else None,
        )  # fmt: skip

    @property
    def cost(self) -> float:
        """Of quantizing: by how much perplexity has grown, relative to what it was."""
        return self.after / self.before - 1

    @property
    def bars(self) -> list[tuple[str, float, float]]:
        """Of each layer: its number, the error of what it adds, and by how much it alone makes perplexity grow."""
        return [(_number(one.name), one.output_error, one.perplexity / self.sample - 1) for one in self.layers]

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (one.name, f"{one.weight_error:.2%}", f"{one.output_error:.2%}", f"{one.perplexity / self.sample - 1:+.3%}")
            for one in self.layers
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


COLUMNS = ("layer", "weight error", "output error", "perplexity, this layer alone")


def card_lines(report: Report) -> list[str]:
    calibrated = f", calibrated on {report.calibration_tokens:,} tokens" if report.calibration_tokens else ""
    lines = [
        f"## Quantized: {report.title}{calibrated}",
        "",
        f"Perplexity on {report.documents} {report.data} documents ({report.target_tokens:,.0f} target tokens): "
        f"{report.before:.4f} before, {report.after:.4f} after ({report.cost:+.2%}).",
        "",
        "![error by layer](quantization.svg)",
        "",
    ]
    if report.outliers is not None:
        lines += [f"Inputs of linears beyond LLM.int8()'s threshold in calibration: {report.outliers:,}.", ""]
    if report.method == "kmeans":
        lines += [
            "Weights are stored in 16 bits, each row with the values of its codebook alone: engines have no format for "
            "codebooks of rows. `codebooks.safetensors` has these and each weight's number in them (of 4 bits two a "
            "byte, the even column in the low half).",
            "",
        ]
    rows = [f"| {' | '.join(row)} |" for row in report.rows()]
    return [*lines, f"| {' | '.join(COLUMNS)} |", "| --- | --- | --- | --- |", *rows, ""]


def _number(name: str) -> str:
    return next((part for part in reversed(name.split(".")) if part.isdigit()), name)
