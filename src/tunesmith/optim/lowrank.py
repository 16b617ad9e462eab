"""GaLore and APOLLO: full-parameter training with AdamW's states in a space of low rank.

Both see the gradient of each matrix through a projection of its shorter side, and keep AdamW's two moments of that
alone. GaLore (arXiv 2403.03507) projects onto the gradient's largest singular directions, found anew every `EVERY`
steps, and brings AdamW's step back from there: what lies outside is not learned until the directions change. APOLLO
(arXiv 2412.05270) projects at random, and takes from the low-rank step only how much each channel of the gradient is
to be scaled: the update has full rank. Vectors, the embedding and the output head are AdamW's (`optim.build`).

Legend: S shorter side, L longer side, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tunesmith.plan.memory import projected_rank

EVERY = 200
"""Steps between two projections."""
GALORE_SCALE = 0.25
"""Of GaLore's updates, as its authors have it."""
GROWTH = 1.01
"""APOLLO: from one step to the next an update's norm grows no more than so many times, which keeps early steps calm."""


class LowRank(torch.optim.Optimizer):
    """AdamW whose moments are those of projected gradients; a subclass says how."""

    kind: str

    def __init__(self, groups: list[dict], *, betas: tuple[float, float], epsilon: float, seed: int):
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0})
        self.seed = seed
        weights = [weight for group in self.param_groups for weight in group["params"]]
        self.numbers = {weight: number for number, weight in enumerate(weights)}

    def fits(self, weight: torch.Tensor, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether saved moments are of this projection, and not another optimizer's."""
        short, long = sorted(weight.shape)
        return "exp_avg" in values and tuple(values["exp_avg"].shape) == (projected_rank(self.kind, short), long)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        is_tall = weight.shape[0] > weight.shape[1]
        gradient_sl = (weight.grad.t() if is_tall else weight.grad).float()
        state = self.state[weight]
        if not state:
            rank = projected_rank(self.kind, gradient_sl.shape[0])
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(rank, gradient_sl.shape[1], device=weight.device)
        done = int(state["step"].item())
        low_rl = self.project(gradient_sl, state, done, self.numbers[weight])
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(low_rl, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(low_rl, low_rl, value=1 - second)
        root = (state["exp_avg_sq"] / (1 - second ** (done + 1))).sqrt_().add_(group["eps"])
        adam_rl = state["exp_avg"] / (1 - first ** (done + 1)) / root
        update_sl = self.full(gradient_sl, low_rl, adam_rl, state)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_((update_sl.t() if is_tall else update_sl).to(weight.dtype), alpha=-group["lr"])

    def project(self, gradient_sl: torch.Tensor, state: dict, done: int, number: int) -> torch.Tensor:
        """The gradient in the small space [R, L], when so many steps are done."""
        raise NotImplementedError

    def full(self, gradient_sl: torch.Tensor, low_rl: torch.Tensor, adam_rl: torch.Tensor, state: dict) -> torch.Tensor:
        """The update [S, L] from AdamW's step in the small space."""
        raise NotImplementedError


class GaLore(LowRank):
    kind = "galore"

    def project(self, gradient_sl: torch.Tensor, state: dict, done: int, number: int) -> torch.Tensor:
        if done % EVERY == 0 or "projection" not in state:
            left_sx, _, _ = torch.linalg.svd(gradient_sl, full_matrices=False)
            state["projection"] = left_sx[:, : len(state["exp_avg"])].contiguous()
        return state["projection"].t() @ gradient_sl

    def full(self, gradient_sl: torch.Tensor, low_rl: torch.Tensor, adam_rl: torch.Tensor, state: dict) -> torch.Tensor:
        return GALORE_SCALE * (state["projection"] @ adam_rl)


class Apollo(LowRank):
    kind = "apollo"

    def project(self, gradient_sl: torch.Tensor, state: dict, done: int, number: int) -> torch.Tensor:
        rank, short = len(state["exp_avg"]), gradient_sl.shape[0]
        # Drawn on the host, so that it is the same on every device and need not be kept.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number * 7919 + done // EVERY) % 2**63)
        projection_rs = torch.randn(rank, short, generator=generator) / math.sqrt(rank)
        return projection_rs.to(gradient_sl.device) @ gradient_sl

    def full(self, gradient_sl: torch.Tensor, low_rl: torch.Tensor, adam_rl: torch.Tensor, state: dict) -> torch.Tensor:
        scale_l = adam_rl.norm(dim=0) / (low_rl.norm(dim=0) + 1e-8)
        update_sl = gradient_sl * scale_l
        norm = update_sl.norm()
        if "norm" in state:
            largest = GROWTH * state["norm"].to(norm)
            update_sl *= torch.where(norm > largest, largest / (norm + 1e-8), torch.ones_like(norm))
            norm = torch.minimum(norm, largest)
        state["norm"] = norm
        return update_sl
