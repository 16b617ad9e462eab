"""Muon for weights that lie over several ranks: momentum in rows as the weights' are, each update made whole.

Muon makes a matrix of gradients orthogonal, for which it must be seen as a whole: every rank gathers it, one matrix at
a time, computes what one rank would, and keeps its rows. So the result does not depend on the number of ranks, and the
products are not shared among them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor


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
        """What is added to the weight, spread as it is: torch's own step of the whole, from zeros, momentum done."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        update = weight.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = nn.Parameter(torch.zeros(weight.shape, device=weight.device))
        whole.grad = update.full_tensor()
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([whole], weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
        return distribute_tensor(whole.detach(), weight.device_mesh, weight.placements, src_data_rank=None)
