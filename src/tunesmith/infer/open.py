"""A run's trained model, from its folder: what comes after training reads files, never the trainer's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tunesmith.checkpoint.run_folder import read_identity, read_plan, read_run
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.update import put_down_
from tunesmith.model import load, lora
from tunesmith.optim.build import weight_of
from tunesmith.plan.plan import Device, Plan, Precision, Storage


@dataclass(frozen=True)
class Opened:
    model: nn.Module
    tokenizer: object
    device: torch.device
    step: int | None
    """The checkpoint it was taken from; None for the finished result."""


def open_model(folder: Path) -> Opened:
    """What can be talked to in a folder: a run's model, or one that lies there by itself, such as a merged one."""
    if read_identity(folder) is not None or not (folder / "config.json").exists():
        return open_run(folder)
    alone = Run(model=str(folder), data=str(folder))
    place: Device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Precision = "bf16" if place == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    model = load.load_model(alone, dtype=dtype, device=place)
    return Opened(model.eval(), load.load_tokenizer(alone), torch.device(place), None)


def open_run(
    folder: Path,
    *,
    precision: Precision | None = None,
    device: Device | None = None,
    storage: Storage | None = None,
) -> Opened:
    """The trained model of a run, or of its newest checkpoint while it is not finished; adapters are attached.

    The base is held as in training, in 4 or 8 bits where it was so there, unless `storage` says otherwise.
    """
    run = read_run(folder)
    held = storage or trained_storage(folder)
    place, dtype = placement(read_plan(folder), precision=precision, device=device)
    step = None
    if (folder / "model" / "config.json").exists():
        trained = run.model_copy(update={"model": str(folder / "model")})
        model = load.load_model(trained, dtype=dtype, device=place)
    else:
        model = load.load_model(run, dtype=dtype, device=place, storage=held)
        if (folder / "adapter" / "adapter_config.json").exists():
            lora.attach_saved(model, folder / "adapter")
        else:
            step = _from_checkpoint(model, run, folder)
    return Opened(model.eval(), tokenizer_of(run), torch.device(place), step)


def placement(
    plan: Plan | None, *, precision: Precision | None = None, device: Device | None = None
) -> tuple[Device, Precision]:
    """Where and in which precision a run's model is opened: as it was trained, or in fp32 where its GPU is not here."""
    wanted = device or (plan.device if plan else "cpu")
    place: Device = "cuda" if wanted == "cuda" and torch.cuda.is_available() else "cpu"
    return place, precision or (plan.precision if plan and place == plan.device else "fp32")


def trained_storage(folder: Path) -> Storage:
    """How the base was held while the run in `folder` was trained."""
    plan = read_plan(folder)
    run = read_run(folder)
    asked = "int8" if run.lora.bits == 8 else "nf4"
    return plan.storage if plan else asked if run.method == "qlora" else "plain"


def tokenizer_of(run: Run):
    """The model's tokenizer, with the chat template the run was trained with."""
    tokenizer = load.load_tokenizer(run)
    if run.chat_template is not None:
        try:
            tokenizer.chat_template = Path(run.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"chat_template: {run.chat_template} cannot be read: {error.strerror}.") from error
    return tokenizer


@torch.no_grad()
def _from_checkpoint(model: nn.Module, run: Run, folder: Path) -> int:
    identity = read_identity(folder)
    assert identity is not None
    store = CheckpointStore(folder / "checkpoints", identity.lineage)
    found = store.latest() if (folder / "checkpoints").is_dir() else None
    if found is None:
        raise UserError(f"{folder} holds no trained weights yet; run `tunesmith train` first.")
    tensors, _ = store.load(found)
    if run.has_adapters:
        lora.attach(model, run.lora, seed=run.seed)
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        if name.startswith("lifted/"):
            put_down_(value)
        if not name.startswith("optimizer/"):
            parameters[weight_of(name)].copy_(value)
    return found.step
