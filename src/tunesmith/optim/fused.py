"""AdamW and Lion with states in any of the formats of `kernels.update`, one kernel a parameter and nothing beside it.

Trained weights in bf16 are rounded at random (the mean is exact), drawn from (seed, step, parameter), so that a step is
a function of what stood before it and a resumed run goes on bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tunesmith.kernels.update import Algorithm, States, new_state, update_


class Fused(torch.optim.Optimizer):
    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        algorithm: Algorithm,
        states: States,
        betas: tuple[float, float],
        epsilon: float,
        seed: int,
        copies: Mapping[nn.Parameter, torch.Tensor],
    ):
        """`copies`: the model's own weight for each master, written in the same pass."""
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": epsilon})
        self.algorithm: Algorithm = algorithm
        self.states: States = states
        self.seed = seed
        self.copies = copies
        everything = [weight for group in self.param_groups for weight in group["params"]]
        self.numbers = {weight: number for number, weight in enumerate(everything)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)

    def update(self, weight: nn.Parameter, group: Mapping[str, Any]) -> None:
        """One parameter's step, from its gradient."""
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state.update(new_state(weight, self.algorithm, self.states))
        state["step"] += 1
        step = int(state["step"])
        update_(
            weight.detach(),
            weight.grad,
            state,
            algorithm=self.algorithm,
            states=self.states,
            rate=group["lr"],
            decay=group["weight_decay"],
            betas=group["betas"],
            epsilon=group["eps"],
            step=step,
            seed=_draw(self.seed, step, self.numbers[weight]),
            copy=self.copies.get(weight),
        )

    def fits(self, weight: nn.Parameter, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether these values, read from a checkpoint, are a state of this weight."""
        expected = new_state(torch.empty_like(weight, device="meta"), self.algorithm, self.states)
        expected["step"] = torch.empty((), device="meta")
        return values.keys() == expected.keys() and all(
            (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype) for name, value in values.items()
        )


def _draw(seed: int, step: int, number: int) -> int:
    """31 bits for a parameter's step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{number}".encode()).digest()[:4], "big") >> 1
