"""Mixers of Mamba-2 over packed documents, by kernels of ours (`kernels.scan`).

transformers has hybrids with state spaces (Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba2) whose own code keeps packed
documents apart only with the kernels of mamba-ssm and causal-conv1d, which many machines have not; without, it computes
with tensors of many times the size. Mixers that are built like theirs get a forward pass that does without these
libraries. It is taken where a call is packed or trains, and is the model's own in any other: decoding, padding, or a
plain call. Its linears are called as modules, so that each of them may carry an adapter.

A mixer is known by its parts and their sizes, not by its name. The order of what `in_proj` gives, the gate and all the
rest is decided by the probe, which compares what packed documents give with the model's own code.
"""

from __future__ import annotations

import importlib.util
import weakref
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.kernels.scan import chunked_scan, short_convolution

PACKAGES = ("mamba_ssm", "causal_conv1d")
"""With all of these, a model's own code is the faster one on a GPU."""
_installed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def use_chunked_scan(model: nn.Module) -> None:
    """From now on, in every mixer of the model that is known here."""
    if model in _installed:
        return
    _installed.add(model)
    for module in model.modules():
        if is_mixer(module):
            module.forward = MethodType(_forward, module)
        elif is_short_convolution(module):
            module.forward = MethodType(_convolved, module)


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """Those that ours can take the place of."""
    return [module for module in model.modules() if is_mixer(module)]


def has_own_kernels(device: torch.device, packages: tuple[str, ...] = PACKAGES) -> bool:
    return device.type == "cuda" and all(importlib.util.find_spec(package) for package in packages)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module has the parts of a Mamba-2 mixer, of sizes that belong together."""
    parts = dict(module.named_children())
    weights = {name: getattr(module, name, None) for name in ("A_log", "D", "dt_bias")}
    if not {"in_proj", "conv1d", "norm", "out_proj"} <= parts.keys() or not isinstance(parts["conv1d"], nn.Conv1d):
        return False
    sizes = [getattr(module, name, None) for name in ("num_heads", "head_dim", "n_groups", "ssm_state_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return False
    heads, size, groups, state = sizes
    convolution, inner = parts["conv1d"], heads * size
    channels, taps = inner + 2 * groups * state, convolution.kernel_size[0]
    return (
        all(isinstance(one, nn.Parameter) and one.shape == (heads,) for one in weights.values())
        and heads % groups == 0
        and _is_silu(getattr(module, "act", None))
        and getattr(module, "intermediate_size", None) == inner
        and (convolution.in_channels, convolution.groups, convolution.out_channels) == (channels,) * 3
        and (convolution.padding, convolution.stride, convolution.dilation) == ((taps - 1,), (1,), (1,))
    )


def is_short_convolution(module: nn.Module) -> bool:
    """Whether a module has the parts of LFM2's: each channel over its last few tokens, between two gates."""
    parts = dict(module.named_children())
    if parts.keys() != {"conv", "in_proj", "out_proj"} or not isinstance(parts["conv"], nn.Conv1d):
        return False
    convolution = parts["conv"]
    channels, taps = convolution.in_channels, convolution.kernel_size[0]
    return (convolution.groups, convolution.out_channels) == (channels, channels) and (
        convolution.padding,
        convolution.stride,
        convolution.dilation,
    ) == ((taps - 1,), (1,), (1,))


def _is_silu(act: Any) -> bool:
    tried = torch.linspace(-4, 4, 9, device="cpu")
    return callable(act) and torch.equal(act(tried), F.silu(tried))


def _forward(
    self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **named: Any
) -> torch.Tensor:
    is_padded = attention_mask is not None
    is_ours = (self.training or ("seq_idx" in named and not is_padded)) and cache_params is None
    if not is_ours or (is_padded and attention_mask.ndim != 2) or has_own_kernels(hidden_states.device):
        return type(self).forward(
            self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named
        )
    rows, tokens, _ = hidden_states.shape
    document = torch.arange(rows, device=hidden_states.device, dtype=torch.int32)[:, None].expand(rows, tokens)
    if (seq_idx := named.get("seq_idx")) is not None:
        document = seq_idx if rows == 1 else seq_idx + tokens * document
    if is_padded:  # what fills a row up is a document of its own
        document = 2 * document + (attention_mask != 0)
    return _mixed(self, hidden_states.reshape(1, rows * tokens, -1), document.reshape(-1)).view_as(hidden_states)


def _mixed(self: Any, hidden_states: torch.Tensor, document_t: torch.Tensor) -> torch.Tensor:
    """Of one row of documents: [1, T, H]."""
    if (factor := getattr(self, "ssm_in_multiplier", None)) is not None:  # Falcon-H1
        hidden_states = hidden_states * factor
    joint = self.in_proj(hidden_states)
    if (factors := getattr(self, "mup_vector", None)) is not None:
        joint = joint * factors
    inner, convolution = self.num_heads * self.head_dim, self.conv1d
    gate, x_bc, dt = joint.split([inner, convolution.in_channels, self.num_heads], dim=-1)
    dt_th = F.softplus(dt[0].float() + self.dt_bias.float())
    dt_th = dt_th.clamp(*getattr(self, "time_step_limit", (0.0, float("inf"))))
    y_td = chunked_scan(
        x_bc[0],
        convolution.weight.squeeze(1),
        convolution.bias,
        dt_th,
        -torch.exp(self.A_log.float()),
        self.D,
        document_t,
        groups=self.n_groups,
        state=self.ssm_state_size,
    )
    y = y_td[None]
    y = y * F.silu(gate) if isinstance(self.norm, nn.Identity) else self.norm(y, gate)
    return self.out_proj(y.to(joint.dtype))


def _convolved(
    self: Any, hidden_states: torch.Tensor, past_key_values: Any = None, attention_mask: Any = None, **named: Any
) -> torch.Tensor:
    """A short convolution within each document, of one row of them."""
    document = named.get("seq_idx")
    is_ours = document is not None and document.shape[0] == 1 and past_key_values is None and attention_mask is None
    if not is_ours or has_own_kernels(hidden_states.device, PACKAGES[1:]):
        cached = {} if past_key_values is None else {"past_key_values": past_key_values}
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **cached, **named)
    before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    weight_dk, bias = self.conv.weight.squeeze(1), self.conv.bias
    y_td = short_convolution((before * x)[0], weight_dk, bias, document[0])
    return self.out_proj(after * y_td[None].to(x.dtype))
