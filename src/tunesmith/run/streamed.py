"""A run's model in bounded host memory: its merged weights one tensor after the other, its logits layer by layer.

`merged_weights` gives every tensor of base + adapter once; `StreamedModel` calls the model itself while the weights of
one unit at a time are there: a decoder layer, or what surrounds the layers. Both read the base's files as
training does, and know by their content whether it is the base that was trained over.
"""

from __future__ import annotations

import copy
import math
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.update import halve_into, halved
from tunesmith.model import adapters, load, lora, lora_modules
from tunesmith.model.content import Content
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.files import Held, Memory, Read, at_block, own_copy, read_tensors
from tunesmith.model.finite import Finite
from tunesmith.model.save import saved_buffers
from tunesmith.model.source import Files, WeightSource, files_of, find_source
from tunesmith.model.structure import decoder_layers, plain_call, put_tensor, replace_module
from tunesmith.parallel.prepare import Preparation, Unit
from tunesmith.run.base import check_base
from tunesmith.run.folder import has_result, read_run
from tunesmith.run.open import trained_adapter
from tunesmith.run.there import check_base_there, no_result

Progress = Callable[[str, int, int | None], None]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
MERGERS = 4
"""Threads that merge tensors, at most: one a core. Each has that core alone: pieces that stay in its cache are too
small to be shared by several (with two each on two cores a merge took twice the CPU's time)."""


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
    """Of the checkpoint that the adapter is from, where there is no result."""
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
    if run.method == "peft":
        adapters.check_merges(run)
        raise NotStreamed(folder, f"is one of peft's ({run.peft.get('peft_type', 'its own type')})")
    if run.new_tokens:
        raise NotStreamed(folder, "has rows of new tokens")
    if run.lora.init == "loftq":
        raise NotStreamed(folder, "belongs to a base that is rounded (init: loftq)")
    if not has_result(folder, "adapter") and (run.lora.takes_out or run.adapter is not None):
        raise NotStreamed(folder, "is a checkpoint's, and did not begin without effect")


def find_weights(folder: Path) -> Weights:
    """What is known of the weights of the run in `folder` without reading them."""
    run, adapter, adapted, step = read_run(folder), None, (), None
    if run.has_adapters:
        check_base_there(folder, run)
        _check_streamed(run, folder)
        adapter, step = trained_adapter(folder)
        adapted = tuple(lora.adapted_names(adapter, str(folder)))
    elif has_result(folder, "model"):
        run = run.model_copy(update={"model": str(folder / "model")})
    else:
        raise no_result(folder, "finished model")
    model, base = load.load_empty(run, dtype="fp32")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if on_ends := [name for name, module in model.named_modules() if name in adapted and module in ends]:
        if ends[1] is not None and ends[0].weight is ends[1].weight:
            raise lora.SharedEnd(on_ends[0])
        raise NotStreamed(folder, "is on the model's embedding or output head")
    with load.reading(run, "weights"):
        files = files_of(model, base)
    return Weights(folder, run, base, model, files, adapter, adapted, step, stored_precision(run))


def merged_weights(
    weights: Weights, progress: Progress | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the trained model by its name there, in `names`' order: those with adapters merged, in fp32, all
    others as the files have them; or all `rounded` to `dtype`. Files are read and tensors are merged by threads, a few
    tensors ahead of the one that is taken, which is the taker's."""
    run, model, wide = weights.run, weights.model, getattr(torch, load.DTYPES[_widest(weights)])
    content, names, finite = Content(), weights.names, Finite(wide)
    with load.reading(run, "weights"), load.quiet():
        memory = Memory(is_past_cache=True)
        source = find_source(model, weights.base, dtype=wide, storage="plain", content=content, memory=memory)
        buffers = {name: buffer for name, buffer in saved_buffers(model).items() if name not in source.names}
        held = [name for name in names if name not in buffers]
        if missing := next((name for name in held if name not in source.names), None):
            raise UserError(f"model: the weights of {run.model} hold no {missing}.")

        def finish(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in buffers:
                return _merged(weights, name, tensor, dtype)
            look = partial(finite.look, name, tensor)
            tensor = tensor.to(wide) if tensor.is_floating_point() and not source.knows_dtypes else tensor
            return _merged(weights, name, tensor, dtype, look=look, in_place=isinstance(source, Files))

        others = [name for name in source.names if name not in buffers and name not in set(held)]
        reads = source.read([*held, *others], part=lambda *_: (), pin=False, codes={})
        tensors = ((name, buffers[name] if name in buffers else next(reads)[1]) for name in names)
        with closing(reads):
            for number, (name, tensor) in enumerate(_in_threads(finish, tensors), start=1):
                finite.say(source.files)
                yield name, tensor
                if progress:
                    progress("Merging" if weights.adapter else "Reading", number, len(names))
            for _ in reads:  # a tied weight that the files have twice is part of the base, too
                pass
    if run.has_adapters:
        check_base(weights.folder, run, content)


def _in_threads(
    finish: Callable[[str, torch.Tensor], torch.Tensor], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `finish` makes of each tensor, in order."""
    underway: deque[tuple[str, Future[torch.Tensor]]] = deque()
    with _mergers() as mergers:
        for name, tensor in tensors:
            underway.append((name, mergers.submit(finish, name, tensor)))
            del tensor
            while len(underway) > MERGERS:
                name, finished = underway.popleft()
                yield name, finished.result()
                del finished
        while underway:
            name, finished = underway.popleft()
            yield name, finished.result()
            del finished


@contextmanager
def _mergers() -> Iterator[ThreadPoolExecutor]:
    """Threads in which torch takes one core for an operation. It is for this thread to say what others take."""
    cores = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(min(MERGERS, cores), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(cores)


@torch.no_grad()
def _merged(
    weights: Weights,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | None,
    *,
    look: Callable[[], bool] = lambda: True,
    in_place: bool = False,
) -> torch.Tensor:
    """A tensor of the base with its adapter in it, where it has one. `look` finds out whether it is finite; where it is
    merged piece by piece, that is asked only when a piece is not. `in_place`: its memory may be taken for it."""
    owner, _, leaf = name.rpartition(".")
    if owner not in weights.adapted or leaf != "weight":
        look()
        return tensor if dtype is None else rounded(weights, name, tensor, dtype)
    linear = copy.copy(weights.model.get_submodule(owner))  # the model itself stays without weights
    linear._parameters = {**linear._parameters, leaf: nn.Parameter(tensor, requires_grad=False)}
    adapter = lora.adapted_linear(linear, owner, weights.adapter, str(weights.folder))
    if dtype != torch.bfloat16 or not adapter.adds_rows:
        look()
        merged = adapter.merged(tensor)
        return merged if dtype is None else rounded(weights, name, merged, dtype)

    def piece(rows: slice, room: torch.Tensor) -> None:
        room.copy_(tensor[rows])
        adapter.add_rows_(room, rows)

    # In place it may lie a little before `tensor`: of that, what lies there has been taken into a piece by then.
    to = at_block(tensor) if in_place and tensor.dtype == dtype else torch.empty(tensor.shape, dtype=dtype)
    return _halved(name, to, piece, look)


def rounded(weights: Weights, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A merged tensor in another precision: stochastically to bf16 where an adapter was added (`run.merge` says why),
    to the nearest elsewhere."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    owner, _, leaf = name.rpartition(".")
    if dtype == torch.bfloat16 and tensor.dtype == torch.float32 and leaf == "weight" and owner in weights.adapted:
        narrow = torch.empty(tensor.shape, dtype=dtype)
        return _halved(name, narrow, lambda rows, room: room.copy_(tensor[rows]))
    narrow = tensor.to(dtype)
    if dtype == torch.float16 and not narrow.isfinite().all():
        raise UserError(f"{name} has values beyond what fp16 holds; export in bf16 or fp32.")
    return narrow


def _halved(
    name: str, to: torch.Tensor, piece: Callable[[slice, torch.Tensor], Any], look: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """Fill the matrix `to`, in bf16, with values that `piece` puts into room for some rows of it in fp32, which stay in
    a core's cache: 1.5 ns a weight with the adapter's matmul, not 14. `look` is asked where they are not finite."""
    chance, room = random.Random(zlib.crc32(name.encode())), None
    for rows in lora_modules.row_pieces(to):
        room = torch.empty(to[rows].shape) if room is None else room[: rows.stop - rows.start]
        piece(rows, room)
        total = room.sum().item()
        if not math.isfinite(total) and not look():
            break  # it will be refused, with these values
        halve_into(to[rows], room, chance, has_nan=math.isnan(total))
    return to


def written_weights(folder: Path, run: Run) -> Weights:
    """The weights of a model folder that was written of the run, for reading it back in bounded memory."""
    return weights_of_model(run.model_copy(update={"model": str(folder)}), folder)


def weights_of_model(run: Run, folder: Path) -> Weights:
    """The weights of the model that the run names, without any adapter; `folder` is where its side files are."""
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


def _in_fp32(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Not in memory of torch's: allocators keep that of an embedding for later."""
    if tensor.dtype == torch.float32:
        return tensor
    size = 4 * tensor.numel()
    return memory.take(size)[:size].view(torch.float32).view(tensor.shape).copy_(tensor)


class StreamedModel:
    """A run's model, or its base alone, called in fp32 with the weights of one unit at a time in memory."""

    def __init__(
        self,
        weights: Weights,
        *,
        with_adapter: bool = True,
        rounded_to: str | None = None,
        rounds_inputs: bool = False,
        merged_to: torch.dtype | None = None,
    ):
        """`rounded_to`: the type that linears are rounded to, as in training for it or as llama.cpp does;
        `rounds_inputs`: and what goes into them, where engines do that. `merged_to`:
        adapters are merged into their linears and rounded to this, in another draw than that of merged files."""
        self.weights, self.with_adapter, self.merged_to = weights, with_adapter, merged_to
        self._first: nn.Module | None = None  # that was read before it is called
        self.model, _ = load.load_empty(weights.run, dtype="fp32")
        self.memory = Memory()
        self.rounded = FakeQuantization.of(self.model, rounded_to, with_inputs=rounds_inputs) if rounded_to else None
        if self.rounded is not None:
            self.rounded.watch_inputs(self.model)
        with load.reading(weights.run, "weights"), load.quiet():
            self.source: WeightSource = find_source(
                self.model, weights.base, dtype=torch.float32, storage="plain", memory=self.memory
            )
        self.tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        for name, tensor, _ in self._from_files(
            [buffer for buffer in saved_buffers(self.model) if buffer in self.source.names]
        ):
            put_tensor(self.model, name, own_copy(tensor))  # few, and needed throughout

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, V], in fp32."""
        with self._streaming(), load.quiet():
            return self.model(**plain_call(self.model, tokens)).logits.float()

    def logits_of(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[T, V] of each, in one pass over the weights. What follows a sequence in its row changes nothing before
        it."""
        longest = max(len(ids) for ids in sequences)
        tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
        return [row[: len(ids)] for row, ids in zip(self.logits(tokens), sequences, strict=True)]

    def _from_files(self, names: Iterable[str]) -> Iterator[Read]:
        return self.source.read(dict.fromkeys(names), part=lambda *_: (), pin=False, codes={})

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """While this lasts, a unit has weights as long as it is called."""
        hooks = []
        names = {module: name for name, module in self.model.named_modules()}
        layers = decoder_layers(self.model)
        inside = {module for layer in layers for module in layer.modules()}
        if self._layers_share_weights(layers):
            layers, inside = [self.model], set(self.model.modules())
        others = [
            module
            for module in self.model.modules()
            if module not in inside and any(True for _ in module.children()) is False
        ]
        for module in (*layers, *others):
            if any(True for _ in module.parameters()):
                hooks.append(module.register_forward_pre_hook(partial(self._read, names[module])))
                hooks.append(module.register_forward_hook(partial(self._free, names[module])))
        alone = {module for module in self.model.modules() if module not in inside and module not in others}
        for module in alone:  # weights of a module that has others within; they are few
            own = [leaf for leaf, weight in module.named_parameters(recurse=False) if weight is not None]
            self._put([f"{names[module]}.{leaf}".lstrip(".") for leaf in own])
        if (first := self.model.get_input_embeddings()) in others:  # some models send tokens to where its weight is
            self._read(names[first], first, None)
            self._first = first
        try:
            yield
        finally:
            self._first = None
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
        if module is self._first:
            self._first = None
            return
        self._put([prefix + leaf for leaf, _ in module.named_parameters(remove_duplicate=False)])
        if self.with_adapter:
            for linear in self.weights.adapted:
                is_called = linear == name  # one outside the layers: it is too late to put a module around it
                if is_called or linear.startswith(prefix):
                    lora.attach_one(self.model, linear, self.weights.adapter, str(self.weights.folder))
                    if is_called or self.merged_to is not None:
                        self._merge(linear, self.merged_to or torch.float32)
        if self.rounded is not None:
            self.rounded.put_on(self.model, lambda linear: linear == name or linear.startswith(prefix))

    def _merge(self, name: str, dtype: torch.dtype) -> None:
        adapter = self.model.get_submodule(name)
        merged = adapter.merged(adapter.base.weight.detach())
        adapter.base.weight.data = halved(merged, dtype).float()
        replace_module(self.model, name, adapter.base)

    def _put(self, names: list[str]) -> None:
        stored = [self.tied.get(name, name) if name not in self.source.names else name for name in names]
        if missing := [name for name in stored if name not in self.source.names]:
            raise UserError(f"model: the weights of {self.weights.run.model} hold no {missing[0]}.")
        tensors = {name: _in_fp32(tensor, self.memory) for name, tensor, _ in self._from_files(stored)}
        for name, source in zip(names, stored, strict=True):
            put_tensor(self.model, name, tensors[source])

    def _free(self, name: str, module: nn.Module, *_: Any) -> None:
        prefix = f"{name}." if name else ""
        if self.with_adapter and self.merged_to is None:
            for linear in filter(lambda adapted: adapted.startswith(prefix), self.weights.adapted):
                replace_module(self.model, linear, self.model.get_submodule(linear).base)
        for leaf, parameter in list(module.named_parameters(remove_duplicate=False)):
            put_tensor(module, leaf, torch.empty(parameter.shape, device="meta"))
