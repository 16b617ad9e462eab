"""Muon, many matrices at a time; and for weights that lie over several ranks.

Muon makes each matrix of gradients orthogonal by some twenty small operations. Where there are hundreds of matrices, as
with adapters, starting these takes the CPU longer than all else of a step; so matrices of the same shape go
through them together.

Over several ranks a matrix must be seen as a whole: every rank gathers it, one at a time, computes what one rank would,
and keeps its rows. So the result does not depend on the number of ranks, and the matmuls are not shared among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

TOGETHER = 1 << 23
"""Values of matrices that are computed at once; a larger matrix is alone."""


class GroupedMuon(torch.optim.Muon):
    """torch's own, with its states, up to the last bits of the matmuls."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weights in _alike([weight for weight in group["params"] if weight.grad is not None]):
                self._update(weights, group)

    def _update(self, weights: list[nn.Parameter], group: dict) -> None:
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        moved = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        changes = _orthogonal(torch.stack(moved), group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * _relative_rate(weights[0].shape, group["adjust_lr_fn"])
        torch._foreach_add_(weights, list(changes.to(weights[0].dtype).unbind()), alpha=-rate)


def _alike(weights: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those of the same shape, as many as may be computed at once."""
    by_shape: dict[object, list[nn.Parameter]] = {}
    for weight in weights:
        by_shape.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
    for same in by_shape.values():
        count = max(1, TOGETHER // same[0].numel())
        yield from (same[start : start + count] for start in range(0, len(same), count))


def _orthogonal(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> torch.Tensor:
    """Each matrix with its singular values near 1, in bf16: Newton and Schulz's iteration, as torch's Muon has it."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT.bfloat16() if is_tall else matrices.bfloat16()
    found /= torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def _relative_rate(shape: torch.Size, adjust: str | None) -> float:
    """What the rate is multiplied by for matrices of a shape, as torch's Muon has it."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1, shape[0] / shape[1]))


class SpreadMuon(torch.optim.Muon):
    """Weights must be DTensors."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(self._change(weight, group))

    def _change(self, weight: nn.Parameter, group: dict) -> torch.Tensor:
        """What is added to the weight, spread as it is: a step of the whole, from zeros, momentum done."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        update = weight.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = nn.Parameter(torch.zeros(weight.shape, device=weight.device))
        whole.grad = update.full_tensor()
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        GroupedMuon([whole], weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
        return distribute_tensor(whole.detach(), weight.device_mesh, weight.placements, src_data_rank=None)
