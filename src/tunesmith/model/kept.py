"""What layers keep for their backward pass, counted: for architectures and adapters that the planner has no formula of.

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

from tunesmith.config.schema import Run
from tunesmith.kernels.operator import operator, register_backward
from tunesmith.model import adapters, load, lora
from tunesmith.model.forward import Inputs, packed_hidden_states
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.structure import decoder_layers, replace_module
from tunesmith.plan.facts import KEPT_RANK, Kept, KeptByOwn

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
    case = {"compiles": compiles, "on_gpu": compiles, "fuses": fuses, "kernels": kernels}
    try:
        found = [
            _Counting(adapt, is_full=adapt is _train_all, **case).run(config, trust_remote_code)
            for adapt in (_train_all, _adapt_all)
        ]
    except Exception:  # the model's own code, run on tensors that hold nothing
        return None
    width = 2 if compiles else 4
    if not all(found):
        return None
    return tuple(
        Kept(full=full[0], adapters=adapted[0], width=width, is_compiled=compiles)
        for full, adapted in zip(*found, strict=True)
    )


def count_own(run: Run, *, on_gpu: bool, kernels: tuple[str, ...]) -> tuple[KeptByOwn, ...] | None:
    """Of each layer, with adapters of the run's own kind: those of the peft library, DoRA, dropout. None where there is
    a formula, or they cannot be put on layers without weights, or are none of the layers'."""
    is_prompt = adapters.is_prompt(run)
    if is_prompt or not (run.method == "peft" or (run.has_lora and (run.lora.dora or run.lora.dropout))):
        return None
    key = run.model_dump_json(include={"model", "peft", "adapter", "lora", "method", "trust_remote_code"})
    if (key, on_gpu, kernels) not in _counted:
        compiles = on_gpu and run.method != "peft"
        case = {"compiles": compiles, "on_gpu": on_gpu, "fuses": True, "kernels": kernels}
        counting = _Counting(lambda model: _adapt_as(run, model), is_full=False, **case)
        try:
            found = counting.run(load.load_config(run), run.trust_remote_code)
        except Exception:  # other people's code, as above
            found = None
        width = 2 if on_gpu else 4
        _counted[key, on_gpu, kernels] = found and tuple(
            KeptByOwn(bytes=of_tokens, fixed=fixed, width=width, is_compiled=compiles) for of_tokens, fixed in found
        )
    return _counted[key, on_gpu, kernels]


_counted: dict[Any, tuple[KeptByOwn, ...] | None] = {}
"""A plan asks more than once."""


def _train_all(model: nn.Module) -> None:
    model.requires_grad_(True)


def _adapt_all(model: nn.Module) -> None:
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if lora._is_linear(module) and module is not head:
            replace_module(model, name, lora.LoraLinear(module, KEPT_RANK, 1.0).to("meta"))


def _adapt_as(run: Run, model: nn.Module) -> None:
    model.requires_grad_(False)
    if run.method == "peft":
        with torch.device("meta"):
            adapters.put_on(model, run, empty=True)
        return
    for name in lora.find_targets(model, run.lora):
        linear = model.get_submodule(name)
        if lora._is_linear(linear):
            one = lora.LoraLinear(linear, run.lora.rank, 1.0, run.lora.dropout, dora=run.lora.dora)
            replace_module(model, name, one.to("meta"))


@dataclass
class _Counting:
    adapt: Callable[[nn.Module], None]
    """Puts adapters on, and says what is trained."""
    is_full: bool
    compiles: bool
    on_gpu: bool
    fuses: bool
    kernels: tuple[str, ...]
    known: dict[Any, tuple[int, int] | None] = field(default_factory=dict)
    """By kind of layer: bytes for each token, and those that are kept for any number of them."""

    def run(self, config: Any, trust_remote_code: bool) -> list[tuple[int, int]] | None:
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        with load.quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).train()
        self.adapt(model)
        model.get_input_embeddings().requires_grad_(True)  # so that the first layer is like the others
        layers = decoder_layers(model)
        kinds = [_kind(layer) for layer in layers]
        if not layers or len(set(kinds)) > MOST_KINDS:
            return None
        for layer, kind in zip(layers, kinds, strict=True):
            if kind in self.known:
                layer.forward = _passed_on
                continue
            self.known[kind] = None
            self._prepare(layer, dtype)
            layer.forward = self._counted(layer, kind)
        with _attention_of(model, on_gpu=self.on_gpu):
            packed_hidden_states(model, _inputs())
        counts = [self.known[kind] for kind in kinds]
        return None if None in counts else counts  # pyright: ignore

    def _prepare(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """As `parallel.prepare` does."""
        if not self.is_full and self.fuses:
            fuse(layer, fp8=False, fuse_mlps=self.compiles)
        if self.on_gpu and self.is_full:
            use_memory_efficient_gates(layer, self.kernels)
        if self.on_gpu and "rope" in self.kernels:
            fuse_rope(layer, dtype, torch.device("meta"))

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
                sizes = [(TOKENS in tensor.shape, tensor.untyped_storage().nbytes()) for tensor in kept.values()]
                of_tokens, fixed = (sum(size for is_own, size in sizes if is_own is one) for one in (True, False))
                self.known[kind] = of_tokens // TOKENS, fixed
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
