"""What a step of an encoder-decoder takes, counted: what its layers keep for their backward pass, what else exists
while it runs, and the work of both passes.

The model's own code is called at its own widths and without memory (meta tensors), on micro-batches of a few shapes:
with the first layer of each stack, and with each kind of further layer. All of it is a sum of `plan.facts.terms`: so
much for each token that is read and for each that is written, so much for each pair of them that attention looks at,
and something for any. As many shapes as there are terms tell what belongs to each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSeq2SeqLM

from tunesmith import __version__
from tunesmith.cache import folder_to_fill
from tunesmith.config.schema import Run
from tunesmith.kernels.operator import operator
from tunesmith.model import load, lora, lora_modules
from tunesmith.model.structure import layers_of, replace_module, stacks_of
from tunesmith.model.work import Tally, storage_of
from tunesmith.plan.facts import PairedWork, Rows, terms

SHAPES = tuple((8, read, written) for read, written in (
    (256, 256), (256, 128), (128, 256), (768, 128), (128, 768), (512, 256), (256, 512),
))  # fmt: skip
"""Rows, and the tokens of each that are read and written, as micro-batches have them: of very few tokens, matmuls
would count by what they read, and of very few rows what these share (positions) would count. Multiples of 16, to which
kernels pad biases."""
KERNEL = "counted_rows"
COUNTED = ("kept", "bytes", "half", "full", "attention", "kernels")
"""Sums over layers; the workspace is one layer's."""


def count_paired(run: Run, *, on_gpu: bool) -> PairedWork | None:
    """Of the run's model and adapters, run as they are; known from an earlier time where config, settings and versions
    are the same. None where it cannot be counted: models whose code looks at what is in tensors."""
    kept = _kept_file(run, on_gpu=on_gpu)
    if kept is not None and kept.exists():
        with contextlib.suppress(OSError, ValueError):  # made again
            return PairedWork.model_validate_json(kept.read_text(encoding="utf-8"))
    try:
        found = _count(run, on_gpu=on_gpu)
    except Exception:  # the model's own code, run on tensors that hold nothing
        return None
    if kept is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written
            beside = kept.with_suffix(f".{os.getpid()}.partial")
            beside.write_text(found.model_dump_json(), encoding="utf-8")
            beside.replace(kept)
    return found


def _kept_file(run: Run, *, on_gpu: bool) -> Path | None:
    """Beside the probes; None where the model's code lies beside its config, and may change."""
    folder = None if run.trust_remote_code else folder_to_fill("probes")
    settings = run.model_dump_json(include={"lora", "method"})
    config = json.dumps(load.load_config(run).to_dict(), sort_keys=True, default=str)
    parts = [__version__, torch.__version__, transformers.__version__, on_gpu, SHAPES, settings, config]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return folder and folder / f"paired-{name}.json"


def _count(run: Run, *, on_gpu: bool) -> PairedWork:
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = load.load_config(run)
    with load.quiet(), torch.device("meta"):
        options = {"dtype": dtype, "trust_remote_code": run.trust_remote_code}
        model = AutoModelForSeq2SeqLM.from_config(config, **options).train()
    _adapt(run, model)
    stacks = [layers_of(stack) for stack in stacks_of(model)]
    every = [list(stack) for stack in stacks]

    def sums(added: tuple[int, nn.Module] | None = None) -> dict[str, np.ndarray]:
        """By term, of a model of the first layer of each stack, which may make what others share, and of one more."""
        for place, (stack, layers) in enumerate(zip(stacks, every, strict=True)):
            del stack[:]
            stack.extend([layers[0], *([added[1]] if added is not None and added[0] == place else [])])
        found = [_call(model, shape, on_gpu=on_gpu, is_first=added is None) for shape in SHAPES]
        return {name: _by_term([one[name] for one in found]) for name in found[0]}

    first = sums()
    whole = dict(first)
    for place, layers in enumerate(every):
        kinds: dict[Any, list[nn.Module]] = {}
        for layer in layers[1:]:
            kinds.setdefault(tuple(tuple(weight.shape) for weight in layer.parameters()), []).append(layer)
        for alike in kinds.values():
            more = sums((place, alike[0]))
            for name in COUNTED:
                whole[name] = whole[name] + len(alike) * (more[name] - first[name])
            whole["layer"] = np.maximum(whole.get("layer", 0.0), more["kept"] - first["kept"])
    whole.setdefault("layer", first["kept"])
    return PairedWork(
        **{name: Rows(terms=tuple(map(float, values))) for name, values in whole.items()},
        width=dtype.itemsize,
    )


def _by_term(values: list[float]) -> np.ndarray:
    """With the same weight for each shape, however large."""
    of_terms = np.array([terms(*shape) for shape in SHAPES])
    scale, sizes = of_terms.max(axis=0), np.maximum(np.array(values, dtype=np.float64), 1.0)
    found = np.linalg.lstsq(of_terms / scale / sizes[:, None], np.array(values) / sizes, rcond=None)[0]
    return found / scale


def _adapt(run: Run, model: nn.Module) -> None:
    if not run.has_lora:
        return
    model.requires_grad_(False)
    for name in lora.find_targets(model, run.lora):
        linear = model.get_submodule(name)
        if lora_modules.is_linear(linear):
            one = lora_modules.LoraLinear(linear, run.lora.rank, 1.0, run.lora.dropout, dora=run.lora.dora)
            replace_module(model, name, one.to("meta"))


def _call(model: Any, shape: tuple[int, int, int], *, on_gpu: bool, is_first: bool) -> dict[str, float]:
    """Of both passes of one micro-batch."""
    rows, read, written = shape
    with torch.device("meta"):
        sources, targets = (torch.zeros(rows, length, dtype=torch.int64) for length in (read, written))
    weights = [*model.parameters(), *model.buffers()]
    known, kept = {storage_of(one) for one in weights}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if storage_of(tensor) not in known:
            kept.setdefault(storage_of(tensor), tensor)
        return tensor

    tally = Tally(lambda _: False, 1, (KERNEL, f"{KERNEL}_backward"))
    encoder, decoder = stacks_of(model)
    live = _Live({tuple(one.shape) for one in weights} if is_first else None)
    try:
        with tally, live, _Attention(on_gpu=on_gpu) as attention:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                states = encoder(input_ids=sources, attention_mask=torch.ones_like(sources))[0]
                out = decoder(
                    input_ids=targets,
                    attention_mask=torch.ones_like(targets),
                    encoder_hidden_states=states,
                    encoder_attention_mask=torch.ones_like(sources),
                    use_cache=False,
                )[0]
            size = sum(one.untyped_storage().nbytes() for one in kept.values())
            kept.clear()
            del states
            live.begin()
            if out.requires_grad:
                torch.autograd.backward(out, torch.empty_like(out))
    finally:
        for weight in model.parameters():
            weight.grad = None
    work = tally.work()
    sums = {name: sum(getattr(work, name)) for name in ("bytes", "half", "full")}
    return {"kept": size, "workspace": live.most, "attention": attention.flops, "kernels": work.kernels, **sums}


class _Live(TorchDispatchMode):
    """The most bytes that exist at once beyond those that do at its beginning, but for tensors shaped as weights are:
    gradients. Without `weights` it counts nothing. Asked what is in a tensor, it says False: masks are made where there
    may be something to mask."""

    def __init__(self, weights: set[tuple[int, ...]] | None):
        super().__init__()
        self.weights, self.now, self.most = weights, 0, 0
        self.seen: set[int] = set()

    def begin(self) -> None:
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            return False
        result = func(*args, **(kwargs or {}))
        if self.weights is None:
            return result
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and tuple(one.shape) not in self.weights:
                self._add(one.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.seen:
            return
        self.seen.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.now -= size


class _Attention(TorchFunctionMode):
    """Stands in for torch's attention where one of its kernels would do it on the device: that keeps what goes in, what
    comes out, and logarithms. Where none does, torch computes all scores by plain operations, in fp32: on a GPU where a
    bias does not lie in memory row by row (T5's, whose heads are innermost, before transformers 5.22), on a CPU where
    there is dropout, or a bias that is trained. And for dropout on a GPU, which keeps a byte of each value."""

    def __init__(self, *, on_gpu: bool):
        super().__init__()
        self.on_gpu, self.flops = on_gpu, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and self.on_gpu:
            return _dropped(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args
        mask, dropout = kwargs.get("attn_mask"), kwargs.get("dropout_p", 0.0)
        if mask is None:
            mask = q.new_empty(1, 1, 1, 1)
        elif not (mask.stride(-1) == 1 if self.on_gpu else not (dropout or mask.requires_grad)):
            if self.on_gpu:
                return _plain(q, k, v, mask, dropout)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return func(*args, **kwargs)
        elif mask.dtype is torch.bool:
            mask = torch.where(mask, mask.new_zeros((), dtype=q.dtype), float("-inf"))
        # Forward, and 2.5 times as much backward.
        self.flops += 3.5 * 4 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3]) / 2
        if k.shape[1] != q.shape[1]:
            k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        return counted(q, k, v, mask)[0]


def _dropped(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, dropout: float) -> torch.Tensor:
    """As torch computes it on a GPU where no kernel does; on meta tensors it would keep more of what is dropped."""
    k, v = (one.float().repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    if mask.dtype is torch.bool:
        mask = torch.where(mask, mask.new_zeros((), dtype=q.dtype), float("-inf"))
    scale = q.shape[-1] ** -0.25
    scores = (scale * q.float()) @ (scale * k).transpose(2, 3) + mask
    return (_dropped(scores.softmax(-1), dropout) @ v).to(q.dtype)


@operator(KERNEL)
def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])  # kernels write heads last but one
    return out.transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(f"{KERNEL}_backward")
def counted_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(mask)


@torch.library.register_fake(counted)
def _(q, k, v, mask):
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return out.transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    found = counted_backward(d_out, *ctx.saved_tensors)
    return tuple(one if wanted else None for one, wanted in zip(found, ctx.needs_input_grad, strict=True))


torch.library.register_autograd(counted, _gradients, setup_context=_save)
