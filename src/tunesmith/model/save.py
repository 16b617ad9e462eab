"""Trained weights as files other programs read: PEFT's adapter layout, or an ordinary model folder.

Both are written beside their place and moved there whole.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.disk import sync_folder
from tunesmith.errors import UserError
from tunesmith.model.load import locate, quiet
from tunesmith.model.lora import Start, adapter_config, adapter_tensors

LARGEST_FILE = 5 * 10**9
"""Bytes of a model's file; one tensor alone may be larger."""
ADAPTER_FILE, MODEL_FILES = "adapter_model{suffix}.safetensors", "model{suffix}.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def write_adapter(model: nn.Module, run: Run, folder: Path, describe: Callable[[Path], None] | None = None) -> Path:
    """The adapters of `model`, for Tunesmith and the peft library alike; `describe` adds what lies beside them: their
    config alone when it is left out."""
    with whole_folder(folder) as partial:
        save_file(
            adapter_tensors(model, Start.of(run)), partial / ADAPTER_FILE.format(suffix=""), metadata={"format": "pt"}
        )
        if describe is not None:
            describe(partial)
        else:
            (partial / ADAPTER_CONFIG).write_text(adapter_config_text(model, run))
    return folder


def adapter_config_text(model: nn.Module, run: Run) -> str:
    """What PEFT needs to know of the adapters of `model`, for `ADAPTER_CONFIG`."""
    source = locate(run.model)
    base = str(Path(source.location).resolve()) if source.is_local else source.location
    return json.dumps(adapter_config(model, run.lora, base), indent=2) + "\n"


def write_model(
    model: nn.Module,
    folder: Path,
    describe: Callable[[Path], None],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """The whole model in transformers' layout and in the precision it is held in, or these weights where it has shards;
    `describe` adds what lies beside them."""
    from transformers import GenerationConfig

    options = {}
    if weights is not None:
        buffers = {name: buffer for name, buffer in saved_buffers(model).items() if not buffer.is_meta}
        options["state_dict"] = {**weights, **buffers}
    own, model.generation_config = model.generation_config, GenerationConfig()  # such as can be saved: it is replaced
    try:
        with whole_folder(folder) as partial:
            with quiet():
                model.save_pretrained(partial, max_shard_size=LARGEST_FILE, **options)
            describe(partial)
    finally:
        model.generation_config = own
    return folder


def check_ties(model: nn.Module) -> None:
    """UserError where weights are one that the model's code does not name as such: no file says that they are."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[nn.Parameter, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name not in tied and (first := names.setdefault(weight, name)) != name:
            raise UserError(
                f"model: {first} and {name} of {type(model).__name__} are one weight, which its code does not say in "
                "_tied_weights_keys, so that transformers would not save it; name them there, or train an adapter "
                "(method: lora)."
            )


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that belong to the model's weights, and are no parameters."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def remove_leftovers(folder: Path) -> None:
    """What killed processes have left of `folder`. Only for those who know that no other process writes it now."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path, *, is_new: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when everything in it was written and synced. `is_new`: an
    OSError where somebody has put anything there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        if is_new and folder.exists():
            folder.rmdir()
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
            os.replace(folder, old / folder.name)
            os.replace(partial, folder)
            shutil.rmtree(old)
        else:
            os.replace(partial, folder)
        sync_folder(folder.parent)
    except SafetensorError as error:  # how its library says that the disk is full
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
