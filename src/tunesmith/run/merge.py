"""Adapter into base, then proof: the merged model, read back from disk, gives what base and adapter give together.

"More than rounding" is measured. The reference is base plus adapter in fp32. A merged file in the base's precision
rounds each weight once; its logits may differ from the reference by what that precision explains, and by far less
than the adapter itself changes them.

To bf16, merged weights are rounded up or down stochastically, with the exact value as the mean. A base in bf16 lies on
its numbers, and an adapter moves most weights by less than half the way to the next one: rounded to the nearest they
would stay where they are, and with them a good part of what was learned.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.infer.described import beside, facts_of
from tunesmith.kernels.update import halved
from tunesmith.model import adapters, load, lora, side_files
from tunesmith.model.card import card
from tunesmith.model.save import write_model
from tunesmith.parallel.prepare import load_model
from tunesmith.run.folder import read_run, read_summary
from tunesmith.run.open import Opened, open_run, trained_storage

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
"""Largest relative difference of logits that rounding the weights once explains."""
EFFECT_SHARE = 0.5
"""And it must stay below this share of what the adapter changes."""
TRIAL_TOKENS = 64
BITS = {"nf4": 4, "int8": 8}


@dataclass(frozen=True)
class Merged:
    folder: Path
    adapters: int
    precision: str
    difference: float
    """Of the merged model's logits from those of base and adapter, relative to their size."""
    effect: float
    """Of the adapter: how far it moves the logits, measured in the same way."""
    step: int | None
    """Of the checkpoint that was merged, where the run is not finished."""
    bits: int | None
    """Of the base that the adapter was trained over, where it was quantized; it is merged into that of the files."""


def merge_run(folder: Path, to: Path, *, precision: str | None = None) -> Merged:
    """Write base + adapter of the run in `folder` as one model folder, and prove it. Fails without leaving a model.

    The merged weights have the base's precision unless told otherwise.
    """
    run = read_run(folder)
    if not run.has_adapters:
        raise UserError(f"{folder} was trained with method: {run.method}; its model folder needs no merging.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not empty; give a new folder.")
    opened = open_run(folder, precision="fp32", storage="plain")
    dtype = precision or _stored_precision(run)
    tokens = _trial(opened.model, opened.device)
    expected = _logits(opened.model, tokens)
    base = _logits_without_adapters(opened, tokens)
    if opened.tuned is not None:
        names = adapters.merge(opened.tuned)
    else:
        names = [*lora.adapters(opened.model), *lora.token_row_modules(opened.model)]
        if (shared := lora.shared_end(opened.model)) is not None:
            raise UserError(
                f"The adapter on '{shared}' cannot be merged: the model's embedding and output head are one weight, "
                "and it changes one of the two; keep the adapter apart."
            )
        lora.merge(opened.model)
    half = getattr(torch, load.DTYPES[dtype])
    for name in names:
        weight = opened.model.get_submodule(name).weight
        weight.data = halved(weight.detach(), half)
    opened.model.to(half)
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        side = folder / side_files.FOLDER
        if not side.is_dir():  # a run of an earlier version
            side_files.make(run, side := partial / "side", **beside(run, opened.encoder, reasons=False))
        write_model(
            opened.model,
            partial / "model",
            functools.partial(side_files.put_beside, side, dtype=half, card=_card(run, folder, opened)),
        )
        written = run.model_copy(update={"model": str(partial / "model")})
        found = _logits(load_model(written, dtype="fp32", device=opened.device.type), tokens)
        difference, effect = _distance(found, expected), _distance(base, expected)
        if not difference <= TOLERANCE[dtype] or (effect > TOLERANCE[dtype] and difference > EFFECT_SHARE * effect):
            raise UserError(
                f"The merged model does not do what base and adapter do: its logits differ by {difference:.2g}, more "
                f"than rounding to {dtype} explains ({TOLERANCE[dtype]:g}; the adapter's own effect is {effect:.2g}). "
                "Nothing was written; merge with --precision fp32, or keep the adapter apart."
            )
        if to.exists():
            to.rmdir()
        (partial / "model").rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Merged(to, len(names), dtype, difference, effect, opened.step, BITS.get(trained_storage(folder)))


def _card(run: Run, folder: Path, opened: Opened) -> str:
    summary = read_summary(folder) or {}
    facts = facts_of(run, opened.encoder, reasons=opened.reasons)
    before, after = summary.get("held_out_before"), summary.get("held_out_after")
    steps = summary.get("steps", opened.step)
    return card(run, replace(facts, steps=steps, before=before, after=after, is_merged=True))


def _stored_precision(run) -> str:
    """What the base's files are in; fp32 where they do not say."""
    dtype = getattr(load.load_config(run), "dtype", None)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def _trial(model: nn.Module, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = load.vocabulary_size(model.config)
    length = min(TRIAL_TOKENS, load.max_positions(model.config) or TRIAL_TOKENS)
    return torch.randint(vocabulary, (2, length), generator=generator).to(device)


@torch.no_grad()
def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()


def _logits_without_adapters(opened: Opened, tokens: torch.Tensor) -> torch.Tensor:
    with adapters.without(opened.tuned) if opened.tuned is not None else lora.without_adapters(opened.model):
        return _logits(opened.model, tokens)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the spread of the logits of each position, since only their differences matter."""
    found, expected = found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return ((found - expected).norm() / expected.norm()).item()
