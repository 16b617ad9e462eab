"""How the states of an optimizer are held, for `update.py`, which says what the formats are, and its kernel."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Literal

import torch

States = Literal["fp32", "bf16", "int8", "fp8", "int4"]
Algorithm = Literal["adamw", "lion"]
State = MutableMapping[str, torch.Tensor]
BLOCK = {"int8": 256, "fp8": 256, "int4": 128}
FP8_LARGEST = 448.0
FP8_SMALLEST = 2.0**-9


def new_state(
    weight: torch.Tensor, algorithm: Algorithm, states: States, *, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """The state before the first step, on `device` or beside `weight`."""
    device = weight.device if device is None else device
    kind = format_of(weight, states)
    names = ("exp_avg",) if algorithm == "lion" else ("exp_avg", "root")
    if kind in ("fp32", "bf16"):
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        return {name: torch.zeros(weight.shape, dtype=dtype, device=device) for name in names}
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    state = {}
    for name in names:
        width = columns // 2 if kind == "int4" else columns
        state[name] = torch.zeros(rows, width, dtype=torch.uint8, device=device)
        state[f"{name}_scale"] = torch.zeros(rows, -(-columns // BLOCK[kind]), device=device)
    return state


def format_of(weight: torch.Tensor, states: States) -> States:
    """How the states of `weight` are really held: in blocks only where its rows have one."""
    if states not in BLOCK:
        return states
    columns = math.prod(weight.shape[1:]) if weight.ndim >= 2 else 0
    return states if columns >= BLOCK[states] and columns % 2 == 0 else "fp32"
