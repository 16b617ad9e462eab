"""Merged safetensors: an ordinary model folder, which transformers, vLLM, SGLang and TGI load."""

from __future__ import annotations

from pathlib import Path

from tunesmith.export.source import Progress, Source
from tunesmith.run.merge import write_merged

TYPES = ("fp32", "bf16", "fp16")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def check(source: Source, kind: str) -> None:
    """Every model that trains can be written so."""


def size(source: Source, kind: str) -> int:
    return source.weights.count * BYTES[kind]


def write(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    write_merged(source.weights, folder / "model", precision=kind, progress=progress)
    for file in (folder / "model").iterdir():
        file.rename(folder / file.name)
    (folder / "model").rmdir()
