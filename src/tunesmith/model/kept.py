"""What layers keep for their backward pass, counted: for architectures that the planner has no formula of.

The model's own layers, at their own widths and without memory (meta tensors), are prepared as training prepares them,
and what autograd saves of each is counted. On a GPU layers are compiled: the compiler's own partition of the graph into
its two passes says what is saved, and no kernel is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tunesmith.kernels.operator import operator, register_backward
from tunesmith.model import load, lora
from tunesmith.model.forward import Inputs, packed_hidden_states
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.structure import decoder_layers, replace_module
from tunesmith.plan.facts import KEPT_RANK, Kept

TOKENS = 1031
"""A prime, so that no width is taken for it."""
STAND_IN = "tunesmith_counted"
PARTITION = "aot_eager_decomp_partition"
"""torch's backend that parts the graph of both passes as its compiler does, and runs the parts as they are."""
MOST_KINDS = 4
"""Of layers; compiling one takes seconds."""


def count_kept(
    config: Any, *, compiles: bool, fuses: bool, kernels: tuple[str, ...], trust_remote_code: bool = False
) -> tuple[Kept, ...] | None:
    """Of each layer. None where that cannot be said: layers that do not run without data, or whose attention is their
    own and keeps a value for each pair of tokens."""
    try:
        found = [
            _Counting(compiles, fuses, kernels, method).run(config, trust_remote_code) for method in ("full", "lora")
        ]
    except Exception:  # the model's own code, run on tensors that hold nothing
        return None
    width = 2 if compiles else 4
    if not all(found):
        return None
    return tuple(
        Kept(full=full, adapters=adapters, width=width, is_compiled=compiles)
        for full, adapters in zip(*found, strict=True)
    )


@dataclass
class _Counting:
    compiles: bool
    fuses: bool
    kernels: tuple[str, ...]
    method: str
    known: dict[Any, int | None] = field(default_factory=dict)
    """Bytes for each token, by kind of layer."""

    def run(self, config: Any, trust_remote_code: bool) -> list[int] | None:
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if self.compiles else torch.float32
        with load.quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).train()
        layers = decoder_layers(model)
        kinds = [_kind(layer) for layer in layers]
        if not layers or len(set(kinds)) > MOST_KINDS:
            return None
        self._adapt(model)
        for layer, kind in zip(layers, kinds, strict=True):
            if kind in self.known:
                layer.forward = _passed_on
                continue
            self.known[kind] = None
            self._prepare(layer, dtype)
            layer.forward = self._counted(layer, kind)
        with _attention_of(model, on_gpu=self.compiles):
            packed_hidden_states(model, _inputs())
        counts = [self.known[kind] for kind in kinds]
        return None if None in counts else counts  # pyright: ignore

    def _adapt(self, model: nn.Module) -> None:
        model.requires_grad_(self.method == "full")
        model.get_input_embeddings().requires_grad_(True)  # so that the first layer is like the others
        if self.method == "full":
            return
        head = model.get_output_embeddings()
        for name, module in list(model.named_modules()):
            if lora._is_linear(module) and module is not head:
                replace_module(model, name, lora.LoraLinear(module, KEPT_RANK, 1.0).to("meta"))

    def _prepare(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """As `parallel.prepare` does."""
        if self.method == "lora" and self.fuses:
            fuse(layer, fp8=False, fuse_mlps=self.compiles)
        if self.compiles and self.method == "full":
            use_memory_efficient_gates(layer, self.kernels)
        if self.compiles and "rope" in self.kernels:
            fuse_rope(layer, dtype, torch.device("cpu"))

    def _counted(self, layer: nn.Module, kind: Any) -> Callable:
        forward = torch.compile(layer.forward, backend=PARTITION) if self.compiles else layer.forward

        def count(*arguments: Any, **named: Any) -> Any:
            hidden = arguments[0] if arguments else named["hidden_states"]
            shared = (one for one in _tensors([arguments, named]) if one is not hidden)  # with the other layers
            own = {_place(one) for one in (*layer.parameters(), *layer.buffers(), *shared)}
            kept: dict[int, torch.Tensor] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                if _place(tensor) not in own:
                    kept.setdefault(_place(tensor), tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = forward(*arguments, **named)
            if not any(tensor.shape.count(TOKENS) > 1 for tensor in kept.values()):
                of_tokens = [tensor for tensor in kept.values() if TOKENS in tensor.shape]
                self.known[kind] = sum(tensor.untyped_storage().nbytes() for tensor in of_tokens) // TOKENS
            return result

        return count


def _kind(layer: nn.Module) -> Any:
    weights = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    return type(layer), weights, getattr(layer, "attention_type", None), getattr(layer, "layer_type", None)


def _passed_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
    return hidden_states


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _inputs() -> Inputs:
    whole = {"device": "meta", "dtype": torch.int64}
    tokens, positions, labels = (torch.empty(TOKENS, **whole) for _ in range(3))
    boundaries = torch.empty(5, device="meta", dtype=torch.int32)
    return Inputs(tokens, positions, boundaries, TOKENS, positions, labels, torch.empty(TOKENS, device="meta"))


# Attention that computes nothing, and keeps what kernels keep: queries, keys, values, the output and logarithms.


@operator("counted_attention")
def counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake(counted)
def _(q, k, v, queries, keys):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator("counted_attention_backward")
def counted_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


register_backward(counted, counted_backward)


def _attend(_module, query, key, value, _mask, *, cu_seq_lens_q=None, **_):
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return counted(q, k, v, cu_seq_lens_q, cu_seq_lens_q)[0].unsqueeze(0), None


def _attend_on_cpu(_module, query, key, value, _mask, *, cu_seq_lens_q=None, **_):
    """Document by document, whose outputs are put together once more."""
    q, k, v = (tensor.squeeze(0) for tensor in (query, key, value))
    out, _ = counted(q, k, v, cu_seq_lens_q, cu_seq_lens_q)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


@contextlib.contextmanager
def _attention_of(model: nn.Module, *, on_gpu: bool) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(STAND_IN, _attend if on_gpu else _attend_on_cpu)
    model.config._attn_implementation = STAND_IN
    if (text := model.config.get_text_config()) is not model.config:
        text._attn_implementation = STAND_IN
    try:
        yield
    finally:
        torch._dynamo.reset()
