"""Attention that a model's code computes in place, handed to packed attention (`model.attention`) instead.

transformers has a few decoders whose layers take neither document boundaries nor an attention function: BLOOM and MPT,
with ALiBi, and Falcon. Their attention modules get a forward pass that does, and is the model's own wherever a call is
not packed. The boundaries travel as one of the arguments that such layers hand on to their attention, so that a layer
that is checkpointed, compiled or captured sees them as its input. The probe decides whether all of it is right.

Falcon with ALiBi is left alone: its code rounds what a distance adds to bf16, in whatever precision it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.model.attention import NAME

PREFIX = "tunesmith_"
"""Of attention functions of ours."""


class Packed(NamedTuple):
    """What a layer is given in the place of its position bias."""

    queries: torch.Tensor
    """int32 [D+1]: boundaries of documents"""
    keys: torch.Tensor
    places: torch.Tensor | None
    """int64 [S]: the tokens whose keys these are, where that is not all of them in turn"""
    longest: int
    slopes: torch.Tensor | None
    """float32 [H]: what a token's distance takes from its score; None where positions are rotary"""
    attention: str
    """The name of the attention function, as transformers knows it."""


class Inline:
    """Of one model: what its layers are called with while it is called with packed documents."""

    def __init__(self, argument: str, slopes: torch.Tensor | None = None, mask: torch.Tensor | None = None):
        self.argument = argument
        """Of its layers, which they hand on to their attention."""
        self.slopes = slopes
        self.mask = mask
        """What the model is called with as its mask; None: nothing."""
        self.attention = NAME
        """The attention function; such models cannot be told another by `set_attn_implementation`."""
        self.packed: Packed | None = None

    @contextmanager
    def calls(
        self, model: nn.Module, queries: torch.Tensor, keys: torch.Tensor, places: torch.Tensor | None, longest: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """While this lasts the model is called packed; gives what it is called with besides."""
        own = model.config._attn_implementation
        name = own if own.startswith(PREFIX) else self.attention
        if self.slopes is not None and self.slopes.device != queries.device:
            self.slopes = self.slopes.to(queries.device)
        self.packed = Packed(queries, keys, places, longest, self.slopes, name)
        model.config._attn_implementation = name  # for which transformers makes no mask of all pairs of tokens
        try:
            yield {} if self.mask is None else {"attention_mask": self.mask.to(queries.device)}
        finally:
            self.packed = None
            model.config._attn_implementation = own

    def enter(self, _layer: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before a layer's forward pass."""
        return None if self.packed is None else (given, named | {self.argument: self.packed})


_known: weakref.WeakKeyDictionary[nn.Module, Inline | None] = weakref.WeakKeyDictionary()


def inline_attention(model: nn.Module) -> Inline | None:
    """Of a model without its head; None where its attention takes boundaries by itself, or is not known here."""
    if model not in _known:
        _known[model] = _install(model)
    return _known[model]


def _install(model: nn.Module) -> Inline | None:
    found = [
        (layer, child)
        for layer in model.modules()
        for child in layer.children()
        if type(child).__name__ in FORWARD and type(child).__module__.startswith("transformers.models.")
    ]
    kinds = {type(child).__name__ for _, child in found}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    inline = FAMILIES[kind](model)
    if inline is None:
        return None
    for layer, child in found:
        layer.register_forward_pre_hook(inline.enter, with_kwargs=True)
        child.forward = MethodType(FORWARD[kind], child)
    return inline


def _of_bloom(model: nn.Module) -> Inline | None:
    if model.config.pretraining_tp > 1 and model.config.slow_but_exact:  # its last matmul in pieces
        return None
    bias = model.build_alibi_tensor(torch.ones(1, 2), model.num_heads, torch.float32)
    return Inline("alibi", bias.diff(dim=-1).view(-1))


def _of_mpt(model: nn.Module) -> Inline:
    bias = model.build_mpt_alibi_tensor(model.num_heads, 2, device=torch.device("cpu"))
    # It wants a mask, of which nothing is read then.
    return Inline("position_bias", bias.diff(dim=-1).view(-1), torch.zeros(1, 1, 1, 1))


def _of_falcon(model: nn.Module) -> Inline | None:
    return None if model.config.alibi else Inline("alibi")


def _bloom(self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *given: Any, alibi: Any, **named: Any):
    if not isinstance(alibi, Packed):
        return type(self).forward(self, hidden_states, residual, *given, alibi=alibi, **named)
    heads = self._reshape(self.query_key_value(hidden_states))
    out = self.dense(_attend(self, *heads, alibi, self.inv_norm_factor, self.attention_dropout.p))
    return residual + F.dropout(out, self.hidden_dropout, self.training), None


def _mpt(self: Any, hidden_states: torch.Tensor, *given: Any, position_bias: Any, **named: Any):
    if not isinstance(position_bias, Packed):
        return type(self).forward(self, hidden_states, *given, position_bias=position_bias, **named)
    joint = self.Wqkv(hidden_states)
    joint = joint.clamp(min=-self.clip_qkv, max=self.clip_qkv) if self.clip_qkv else joint
    heads = [part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in joint.chunk(3, dim=2)]
    return self.out_proj(_attend(self, *heads, position_bias, self.softmax_scale, self.attn_dropout_p)), None


def _falcon(self: Any, hidden_states: torch.Tensor, *given: Any, alibi: Any = None, **named: Any):
    if not isinstance(alibi, Packed):
        return type(self).forward(self, hidden_states, *given, alibi=alibi, **named)
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    heads = [part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states))]
    query, key = apply_rotary_pos_emb(heads[0], heads[1], *named["position_embeddings"])
    return self.dense(_attend(self, query, key, heads[2], alibi, self.head_dim**-0.5, 0.0)), None


def _attend(module: nn.Module, query, key, value, packed: Packed, scale: float, dropout: float) -> torch.Tensor:
    """[1, H, T, D] to [1, T, H * D], by the attention that the plan names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    out, _ = ALL_ATTENTION_FUNCTIONS[packed.attention](
        module,
        query,
        key,
        value,
        None,
        scaling=scale,
        dropout=dropout if module.training else 0.0,
        cu_seq_lens_q=packed.queries,
        cu_seq_lens_k=packed.keys,
        max_length_q=packed.longest,
        max_length_k=packed.longest,
        alibi_slopes=packed.slopes,
        key_places=packed.places,
    )
    return out.flatten(2)


FAMILIES: dict[str, Callable[[Any], Inline | None]] = {
    "BloomAttention": _of_bloom,
    "MptAttention": _of_mpt,
    "FalconAttention": _of_falcon,
}
FORWARD: dict[str, Callable] = {"BloomAttention": _bloom, "MptAttention": _mpt, "FalconAttention": _falcon}
