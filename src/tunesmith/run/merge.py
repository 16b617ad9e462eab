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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tunesmith.checkpoint.codec import ShardSlice
from tunesmith.checkpoint.result import stored_parts, stored_shapes, write_on_all_ranks
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.infer.described import beside, facts_of
from tunesmith.kernels.update import halved
from tunesmith.model import adapters, load, lora, side_files
from tunesmith.model.card import card
from tunesmith.model.save import MODEL_FILES, remove_leftovers, saved_buffers, write_model
from tunesmith.model.structure import plain_call, put_tensor
from tunesmith.parallel.prepare import load_model
from tunesmith.parallel.ranks import Ranks
from tunesmith.run.folder import read_run, read_summary
from tunesmith.run.open import Opened, encoder_of, open_run, refuse_head, trained_storage
from tunesmith.run.streamed import (
    NotStreamed,
    Progress,
    StreamedModel,
    Weights,
    find_weights,
    merged_weights,
    stored_precision,
    written_weights,
)
from tunesmith.run.there import check_base_there

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
"""Largest relative difference of logits that rounding the weights once explains in most models. Where it is more, what
it explains is measured: the merged weights are rounded once more, by another draw. No formula says it: to bf16, random
Llamas with 32 layers differ by 0.011 when they are 512 wide and by 0.045 when they are 4,096 wide."""
DRAWS = 1.5
"""How much more than another draw's the difference may be, where it is measured: draws differ by a quarter."""
LARGEST = 4
"""And how many times the usual one it may be at most, whatever is measured."""
EFFECT_SHARE = 0.5
"""And it must stay below this share of what the adapter changes."""
TRIAL_TOKENS = 64
OTHER_DRAW = 1 << 30
"""From where places are counted for another draw than the file's."""
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
    """Of the checkpoint that was merged, where there is no result."""
    bits: int | None
    """Of the base that the adapter was trained over, where it was quantized; it is merged into that of the files."""


def merge_run(folder: Path, to: Path, *, precision: str | None = None, progress: Progress | None = None) -> Merged:
    """Write base + adapter of the run in `folder` as one model folder, and prove it. Fails without leaving a model.

    The merged weights have the base's precision unless told otherwise. No more than a few tensors, or one layer when it
    is proved, are in host memory at a time, unless only transformers can translate its files, or the
    adapter is more than low-rank factors on linears.
    """
    run = read_run(folder)
    if run.objective != "embed":
        refuse_head(folder, "be merged here")
    if not run.has_adapters:
        raise UserError(f"{folder} is a run whose result is a model, in its folder `model`, which needs no merging.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not empty; give a new folder.")
    check_base_there(folder, run)
    writer = _writer(folder)
    dtype = precision or writer.stored
    to.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(to)
    partial = Path(tempfile.mkdtemp(prefix=f".{to.name}.partial-", dir=to.parent))
    try:
        writer.write(partial / "model", precision=dtype, card=_card(run, folder, writer.step), progress=progress)
        difference, effect = writer.prove(partial / "model")
        most = TOLERANCE[dtype]
        if difference > most:
            most = max(most, min(LARGEST * most, DRAWS * writer.rounding(getattr(torch, load.DTYPES[dtype]))))
        if not difference <= most or (effect > most and difference > EFFECT_SHARE * effect):
            raise UserError(
                f"The merged model does not do what base and adapter do: its logits differ by {difference:.2g}, more "
                f"than rounding to {dtype} explains ({most:.2g}; the adapter's own effect is {effect:.2g}). "
                "Nothing was written; merge with --precision fp32, or keep the adapter apart."
            )
        if to.exists():
            to.rmdir()
        (partial / "model").rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    bits = BITS.get(trained_storage(folder))
    return Merged(to, writer.count, dtype, difference, effect, writer.step, bits)


def _writer(folder: Path) -> _Streamed | _Whole:
    try:
        return _Streamed(find_weights(folder))
    except NotStreamed:
        return _Whole(folder)


class _Streamed:
    """Low-rank factors on linears, merged unit by unit."""

    def __init__(self, weights: Weights):
        self.weights, self.stored, self.step, self.count = weights, weights.stored, weights.step, len(weights.adapted)

    def write(self, to: Path, *, precision: str, card: str, progress: Progress | None) -> None:
        write_merged(self.weights, to, precision=precision, card=card, progress=progress)

    def prove(self, merged: Path) -> tuple[float, float]:
        return _proved(self.weights, merged)

    def rounding(self, dtype: torch.dtype) -> float:
        """What rounding merged weights to `dtype` does to logits, by another draw than the file's."""
        reference, other = StreamedModel(self.weights), StreamedModel(self.weights, merged_to=dtype)
        tokens = _trial(reference.model)
        return _distance(other.logits(tokens), reference.logits(tokens))


class _Whole:
    """Every other adapter, merged in a model that is in memory."""

    def __init__(self, folder: Path):
        self.folder, self.run = folder, read_run(folder)
        self.opened = open_run(folder, precision="fp32", storage="plain")
        self.stored, self.step, self.count = stored_precision(self.run), self.opened.step, 0
        self.tokens = _trial(self.opened.model).to(self.opened.device)
        self.expected, self.base = _logits(self.opened.model, self.tokens), _logits_of_base(self.opened, self.tokens)

    def write(self, to: Path, *, precision: str, card: str, progress: Progress | None) -> None:
        model, half = self.opened.model, getattr(torch, load.DTYPES[precision])
        self.count = _merge_whole(self.opened, half)
        model.to(half)
        write_model(model, to, functools.partial(put_side_files, self.folder, dtype=half, card=card))

    def prove(self, merged: Path) -> tuple[float, float]:
        written = self.run.model_copy(update={"model": str(merged)})
        logits = _logits(load_model(written, dtype="fp32", device=self.opened.device.type), self.tokens)
        return _distance(logits, self.expected), _distance(self.base, self.expected)

    def rounding(self, dtype: torch.dtype) -> float:
        """How far the logits of the model that was written are from those of base and adapter, and how far the adapter
        moves them; the model is loaded once more."""
        again = open_run(self.folder, precision="fp32", storage="plain")
        _merge_whole(again, dtype, start=OTHER_DRAW)
        return _distance(_logits(again.model.float(), self.tokens), self.expected)


def _merge_whole(opened: Opened, dtype: torch.dtype, *, start: int = 0) -> int:
    """Adapters into the weights of a model in memory, rounded to `dtype` by the draw from `start`; how many."""
    model = opened.model
    if opened.tuned is not None:
        names = adapters.merge(opened.tuned)
    else:
        names = [*lora.adapters(model), *lora.token_row_modules(model)]
        if (shared := lora.shared_end(model)) is not None:
            raise lora.SharedEnd(shared)
        lora.merge(model)
    for name in names:
        weight = model.get_submodule(name).weight
        weight.data = halved(weight.detach(), dtype, start=start)
    return len(names)


@torch.no_grad()
def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(**plain_call(model, tokens)).logits.float()


def _logits_of_base(opened: Opened, tokens: torch.Tensor) -> torch.Tensor:
    with adapters.without(opened.tuned) if opened.tuned is not None else lora.without_adapters(opened.model):
        return _logits(opened.model, tokens)


def write_merged(
    weights: Weights, to: Path, *, precision: str, card: str | None = None, progress: Progress | None = None
) -> None:
    """The trained model as safetensors in the layout of its base's files, in files of 5 GB at most, with all that lies
    beside them; whole or not at all."""
    half = getattr(torch, load.DTYPES[precision])
    describe = functools.partial(put_side_files, weights.folder, dtype=half, card=card)
    tensors = merged_weights(weights, progress, dtype=half)
    if weights.files is None:
        _write_translated(weights, tensors, to, describe)
        return
    shapes = {name: (shape, half) for name, shape in weights.shapes().items()}
    for name, buffer in saved_buffers(weights.model).items():
        shapes[name] = (tuple(buffer.shape), half if buffer.is_floating_point() else buffer.dtype)
    parts = (part for name, tensor in tensors for part in stored_parts(name, _rows(tensor), weights.files))
    shapes = stored_shapes(shapes, weights.files)
    write_on_all_ranks(to, shapes, parts, Ranks(), pattern=MODEL_FILES, describe=describe)


def _rows(tensor: torch.Tensor) -> ShardSlice:
    return ShardSlice(tensor, 0, tensor.shape[0] if tensor.ndim else 1)


def _write_translated(
    weights: Weights, tensors: Iterator[tuple[str, torch.Tensor]], to: Path, describe: Callable[[Path], None]
) -> None:
    """Write the model by transformers, which alone knows the layout of its files and wants all weights at once."""
    by_name = dict(tensors)
    model, _ = load.load_empty(weights.run, dtype="fp32")
    for name, tensor in by_name.items():
        put_tensor(model, name, tensor)
    model.tie_weights()
    write_model(model, to, describe)


def put_side_files(folder: Path, to: Path, *, dtype: torch.dtype | None, card: str | None) -> None:
    """Put what lies beside the weights of the run in `folder` beside those in `to`."""
    side = folder / side_files.FOLDER
    if side.is_dir():
        side_files.put_beside(side, to, dtype=dtype, card=card)
        return
    run = read_run(folder)  # of an earlier version
    encoder = encoder_of(folder)
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        side_files.make(run, Path(temporary) / "side", **beside(run, encoder, reasons=False))
        side_files.put_beside(Path(temporary) / "side", to, dtype=dtype, card=card)


def _proved(weights: Weights, merged: Path) -> tuple[float, float]:
    """How far the logits of the merged model, read back, are from those of base and adapter; and how far the adapter
    moves them."""
    reference = StreamedModel(weights)
    tokens = _trial(reference.model)
    expected = reference.logits(tokens)
    del reference  # and its memory
    base = StreamedModel(weights, with_adapter=False).logits(tokens)
    logits = StreamedModel(written_weights(merged, weights.run)).logits(tokens)
    return _distance(logits, expected), _distance(base, expected)


def _card(run: Run, folder: Path, step: int | None) -> str:
    summary = read_summary(folder) or {}
    encoder = encoder_of(folder)
    asked = side_files.read_asked(folder / side_files.FOLDER)
    facts = facts_of(run, encoder, reasons=bool(asked.get("reasons")), loaded_by=asked.get("loaded_by"))
    before, after = summary.get("held_out_before"), summary.get("held_out_after")
    steps = summary.get("steps", step)
    return card(run, replace(facts, steps=steps, before=before, after=after, is_merged=True))


def _trial(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = load.usable_tokens(model.config)
    length = min(TRIAL_TOKENS, load.max_positions(model.config) or TRIAL_TOKENS)
    return torch.randint(vocabulary, (2, length), generator=generator)


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the spread of the logits of each position, since only their differences matter."""
    logits, expected = logits - logits.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
    return ((logits - expected).norm() / expected.norm()).item()
