"""What a gated MLP does with its gate: `curve(gate) * up`, as the field's models have it.

One form holds them all: gate and up may be clamped first, and up shifted.

    gate' = min(gate, limit)    up' = clamp(up, -limit, limit) + shift
    gate' * sigmoid(slope * gate') * up'                            SwiGLU; gpt-oss with 1.702, 7 and 1
    gelu(gate') * up'               with the error function, or its approximation by tanh (GeGLU)

Operators take a gating as its text: a string is a constant to compilers, numbers may become symbols.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Curve = Literal["sigmoid", "erf", "tanh"]
CURVES: tuple[Curve, ...] = ("sigmoid", "erf", "tanh")
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


class Gating(NamedTuple):
    curve: Curve
    slope: float = 1.0
    """Of the sigmoid."""
    limit: float = 0.0
    """Of the clamp; 0: there is none."""
    shift: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.curve} {self.slope!r} {self.limit!r} {self.shift!r}"

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        up = up + self.shift if self.shift else up
        if self.curve == "sigmoid":
            return (F.silu(gate) if self.slope == 1.0 else gate * torch.sigmoid(self.slope * gate)) * up
        return F.gelu(gate, approximate="tanh" if self.curve == "tanh" else "none") * up

    def with_derivatives(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The activation, and its derivatives by gate and by up."""
        x, y = gate, up
        if self.limit:
            x, y = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        y = y + self.shift
        if self.curve == "sigmoid":
            share = torch.sigmoid(self.slope * x)
            steepness = share * (1.0 + self.slope * x * (1.0 - share))
        elif self.curve == "erf":
            share = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
            steepness = share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        else:  # half of 1 + tanh(u) is sigmoid(2u)
            share = torch.sigmoid(2 * TANH_SCALE * (x + TANH_CUBE * x * x * x))
            steepness = share + 2 * TANH_SCALE * x * share * (1.0 - share) * (1.0 + 3 * TANH_CUBE * x * x)
        by_gate, by_up = steepness * y, x * share
        if self.limit:  # what was clamped gets no gradient
            by_gate = by_gate * (gate <= self.limit)
            by_up = by_up * (up.abs() <= self.limit)
        return x * share * y, by_gate, by_up


SILU, GELU, GELU_TANH = Gating("sigmoid"), Gating("erf"), Gating("tanh")


def gating_of(text: str) -> Gating:
    curve, *numbers = text.split(" ")
    assert curve in CURVES
    return Gating(curve, *map(float, numbers))
