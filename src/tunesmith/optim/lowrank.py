"""GaLore and APOLLO: full-parameter training with AdamW's states in a space of low rank.

Both see the gradient of each matrix through a projection of its shorter side, and keep AdamW's two moments of that
alone. GaLore (arXiv 2403.03507) projects onto the gradient's largest singular directions, found anew every `EVERY`
steps, and brings AdamW's step back from there: what lies outside is not learned until the directions change. APOLLO
(arXiv 2412.05270) projects at random, and takes from the low-rank step only how much each channel of the gradient is
to be scaled: the update has full rank. Vectors, the embedding and the output head are AdamW's (`optim.build`).

A model has hundreds of matrices, and their small ones go through each operation of AdamW together; of the large ones
there is a matmul into the small space, and one pass that updates the weight.

Legend: S shorter side, L longer side, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from tunesmith.kernels.directions import right_directions
from tunesmith.plan.model_states import projected_rank

EVERY = 200
"""Steps between two projections."""
GALORE_SCALE = 0.25
"""Of GaLore's updates, as its authors have it."""
GROWTH = 1.01
"""APOLLO: from one step to the next an update's norm grows no more than so many times, which keeps early steps calm."""
TOGETHER = 4
"""Times the values of the largest matrix that are updated at once. What exists of them besides is at most three
quarters of that, in fp32."""


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
            for weights in self._together([weight for weight in group["params"] if weight.grad is not None]):
                self._update(weights, group)

    def _together(self, weights: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Weights that have had as many steps, as many as are updated at once."""
        most = TOGETHER * max((weight.numel() for weight in weights), default=0)
        by_steps: dict[int, list[torch.Tensor]] = {}
        for weight in weights:
            if not self.state[weight]:
                self._begin(weight)
            by_steps.setdefault(int(self.state[weight]["step"].item()), []).append(weight)
        for same in by_steps.values():
            some: list[torch.Tensor] = []
            for weight in same:
                if some and sum(one.numel() for one in some) + weight.numel() > most:
                    yield some
                    some = []
                some.append(weight)
            yield some

    def _begin(self, weight: torch.Tensor) -> None:
        short, long = sorted(weight.shape)
        self.state[weight]["step"] = torch.zeros((), dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[weight][name] = torch.zeros(projected_rank(self.kind, short), long, device=weight.device)

    def _update(self, weights: list[torch.Tensor], group: dict) -> None:
        states = [self.state[weight] for weight in weights]
        done = int(states[0]["step"].item())
        low_rl = [self.project(weight, state, done) for weight, state in zip(weights, states, strict=True)]
        first, second = group["betas"]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, low_rl, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, low_rl, low_rl, 1 - second)
        roots = torch._foreach_sqrt(squares)
        correction = math.sqrt(1 - second ** (done + 1))
        torch._foreach_add_(roots, group["eps"] * correction)
        adam_rl = torch._foreach_div(means, roots)
        del roots
        torch._foreach_mul_(adam_rl, correction / (1 - first ** (done + 1)))
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        self.apply(weights, states, low_rl, adam_rl, group["lr"])
        for state in states:
            state["step"] += 1

    def project(self, weight: torch.Tensor, state: dict, done: int) -> torch.Tensor:
        """The gradient in the small space [R, L], when so many steps are done."""
        raise NotImplementedError

    def apply(
        self,
        weights: list[torch.Tensor],
        states: list[dict],
        low_rl: list[torch.Tensor],
        adam_rl: list[torch.Tensor],
        rate: float,
    ) -> None:
        """Update weights, from AdamW's steps in the small space."""
        raise NotImplementedError


class GaLore(LowRank):
    kind = "galore"

    def project(self, weight: torch.Tensor, state: dict, done: int) -> torch.Tensor:
        gradient_sl = _wide(weight, weight.grad)
        if done % EVERY == 0 or "projection" not in state:
            rank = len(state["exp_avg"])
            generator = _generator(self.seed, self.numbers[weight], done // EVERY)
            state["projection"] = right_directions(gradient_sl.t(), rank, generator).t().contiguous()
        return state["projection"].t() @ gradient_sl

    def apply(self, weights, states, low_rl, adam_rl, rate) -> None:
        for weight, state, step_rl in zip(weights, states, adam_rl, strict=True):
            _wide(weight, weight).addmm_(state["projection"], step_rl, alpha=-rate * GALORE_SCALE)


class Apollo(LowRank):
    kind = "apollo"

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self._drawn: dict[tuple[int, int, torch.device], tuple[int, torch.Tensor]] = {}

    def project(self, weight: torch.Tensor, state: dict, done: int) -> torch.Tensor:
        gradient_sl = _wide(weight, weight.grad)
        return self._projection(len(state["exp_avg"]), gradient_sl, done // EVERY) @ gradient_sl

    def _projection(self, rank: int, gradient_sl: torch.Tensor, interval: int) -> torch.Tensor:
        """The random matrix [R, S] of an interval, one for all weights with these sides: it says nothing about any of
        them, and is so small that it can be kept. Drawn on the host, so that it is the same on every device."""
        key = (rank, len(gradient_sl), gradient_sl.device)
        if key not in self._drawn or self._drawn[key][0] != interval:
            generator = _generator(self.seed, 0, interval)
            drawn_rs = torch.randn(rank, len(gradient_sl), generator=generator) / math.sqrt(rank)
            self._drawn[key] = interval, drawn_rs.to(gradient_sl.device)
        return self._drawn[key][1]

    def apply(self, weights, states, low_rl, adam_rl, rate) -> None:
        """The norm of an update is that of its channels' norms, so that it need not exist before it is scaled."""
        gradients_sl = [_wide(weight, weight.grad) for weight in weights]
        scales_l = torch._foreach_div([one.norm(dim=0) for one in adam_rl], [one.norm(dim=0) + 1e-8 for one in low_rl])
        channels_l = [one.norm(dim=0) for one in gradients_sl]
        norms = torch.stack(torch._foreach_norm(torch._foreach_mul(scales_l, channels_l)))
        unbounded = norms.new_full((), math.inf)
        largest = torch.stack([GROWTH * state["norm"].to(norms) if "norm" in state else unbounded for state in states])
        factors = torch.where(norms > largest, largest / (norms + 1e-8), 1.0)
        for state, norm in zip(states, torch.minimum(norms, largest).unbind(), strict=True):
            state["norm"] = norm.clone()
        torch._foreach_mul_(scales_l, list(factors.unbind()))
        for weight, gradient_sl, scale_l in zip(weights, gradients_sl, scales_l, strict=True):
            _wide(weight, weight).addcmul_(gradient_sl, scale_l, value=-rate)


def _wide(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A view [S, L] of what has the weight's shape."""
    return values.t() if weight.shape[0] > weight.shape[1] else values


def _generator(seed: int, number: int, interval: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number * 7919 + interval) % 2**63)
