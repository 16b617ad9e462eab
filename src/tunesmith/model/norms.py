"""RMS norms as one kernel where they are called layer by layer, as in evaluation: torch's own takes one pass over its
input, a model's several. In training the compiler does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.model.structure import replace_module

EPSILONS = ("variance_epsilon", "eps", "epsilon")


class RmsNorm(NamedTuple):
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


@torch.no_grad()
def find_rms_norm(module: Any) -> RmsNorm | None:
    """What a module is found to be by calling it; None where it is no RMS norm."""
    held = _held(module) if isinstance(module, nn.Module) else None
    for offset in (0.0, 1.0) if held is not None else ():
        if _is_same(module, FusedNorm(nn.Parameter(held[0] + offset, requires_grad=False), held[1])):
            return RmsNorm(*held, offset)
    return None


class FusedNorm(nn.Module):
    """In place of a model's own, over its weight."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class FusedNorms:
    """The norms of a model that compute what torch's kernel computes, which is tried once."""

    def __init__(self, model: nn.Module):
        self.model = model
        leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
        self.made = {name: fused for name, module in leaves.items() if (fused := _fused(module)) is not None}
        self.own = {name: leaves[name] for name in self.made}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While this lasts, they are that kernel."""
        try:
            for name, fused in self.made.items():
                replace_module(self.model, name, fused)
            yield
        finally:
            for name, own in self.own.items():
                replace_module(self.model, name, own)


@torch.no_grad()
def _fused(module: nn.Module) -> FusedNorm | None:
    held = _held(module)
    if held is None:
        return None
    made = FusedNorm(*held)
    return made if _is_same(module, made) else None


def _held(module: nn.Module) -> tuple[nn.Parameter, float] | None:
    """The weight and the epsilon of what may be an RMS norm."""
    weight, others = getattr(module, "weight", None), dict(module.named_parameters(recurse=False)).keys() - {"weight"}
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    is_plain = isinstance(weight, nn.Parameter) and type(weight.data) is torch.Tensor and weight.ndim == 1
    if not is_plain or others or eps is None or isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return None
    return weight, eps


def _is_same(module: nn.Module, made: FusedNorm) -> bool:
    weight = made.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    tried = 3 * torch.randn(4, weight.shape[0], generator=generator, device=weight.device).to(weight.dtype)
    try:
        expected, found = module(tried), made(tried)
    except Exception:  # it wants more than its input
        return False
    if not isinstance(expected, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    bound = 4 * torch.finfo(weight.dtype).eps * expected.abs().float().clamp(min=1e-3)
    return bool(((expected.float() - found.float()).abs() <= bound).all())
