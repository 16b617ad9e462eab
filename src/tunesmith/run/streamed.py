"""A run's model in bounded host memory: its merged weights one unit after the other, and its logits the same way.

A unit is a decoder layer, or what surrounds the layers. `merged_weights` gives every tensor of base + adapter once;
`StreamedModel` calls the model itself while the weights of one layer at a time are there. Both read the base's files as
training does, and know by their content whether it is the base that was trained over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.update import halved_once
from tunesmith.model import load, lora
from tunesmith.model.content import Content
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.files import Held, Read, own_copy, read_tensors
from tunesmith.model.save import saved_buffers
from tunesmith.model.source import WeightSource, files_of, find_source
from tunesmith.model.structure import decoder_layers, plain_call, put_tensor, replace_module
from tunesmith.parallel.prepare import Preparation, Unit, read
from tunesmith.run.base import check_base
from tunesmith.run.folder import read_run
from tunesmith.run.open import trained_adapter

Progress = Callable[[str, int, int | None], None]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Weights:
    """Of the trained model, before any of them is read."""

    folder: Path
    """Of the run."""
    run: Run
    """Its model is what the weights are read from: the base of an adapter, or the trained model itself."""
    base: Path
    """The folder of those files."""
    model: nn.Module
    """Without weights."""
    files: dict[str, Held] | None
    """How its files hold it; None where only transformers can translate them, which takes all of it into memory."""
    adapter: lora.AdapterFiles | None
    adapted: tuple[str, ...]
    """Linears with adapters."""
    step: int | None
    """Of the checkpoint that the adapter is from, where the run is not finished."""
    stored: str
    """The precision of the files: fp32, bf16 or fp16."""

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order in which `merged_weights` gives them."""
        work = Preparation(self.model, self.run, torch.device("cpu"), torch.float32)
        return [name for unit in work.units for name, _ in _owned(self.model, unit)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        tensors = {**dict(self.model.named_parameters()), **saved_buffers(self.model)}
        return {name: tuple(tensors[name].shape) for name in self.names}

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class NotStreamed(UserError):
    """The adapter is more than low-rank factors on linears of the base's own files."""

    def __init__(self, folder: Path, why: str):
        super().__init__(
            f"The adapter of {folder} {why}, which can be merged, but not be exported yet: `tunesmith merge` writes it "
            "as a model that transformers, peft and vLLM load."
        )


def _check_streamed(run: Run, folder: Path) -> None:
    is_finished = (folder / "adapter" / "adapter_config.json").exists()
    if run.method == "peft":
        raise NotStreamed(folder, f"is one of peft's ({run.peft.get('peft_type', 'its own type')})")
    if run.new_tokens:
        raise NotStreamed(folder, "has rows of new tokens")
    if run.lora.init == "loftq":
        raise NotStreamed(folder, "belongs to a base that is rounded (init: loftq)")
    if not is_finished and (run.lora.takes_out or run.adapter is not None):
        raise NotStreamed(folder, "is of a run that is not finished, and did not begin without effect")


def find_weights(folder: Path) -> Weights:
    """What is known of the weights of the run in `folder` without reading them."""
    run, adapter, adapted, step = read_run(folder), None, (), None
    if run.has_adapters:
        _check_streamed(run, folder)
        adapter, step = trained_adapter(folder)
        adapted = tuple(lora.adapted_names(adapter, str(folder)))
    elif (folder / "model" / "config.json").exists():
        run = run.model_copy(update={"model": str(folder / "model")})
    else:
        raise UserError(f"{folder} holds no finished model yet; run `tunesmith train` first.")
    model, base = load.load_empty(run, dtype="fp32")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(end is module for name, module in model.named_modules() if name in adapted for end in ends):
        raise NotStreamed(folder, "is on the model's embedding or output head")
    with load.reading(run, "weights"):
        files = files_of(model, base)
    return Weights(folder, run, base, model, files, adapter, adapted, step, stored_precision(run))


def merged_weights(weights: Weights, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the trained model by its name there, in `names`' order: those with adapters merged, in fp32, all
    others as the files have them. A tensor is gone when the next unit is asked for."""
    run, model, dtype = weights.run, weights.model, getattr(torch, load.DTYPES[_widest(weights)])
    content = Content()
    with load.reading(run, "weights"), load.quiet():
        source = find_source(model, weights.base, dtype=dtype, storage="plain", content=content, is_mapped=False)
        work = Preparation(model, run, torch.device("cpu"), dtype, source=source)
        units = work.units
        for number, unit in enumerate(work.each([read, partial(_merge, weights)]), start=1):
            owned = _owned(model, unit)
            for name, tensor in owned:
                yield name, tensor.detach()
            del tensor
            for name, tensor in owned:
                _forget(model, name, tensor)
            if not unit.name:
                model.tie_weights()  # what was tied to a tensor that is forgotten forgets it, too
            if progress:
                progress("Merging" if weights.adapter else "Reading", number, len(units))
    if run.has_adapters:
        check_base(weights.folder, run, content)


def _merge(weights: Weights, work: Preparation, unit: Unit) -> None:
    """The adapters of the unit into its weights, which are then in fp32."""
    with torch.no_grad():
        for name in filter(unit.owns, weights.adapted):
            adapter = lora.attach_one(work.model, name, weights.adapter, str(weights.folder))
            merged = adapter.merged(adapter.base.weight)
            adapter.base.weight = nn.Parameter(merged, requires_grad=False)
            replace_module(work.model, name, adapter.base)


def rounded(weights: Weights, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A merged tensor in another precision: stochastically to bf16 where an adapter was added (`run.merge` says why),
    to the nearest elsewhere."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    owner, _, leaf = name.rpartition(".")
    if dtype == torch.bfloat16 and tensor.dtype == torch.float32 and leaf == "weight" and owner in weights.adapted:
        return halved_once(tensor, seed=zlib.crc32(name.encode()))
    made = tensor.to(dtype)
    if dtype == torch.float16 and not made.isfinite().all():
        raise UserError(f"{name} has values beyond what fp16 holds; export in bf16 or fp32.")
    return made


def written_weights(folder: Path, run: Run) -> Weights:
    """Those of a model folder that was written of the run: for reading it back in bounded memory."""
    return weights_of_model(run.model_copy(update={"model": str(folder)}), folder)


def weights_of_model(run: Run, folder: Path) -> Weights:
    """Those of the model that the run names, without any adapter; `folder` is where its side files are."""
    model, base = load.load_empty(run, dtype="fp32")
    with load.reading(run, "weights"):
        files = files_of(model, base)
    return Weights(folder, run, base, model, files, None, (), None, stored_precision(run))


def stored_precision(run: Run) -> str:
    """What a model's files are in; fp32 where they do not say."""
    dtype = getattr(load.load_config(run), "dtype", None)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def _widest(weights: Weights) -> str:
    """A precision in which nothing that the files hold is rounded."""
    if weights.files is None:
        return "fp32"
    kinds = {entry.dtype for held in read_tensors(weights.base).values() for entry in held.entries}
    plain = kinds & {"F32", "F16", "BF16", "F64"}
    return {frozenset({"BF16"}): "bf16", frozenset({"F16"}): "fp16"}.get(frozenset(kinds), "fp32") if plain else "fp32"


def _owned(model: nn.Module, unit: Unit) -> list[tuple[str, torch.Tensor]]:
    """All that a model's files hold of a unit."""
    buffers = [(name, buffer) for name, buffer in saved_buffers(model).items() if unit.owns(name)]
    return [*unit.weights(), *buffers]


def _forget(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        put_tensor(model, name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


class StreamedModel:
    """A run's model, or its base alone, called in fp32 with the weights of one unit at a time in memory."""

    def __init__(self, weights: Weights, *, with_adapter: bool = True, rounded_to: str | None = None):
        """`rounded_to`: the type that the run was trained for, where linears are to be as in training."""
        self.weights, self.with_adapter = weights, with_adapter
        self.model, _ = load.load_empty(weights.run, dtype="fp32")
        self.rounded = FakeQuantization.of(self.model, rounded_to) if rounded_to else None
        with load.reading(weights.run, "weights"), load.quiet():
            self.source: WeightSource = find_source(
                self.model, weights.base, dtype=torch.float32, storage="plain", is_mapped=False
            )
        self.tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        for name, tensor, _ in self._from_files([one for one in saved_buffers(self.model) if one in self.source.names]):
            put_tensor(self.model, name, own_copy(tensor))  # few, and needed throughout

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, V], in fp32."""
        with self._streaming(), load.quiet():
            return self.model(**plain_call(self.model, tokens)).logits.float()

    def _from_files(self, names: Iterable[str]) -> Iterator[Read]:
        return self.source.read(dict.fromkeys(names), part=lambda *_: (), pin=False, codes={})

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """While this lasts, a unit has weights as long as it is called."""
        hooks = []
        names = {module: name for name, module in self.model.named_modules()}
        layers = decoder_layers(self.model)
        inside = {one for layer in layers for one in layer.modules()}
        if self._layers_share_weights(layers):
            layers, inside = [self.model], set(self.model.modules())
        others = [
            one for one in self.model.modules() if one not in inside and any(True for _ in one.children()) is False
        ]
        for module in (*layers, *others):
            if any(True for _ in module.parameters()):
                hooks.append(module.register_forward_pre_hook(partial(self._read, names[module])))
                hooks.append(module.register_forward_hook(partial(self._free, names[module])))
        alone = {one for one in self.model.modules() if one not in inside and one not in others}
        for module in alone:  # weights of a module that has others within; they are few
            own = [leaf for leaf, weight in module.named_parameters(recurse=False) if weight is not None]
            self._put([f"{names[module]}.{leaf}".lstrip(".") for leaf in own])
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _layers_share_weights(self, layers: list[nn.Module]) -> bool:
        weights = [weight for layer in layers for weight in layer.parameters()]
        names = {module: name for name, module in self.model.named_modules()}
        prefixes = tuple(f"{names[layer]}." for layer in layers)
        return len(set(weights)) < len(weights) or any(
            name.startswith(prefixes) for pair in self.tied.items() for name in pair
        )

    def _read(self, name: str, module: nn.Module, _: Any) -> None:
        prefix = f"{name}." if name else ""
        self._put([prefix + leaf for leaf, _ in module.named_parameters(remove_duplicate=False)])
        if self.with_adapter:
            for linear in self.weights.adapted:
                if linear.startswith(prefix):
                    lora.attach_one(self.model, linear, self.weights.adapter, str(self.weights.folder))
        if self.rounded is not None:
            self.rounded.put_on(self.model, lambda linear: linear.startswith(prefix))

    def _put(self, names: list[str]) -> None:
        stored = [self.tied.get(name, name) if name not in self.source.names else name for name in names]
        if missing := [name for name in stored if name not in self.source.names]:
            raise UserError(f"model: the weights of {self.weights.run.model} hold no {missing[0]}.")
        found = {name: tensor.float() for name, tensor, _ in self._from_files(stored)}
        for name, source in zip(names, stored, strict=True):
            put_tensor(self.model, name, found[source])

    def _free(self, name: str, module: nn.Module, *_: Any) -> None:
        prefix = f"{name}." if name else ""
        if self.with_adapter:
            for linear in filter(lambda one: one.startswith(prefix), self.weights.adapted):
                replace_module(self.model, linear, self.model.get_submodule(linear).base)
        for leaf, parameter in list(module.named_parameters(remove_duplicate=False)):
            put_tensor(module, leaf, torch.empty(parameter.shape, device="meta"))
