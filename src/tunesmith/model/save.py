"""Trained weights as files other programs read: PEFT's adapter layout, or an ordinary model folder.

Both are written beside their place and moved there whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.model.load import locate, quiet
from tunesmith.model.lora import adapter_config, adapter_tensors

LARGEST_FILE = 5 * 10**9
"""Bytes of a model's file; one tensor alone may be larger."""
ADAPTER_FILE, MODEL_FILES = "adapter_model{suffix}.safetensors", "model{suffix}.safetensors"


def write_adapter(model: nn.Module, run: Run, folder: Path) -> Path:
    """The adapters of `model`, for Tunesmith and the peft library alike."""
    with whole_folder(folder) as partial:
        save_file(adapter_tensors(model), partial / ADAPTER_FILE.format(suffix=""), metadata={"format": "pt"})
        describe_adapter(model, run, partial)
    return folder


def describe_adapter(model: nn.Module, run: Run, folder: Path) -> None:
    """What a folder with an adapter has besides its weights."""
    source = locate(run.model)
    base = str(Path(source.location).resolve()) if source.is_local else source.location
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(model, run.lora, base), indent=2) + "\n")


def write_model(model: nn.Module, tokenizer, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Path:
    """The whole model with its tokenizer, in transformers' layout and in the precision the model is held in; its
    weights where the model has shards."""
    with whole_folder(folder) as partial:
        if weights is None:
            _save(model, tokenizer, partial)
        else:
            buffers = {name: buffer for name, buffer in saved_buffers(model).items() if not buffer.is_meta}
            _save(model, tokenizer, partial, state_dict={**weights, **buffers})
            _set_dtype(partial, next(iter(weights.values())).dtype)
    return folder


def describe_model(model: nn.Module, tokenizer, dtype: torch.dtype, folder: Path) -> None:
    """What a folder with a model has besides its weights, which are in this precision."""
    _save(model, tokenizer, folder, state_dict={})
    _set_dtype(folder, dtype)


def _save(model: nn.Module, tokenizer, folder: Path, **options) -> None:
    use_cache = model.config.use_cache
    model.config.use_cache = True
    try:
        with quiet():
            model.save_pretrained(folder, max_shard_size=LARGEST_FILE, **options)
    finally:
        model.config.use_cache = use_cache
    tokenizer.save_pretrained(folder)


def _set_dtype(folder: Path, dtype: torch.dtype) -> None:
    """That of the weights that were written, which transformers takes from the model."""
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that belong to the model's weights, and are no parameters."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def remove_leftovers(folder: Path) -> None:
    """What killed processes have left of `folder`. Only for those who know that no other process writes it now."""
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when everything in it was written and synced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
            os.replace(folder, old / folder.name)
            os.replace(partial, folder)
            shutil.rmtree(old)
        else:
            os.replace(partial, folder)
    except SafetensorError as error:  # how its library says that the disk is full
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
