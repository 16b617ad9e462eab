"""The adapter alone, in the files of the peft library, which vLLM loads beside a base; and what engines make of it.

vLLM reads some kinds of adapters without a word about the parts it leaves out. What it would ignore or reject is said
before anything is written.
"""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.errors import UserError
from tunesmith.export.source import Progress, Source
from tunesmith.infer.vllm_server import found_version
from tunesmith.model import lora, vllm
from tunesmith.model.save import ADAPTER_CONFIG, ADAPTER_FILE
from tunesmith.run.merge import put_side_files

TYPES = ("fp32", "bf16", "fp16")


def check(source: Source, kind: str) -> None:
    if source.weights.adapter is None:
        raise UserError(f"The result of {source.folder} is a model and no adapter; use --to safetensors.")


def size(source: Source, kind: str) -> int:
    assert source.weights.adapter is not None
    each = 4 if kind == "fp32" else 2
    return each * sum(tensor.numel() for tensor in source.weights.adapter.tensors.values())


def write(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    import torch
    from safetensors.torch import save_file

    from tunesmith.model.load import DTYPES

    files = source.weights.adapter
    assert files is not None
    dtype = getattr(torch, DTYPES[kind])
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in files.tensors.items()}
    save_file(tensors, folder / ADAPTER_FILE.format(suffix=""), metadata={"format": "pt"})
    put_side_files(source.folder, folder, dtype=None, card=None)
    own = source.folder / "adapter" / ADAPTER_CONFIG
    if own.is_file():
        (folder / ADAPTER_CONFIG).write_text(own.read_text(encoding="utf-8"), encoding="utf-8")
        return
    model = source.weights.model  # of a checkpoint: what training would write at its end
    lora.put_on(model, source.weights.adapted, source.run.lora, seed=source.run.seed)
    described = lora.adapter_config(model, source.run.lora, str(source.run.model))
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def notes(source: Source) -> list[str]:
    files = source.weights.adapter
    return vllm.vllm_notes(files.config, list(files.tensors)) if files is not None else []


def refused(source: Source) -> list[str]:
    """Why the vLLM that is installed cannot prove it."""
    files = source.weights.adapter
    return vllm.refused(files.config, list(files.tensors), found_version()) if files is not None else []
