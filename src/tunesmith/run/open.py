"""A run's trained model, from its folder: what comes after training reads files, never the trainer's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.config.schema import Run
from tunesmith.data.chat import Encoder
from tunesmith.data.chat_template import read_template
from tunesmith.data.paired import PairEncoder
from tunesmith.disk import expanded
from tunesmith.errors import UserError
from tunesmith.kernels.update import undo_preround_
from tunesmith.model import adapters, load, lora, quantized, side_files
from tunesmith.model.content import Content
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.grown import new_ids
from tunesmith.model.head import form, has_head
from tunesmith.optim.build import weight_of
from tunesmith.parallel.prepare import load_model
from tunesmith.plan.models import check_kind, is_encoder_decoder, read_config
from tunesmith.plan.plan import Device, Plan, Precision, Storage
from tunesmith.run.base import check_base
from tunesmith.run.folder import (
    check_merged,
    has_result,
    read_identity,
    read_plan,
    read_run,
    refuse_sweep,
)
from tunesmith.run.there import check_base_there, no_result, run_to_open


@dataclass(frozen=True)
class Opened:
    model: nn.Module
    encoder: Encoder
    """What asks it as in training."""
    device: torch.device
    step: int | None
    """The checkpoint it was taken from; None for the finished result."""
    reasons: bool = False
    """The answers it was trained on begin with reasoning."""
    tuned: adapters.Tuned | None = None
    """With `method: peft`: the model and peft's own view of it."""

    @property
    def tokenizer(self):
        return self.encoder.tokenizer


def open_model(folder: Path) -> Opened:
    """What can be talked to in a folder: a run's model, or one that lies there by itself, such as a merged one."""
    if read_identity(folder) is not None or not (folder / "config.json").exists():
        refuse_head(folder, "talk")
        return open_run(folder)
    return open_plain(str(folder))


def open_plain(name: str) -> Opened:
    """A model by itself: a folder, a GGUF file or a name on the hub."""
    check_kind(name, read_config(name), "opened")
    alone = Run(model=name, data=name)
    place, dtype = own_placement()
    model = load_model(alone, dtype=dtype, device=place)
    source = load.locate(name)
    asked = side_files.read_asked(Path(source.location)) if source.is_local else {}
    encoder = make_encoder(
        alone,
        load.load_tokenizer(alone),
        train_on=asked.get("train_on", alone.train_on),
        special_tokens=asked.get("special_tokens", ()),
    )
    return Opened(model.eval(), encoder, torch.device(place), None, bool(asked.get("reasons")))


def own_placement() -> tuple[Device, Precision]:
    """Where and in which precision a model is opened that no plan knows."""
    place: Device = "cuda" if torch.cuda.is_available() else "cpu"
    return place, "bf16" if place == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def open_base(folder: Path) -> Opened:
    """The model that the run in `folder` was trained from, held and asked as the run's own."""
    run, content = read_run(folder), Content()
    check_base_there(folder, run)
    place, dtype = placement(read_plan(folder))
    model = load_model(run, dtype=dtype, device=place, storage=trained_storage(folder), content=content)
    check_base(folder, run, content)
    encoder = encoder_of(folder)
    reasons = bool(side_files.read_asked(folder / side_files.FOLDER).get("reasons"))
    return Opened(model.eval(), encoder, torch.device(place), None, reasons)


def refuse_head(folder: Path, what: str) -> None:
    """UserError where the model of the run in `folder` scores or embeds texts, and cannot do what else models do."""
    run = read_run(folder)
    if run.objective == "embed":
        raise UserError(
            f"{folder} was trained with objective: embed and embeds texts; it cannot {what}. Load it with "
            f"sentence-transformers, from {folder}/{'adapter' if run.has_adapters else 'model'}."
        )
    if not has_head(run):
        return
    where = "adapter, over its base by peft" if run.has_adapters else "model"
    verb = "labels words" if run.objective == "classify_tokens" else "scores texts"
    raise UserError(
        f"{folder} was trained with objective: {run.objective} and {verb}; it cannot {what}. Load it with "
        f"transformers' AutoModelFor{form(run)}, from {folder}/{where}."
    )


def open_run(
    folder: Path,
    *,
    precision: Precision | None = None,
    device: Device | None = None,
    storage: Storage | None = None,
) -> Opened:
    """The trained model of a run, or of its newest checkpoint while that is not there; adapters are attached.

    The base is held as in training, in 4 or 8 bits where it was so there, unless `storage` says otherwise.
    """
    check_merged(folder)
    run = run_to_open(folder)
    if has_head(run):
        run = run.model_copy(update={"output": str(folder)})
    held = storage or trained_storage(folder)
    place, dtype = placement(read_plan(folder), precision=precision, device=device)
    step, tuned = None, None
    if has_result(folder, "model"):
        model = load_model(run, dtype=dtype, device=place)
    else:
        content = Content()
        model = load_model(run, dtype=dtype, device=place, storage=held, content=content)
        check_base(folder, run, content)
        if run.has_lora and run.lora.init == "loftq" and held == "plain":  # it makes good what the rounded base lacks
            quantized.round_weights(model, trained_storage(folder))
        if run.method == "peft":
            tuned, step = _open_with_peft(model, run, folder)
            model = tuned.model
        elif has_result(folder, "adapter"):
            lora.attach_saved(model, folder / "adapter")
        else:
            step = _from_checkpoint(model, run, folder)
    if run.quantization_aware is not None:
        FakeQuantization.of(model, run.quantization_aware).put_on(model)
    encoder = encoder_of(folder)
    reasons = bool(side_files.read_asked(folder / side_files.FOLDER).get("reasons"))
    return Opened(model.eval(), encoder, torch.device(place), step, reasons, tuned)


def _open_with_peft(model: nn.Module, run: Run, folder: Path) -> tuple[adapters.Tuned, int | None]:
    if has_result(folder, "adapter"):
        return adapters.open_saved(model, folder / "adapter"), None
    start = folder / lora.START if run.adapter is not None else None
    tuned = adapters.put_on(model, run, start=start)
    return tuned, _from_checkpoint(tuned.model, run, folder)


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


def tokenizer_of(folder: Path):
    """The tokenizer of the run in `folder` with its chat template, as both were when training started."""
    run, kept = read_run(folder), folder / side_files.FOLDER
    if kept.is_dir():
        return load.load_tokenizer(run.model_copy(update={"model": str(kept)}))
    tokenizer = load.load_tokenizer(run)
    if run.chat_template is not None:
        tokenizer.chat_template = read_template(run.chat_template)
    return tokenizer


def encoder_of(folder: Path) -> Encoder:
    """What asks the model of the run in `folder` as in training."""
    run = run_to_open(folder)
    return make_encoder(run, tokenizer_of(folder), train_on=run.train_on, special_tokens=run.special_tokens)


def make_encoder(run: Run, tokenizer: Any, *, train_on: str, special_tokens: Sequence[str]) -> Encoder:
    """What asks the run's model with this tokenizer, by the chat template that this has."""
    if is_encoder_decoder(read_config(run.model)):
        start = load.decoder_start(load.load_config(run))
        return PairEncoder(tokenizer, start=start, template=None, train_on=train_on, special_tokens=special_tokens)
    return Encoder(tokenizer, template=None, train_on=train_on, special_tokens=special_tokens)


def refuse_encoder_decoder(target: Path | str, what: str) -> None:
    """UserError where a run's model, or one by itself, reads with an encoder, which `what` has no way to call."""
    folder = expanded(target)
    is_run = folder.is_dir() and read_identity(folder) is not None
    if folder.is_dir() and not is_run:
        refuse_sweep(folder)
    if is_encoder_decoder(read_config(run_to_open(folder).model if is_run else str(target))):
        raise UserError(
            f"{target} is an encoder-decoder, which cannot {what}; `tunesmith chat` asks it, and transformers' "
            "AutoModelForSeq2SeqLM loads it."
        )


def trained_adapter(folder: Path) -> tuple[lora.AdapterFiles, int | None]:
    """The adapter of the run in `folder`, or of its newest checkpoint while that is not there, and then its step."""
    if has_result(folder, "adapter"):
        return lora.read_adapter(folder / "adapter"), None
    tensors, step = _newest_tensors(folder)
    settings = read_run(folder).lora
    config = {
        "peft_type": "LORA",
        "lora_alpha": settings.alpha if settings.alpha is not None else 2.0 * settings.rank,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilised,
        "use_dora": settings.dora,
        "r": settings.rank,
    }
    return lora.AdapterFiles(config, {lora.peft_name(name): tensor for name, tensor in tensors.items()}), step


@torch.no_grad()
def _from_checkpoint(model: nn.Module, run: Run, folder: Path) -> int:
    tensors, step = _newest_tensors(folder)
    if run.has_lora:  # on the linears that were trained, which may be fewer than those asked for
        names = [name.rpartition(".")[0] for name in tensors if name.endswith((".lora_a", ".lora_embedding_a"))]
        model.requires_grad_(False)
        lora.put_on(model, dict.fromkeys(names), run.lora, seed=run.seed, start=lora.Start.of(run, folder))
        if run.new_tokens:
            lora.put_token_rows(model, new_ids(run))
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        parameters[name].copy_(value)
    return step


def _newest_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The trained weights of the newest checkpoint, by their names in the model, and its step."""
    identity = read_identity(folder)
    assert identity is not None
    store = CheckpointStore(folder / "checkpoints", identity.lineage)
    checkpoint = store.latest() if (folder / "checkpoints").is_dir() else None
    if checkpoint is None:
        raise no_result(folder)
    tensors, _ = store.load(checkpoint)
    weights = {}
    for name, value in tensors.items():
        if name.startswith("lifted/"):  # as version 0.1 held them
            undo_preround_(value)
        if not name.startswith(("optimizer/", "schedule/")):
            weights[weight_of(name)] = value
    return weights, checkpoint.step
