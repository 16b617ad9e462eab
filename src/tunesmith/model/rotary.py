"""Fused RoPE: attention whose queries and keys are rotated by a kernel of ours, in the place of a model's own module.

Which modules these are is tried, not known: one that gives its attention function the same queries, keys and values as
ours, and makes the same of what comes back. The names of its linears do not change.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tunesmith.kernels.lowrank_qkv import lowrank_qkv
from tunesmith.kernels.rotary import rotate_pair
from tunesmith.model.lora import LoraLinear

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
"""Of each head, before it is rotated, in some models."""
OPTIONS = {"scaling", "dropout", "sliding_window", "softcap"}
"""What attention functions are told beside the queries, keys and values, and ours keep."""
TRIAL = "tunesmith_trial"
TRIED = 6
"""Tokens."""


def fuse_rope(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Put our module in the place of each attention that it equals; returns how many. `dtype` is that of activations;
    adapters are grouped already. Where weights are not there yet, random ones on the `device` are tried; on meta only
    sizes are compared, for what was found equal before."""
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (options := attention_options(child, dtype, device)) is not None:
                setattr(parent, name, RotaryAttention(child, options))
                found += 1
    return found


class RotaryAttention(nn.Module):
    """Packed documents alone: with a cache or a mask, or without positions, the model's own module is called."""

    def __init__(self, own: nn.Module, options: dict[str, Any]):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().__init__()
        self.functions = ALL_ATTENTION_FUNCTIONS
        for name, child in own.named_children():
            setattr(self, name, child)
        self.own = (own,)  # a tuple, so that it is no child, and its own keep their names
        self.config, self.options = own.config, options
        for name in ("layer_idx", "kind_of_layer", "is_causal", "head_dim"):
            setattr(self, name, getattr(own, name, None))

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **named):
        is_packed = "cu_seq_lens_q" in named and past_key_values is None and attention_mask is None
        if not is_packed or position_embeddings is None:  # some have the module, and no positions at all (Granite 4)
            return self.own[0](
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **named,
            )
        parts = (part.transpose(0, 1).unsqueeze(0) for part in self.rotated(hidden_states, *position_embeddings))
        function = self.functions[self.config._attn_implementation]
        attended, _ = function(self, *parts, None, **named | self.options)
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), None

    def rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of one row of tokens, [T, heads, D]."""
        cos, sin = (one.flatten(0, -2) for one in (cos, sin))
        has_norms, joint = hasattr(self, NORMS[0]), getattr(self.q_proj, "joint", None)
        if joint is not None and len(joint.members) == 3 and not has_norms:
            return lowrank_qkv(x.flatten(0, -2), *joint.operands(x.dtype), cos, sin)
        parts = (getattr(self, name)(x).flatten(0, -2) for name in LINEARS[:3])
        q, k, v = (part.unflatten(1, (-1, cos.shape[1])) for part in parts)
        if has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return *rotate_pair(q, k, cos, sin), v


def attention_options(module: nn.Module, dtype: torch.dtype, device: torch.device | None) -> dict[str, Any] | None:
    """What an attention module tells its attention function, or None where ours would not do the same."""
    children = {name for name, _ in module.named_children()}
    if children - set(NORMS) != set(LINEARS) or len(children & set(NORMS)) == 1 or not hasattr(module, "head_dim"):
        return None
    if next(module.parameters(recurse=False), None) is not None or getattr(module, "config", None) is None:
        return None
    held = list(itertools.chain(module.parameters(), module.buffers()))
    if any(tensor.is_meta for tensor in held):
        if device is None or not all(tensor.is_meta for tensor in held):
            return None  # nothing to try
        if device.type != "meta":
            if not all(tensor.is_floating_point() for tensor in held):
                return None  # what these would be is not known
            module = _stand_in_for(module, dtype, device)
            held = list(module.parameters())
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(held[0].device, dtype)

    x = draw(1, TRIED, _inputs(module.q_proj))
    cos, sin = draw(1, TRIED, module.head_dim), draw(1, TRIED, module.head_dim)
    with torch.no_grad(), _observed(module.config) as calls:
        try:
            out = module(x, position_embeddings=(cos, sin), attention_mask=None)[0]
            ((parts, options),) = calls
            ours = RotaryAttention(module, options)
            expected = [part.transpose(0, 1).unsqueeze(0) for part in ours.rotated(x, cos, sin)]
            again = ours.o_proj(_stand_in(parts[0]).reshape(1, TRIED, -1))
        except (TypeError, ValueError, RuntimeError):
            return None  # called in another way, or norms of another size
    if set(options) - OPTIONS or options.get("dropout") or getattr(module, "attention_dropout", 0.0):
        return None
    pairs = [*zip(parts, expected, strict=True), (out, again)]
    return options if all(_is_close(*pair) for pair in pairs) else None


def _stand_in_for(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A module like this one with weights of its own, drawn without touching the random numbers of others."""
    generator = torch.Generator(device).manual_seed(0)
    other = copy.deepcopy(module).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for tensor in itertools.chain(other.parameters(), other.buffers()):
            tensor.normal_(generator=generator).div_(tensor.shape[-1] ** 0.5)
    return other


@contextmanager
def _observed(config: Any) -> Iterator[list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]]:
    """While this lasts, attention functions take note of their arguments, and pass queries on."""
    from transformers import AttentionInterface

    calls = []

    def take_note(_module, query, key, value, mask, **options):
        assert mask is None
        calls.append(((query, key, value), options))
        return _stand_in(query), None

    before = config._attn_implementation
    AttentionInterface.register(TRIAL, take_note)
    config._attn_implementation = TRIAL
    try:
        yield calls
    finally:
        config._attn_implementation = before


def _inputs(linear: nn.Module) -> int:
    return linear.lora_a.shape[1] if isinstance(linear, LoraLinear) else linear.in_features


def _stand_in(query: torch.Tensor) -> torch.Tensor:
    return query.transpose(1, 2)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the rounding of half precision, in which a model's code rounds more often than ours."""
    if found.shape != expected.shape or found.is_meta:
        return found.shape == expected.shape
    return bool((found.float() - expected.float()).norm() <= 2e-2 * expected.float().norm())
