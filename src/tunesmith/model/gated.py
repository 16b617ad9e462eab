"""Memory-efficient SwiGLU: gated MLPs with trained weights that compute their activation again in the backward pass
instead of keeping it, in the place of a model's own.

Which modules these are is tried, not known: a copy with small linears must compute `down(silu(gate(x)) * up(x))`.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

from tunesmith.kernels.gated import gated_matmul

LINEARS = ("gate_proj", "up_proj", "down_proj")
INPUTS, WIDTH = 8, 12
"""Of the linears a module is tried with."""


def use_memory_efficient_swiglu(model: nn.Module) -> int:
    """Put our module in the place of each MLP that it equals; returns how many. The names of linears do not change."""
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linears = gated_linears(child)
            if linears and all(type(one) is nn.Linear for one in linears) and is_silu_gated(child):
                setattr(parent, name, GatedMlp(*linears))
                found += 1
    return found


class GatedMlp(nn.Module):
    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_th = x.flatten(0, -2)
        y = gated_matmul(self.gate_proj(x_th), self.up_proj(x_th), self.down_proj.weight)
        y = y if self.down_proj.bias is None else y + self.down_proj.bias
        return y.view(*x.shape[:-1], -1)


def gated_linears(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """Gate, up and down of a module that has these and an activation, and nothing else."""
    children = dict(module.named_children())
    if children.keys() != {*LINEARS, "act_fn"} or next(module.parameters(recurse=False), None) is not None:
        return None
    return tuple(children[name] for name in LINEARS)


def is_silu_gated(module: nn.Module) -> bool:
    """Whether a module with `gated_linears` computes what its names say. Its weights need not be there yet."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (  # without their usual weights, which would take from the random numbers of others
        skip_init(nn.Linear, *sizes, bias=False, device="cpu", dtype=torch.float32)
        for sizes in ((INPUTS, WIDTH), (INPUTS, WIDTH), (WIDTH, INPUTS))
    )
    small = copy.copy(module)
    small.__dict__["_modules"] = {**module._modules, **dict(zip(LINEARS, (gate, up, down), strict=True))}
    with torch.no_grad():
        for linear in (gate, up, down):
            linear.weight.normal_(generator=generator)
        x = torch.randn(1, 2, INPUTS, generator=generator, device="cpu")
        expected = down(F.silu(gate(x)) * up(x))
        try:
            found = small(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False  # called in another way
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)
