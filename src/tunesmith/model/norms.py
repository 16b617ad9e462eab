"""RMS norms as one kernel where they are called layer by layer, as in evaluation: torch's own takes one pass over its
input, a model's several. In training the compiler does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.model.structure import replace_module

EPSILONS = ("variance_epsilon", "eps", "epsilon")


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
    weight, others = getattr(module, "weight", None), dict(module.named_parameters(recurse=False)).keys() - {"weight"}
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    is_plain = isinstance(weight, nn.Parameter) and type(weight.data) is torch.Tensor and weight.ndim == 1
    if not is_plain or others or eps is None or isinstance(module, nn.LayerNorm | nn.GroupNorm):
        return None
    made = FusedNorm(weight, eps)
    generator = torch.Generator(weight.device).manual_seed(0)
    tried = 3 * torch.randn(4, weight.shape[0], generator=generator, device=weight.device).to(weight.dtype)
    try:
        expected, found = module(tried), made(tried)
    except Exception:  # it wants more than its input
        return None
    if not isinstance(expected, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return None
    bound = 4 * torch.finfo(weight.dtype).eps * expected.abs().float().clamp(min=1e-3)
    return made if bool(((expected.float() - found.float()).abs() <= bound).all()) else None
