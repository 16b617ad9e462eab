"""Fused RoPE: attention whose queries and keys are rotated by a kernel of ours, in the place of a model's own module.

Which modules these are, and how they rotate, is tried, not known: one that gives its attention function the same
queries, keys and values as ours, and makes the same of what comes back. The names of its linears do not change.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tunesmith.kernels.lowrank_qkv import lowrank_qkv
from tunesmith.kernels.rotary import HALVES, PAIRS, rotate_joint, rotate_pair
from tunesmith.model.lora_modules import LoraLinear

SEPARATE, OUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
"""Linears by name; in the place of three there may be one of any name."""
NORMS = ("q_norm", "k_norm")
"""Of queries and keys, before they are rotated, in some models."""
OPTIONS = {"scaling", "dropout", "sliding_window", "softcap"}
"""What attention functions are told beside the queries, keys and values, and ours keep."""
PART = "partial_rotary_factor"
TRIAL = "tunesmith_trial"
TRIED = 6
"""Tokens."""


@dataclass(frozen=True)
class Form:
    """How an attention makes its queries, keys and values, as trying it has shown."""

    options: dict[str, Any]
    """That its attention function is told."""
    into: tuple[str, ...]
    """The linears for queries, keys and values, or the one for all three."""
    key_heads: int
    rotated: int
    """Values of each head that are rotated."""
    pairs: int
    """Of `kernels.rotary.PAIRS`."""
    norms: Literal["none", "head", "wide"]
    """Of queries and keys: none, one for each head, or one over all heads."""

    @property
    def is_plain(self) -> bool:
        """As in Llama and its descendants: separate linears, all of a head rotated, in halves."""
        return self.pairs == HALVES and self.norms != "wide" and self.into == SEPARATE


def fuse_rope(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Put our module in the place of each attention that it equals; returns how many. `dtype` is that of activations;
    adapters are grouped already. Where weights are not there yet, random ones on the `device` are tried; on meta only
    sizes are compared, for what was found equal before."""
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (form := attention_form(child, dtype, device)) is not None:
                setattr(parent, name, RotaryAttention(child, form))
                found += 1
    return found


class RotaryAttention(nn.Module):
    """Packed documents alone: with a cache or a mask, or with other positions, the model's own module is called."""

    def __init__(self, own: nn.Module, form: Form):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().__init__()
        self.functions = ALL_ATTENTION_FUNCTIONS
        for name, child in own.named_children():
            setattr(self, name, child)
        self.own = (own,)  # a tuple, so that it is no child, and its own keep their names
        self.config, self.options = own.config, form.options
        # One by one, so that the compiler sees numbers and names.
        self.into, self.norms = form.into, form.norms
        self.rotated_values, self.key_heads, self.pairs = form.rotated, form.key_heads, form.pairs
        for name in ("layer_idx", "kind_of_layer", "is_causal", "head_dim"):
            setattr(self, name, getattr(own, name, None))

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **named):
        is_packed = "cu_seq_lens_q" in named and past_key_values is None and attention_mask is None
        # Some have the module, and no positions at all (Granite 4).
        is_rotated = position_embeddings is not None and position_embeddings[0].shape[-1] == self.rotated_values
        if not (is_packed and is_rotated):
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
        angles = cos.flatten(0, -2), sin.flatten(0, -2)
        cut = self.key_heads, self.head_dim, self.pairs
        linears = [getattr(self, name) for name in self.into]
        joint = getattr(linears[0], "joint", None)  # with adapters
        if joint is not None and len(joint.members) == len(linears) and self.norms == "none":
            return lowrank_qkv(x.flatten(0, -2), *joint.operands(x.dtype), *angles, *cut)
        parts = [linear(x).flatten(0, -2) for linear in linears]
        if len(parts) == 1:
            return rotate_joint(parts[0], *angles, *cut)
        if self.norms == "wide":
            parts = [self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2]]
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in parts)
        if self.norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return *rotate_pair(q, k, *angles, self.pairs), v


def attention_form(module: nn.Module, dtype: torch.dtype, device: torch.device | None) -> Form | None:
    """How an attention module rotates, or None where ours would not do the same."""
    if (found := _tried_module(module, dtype, device)) is None:
        return None
    module, into = found
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(next(module.parameters()).device, dtype)

    for size in _rotated_sizes(module):
        x = draw(1, TRIED, _inputs(getattr(module, into[0])))
        angles = draw(1, TRIED, size), draw(1, TRIED, size)
        with torch.no_grad():
            try:
                form = _form_by_trial(module, into, x, angles)
            except Exception:  # the model's own code, which may be called in another way
                continue
        if form is not None:
            return form
    return None


def _tried_module(
    module: nn.Module, dtype: torch.dtype, device: torch.device | None
) -> tuple[nn.Module, tuple[str, ...]] | None:
    """A module that can be tried, itself or one like it with weights, and its linears for queries, keys and values;
    None where it is no attention of the kinds that are known here."""
    children = {name: child for name, child in module.named_children() if name not in NORMS}
    norms = [name for name in NORMS if hasattr(module, name)]
    into = tuple(name for name in children if name != OUT)
    if set(into) == set(SEPARATE):
        into = SEPARATE
    elif len(into) != 1 or norms:
        return None
    are_linears = all(isinstance(one, LoraLinear) or hasattr(one, "in_features") for one in children.values())
    if OUT not in children or not are_linears:
        return None
    if len(norms) == 1 or getattr(module, "head_dim", None) is None or getattr(module, "config", None) is None:
        return None
    if next(module.parameters(recurse=False), None) is not None or getattr(module, "attention_dropout", 0.0):
        return None
    held = list(itertools.chain(module.parameters(), module.buffers()))
    if not any(tensor.is_meta for tensor in held):
        return module, into
    if device is None or not all(tensor.is_meta for tensor in held):
        return None  # nothing to try
    if device.type == "meta":
        return module, into
    if not all(tensor.is_floating_point() for tensor in held):
        return None  # what these would be is not known
    return _stand_in_for(module, dtype, device), into


def _rotated_sizes(module: nn.Module) -> list[int]:
    """How many values of a head may be rotated: the part that the config names, or all."""
    ropes = getattr(module.config, "rope_parameters", None) or {}
    ropes = [ropes, *(one for one in ropes.values() if isinstance(one, dict))]  # of each kind of layer, in some
    named = [getattr(module.config, PART, None), *(one.get(PART) for one in ropes)]
    sizes = [int(module.head_dim * one) for one in named if isinstance(one, int | float) and 0 < one < 1]
    return [size for size in dict.fromkeys([*sizes, module.head_dim]) if size > 0 and size % 2 == 0]


def _form_by_trial(
    module: nn.Module, into: tuple[str, ...], x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
) -> Form | None:
    """The form that gives what the module gives; some error where it takes no such angles."""
    with _observed(module.config) as calls:
        out = module(x, position_embeddings=angles, attention_mask=None)[0]
    ((parts, options),) = calls
    if set(options) - OPTIONS or options.get("dropout"):
        return None
    norms = ("head", "wide") if hasattr(module, NORMS[0]) else ("none",)
    for pairs, norm in itertools.product(PAIRS, norms):
        form = Form(options, into, parts[1].shape[1], angles[0].shape[-1], pairs, norm)
        ours = RotaryAttention(module, form)
        try:
            found = [part.transpose(0, 1).unsqueeze(0) for part in ours.rotated(x, *angles)]
        except RuntimeError:
            continue  # norms or linears of another size
        again = ours.o_proj(_stand_in(parts[0]).reshape(1, TRIED, -1))
        if all(_is_close(*pair) for pair in [*zip(parts, found, strict=True), (out, again)]):
            return form
    return None


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
