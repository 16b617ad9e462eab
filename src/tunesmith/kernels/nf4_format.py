"""How a weight lies in nf4 (`nf4.py`): its parts within one tensor of bytes, and the numbers that codes stand for."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

BLOCK = 64
NESTED = 256
ALIGNED = 16
"""Every part starts at a multiple of so many bytes."""
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, with an exact zero (QLoRA, appendix E)."""


class Parts(NamedTuple):
    """Views into a weight held in nf4."""

    nested: torch.Tensor
    """float32: scales of the scales"""
    offset: torch.Tensor
    """float32 [1]: the mean scale"""
    scales: torch.Tensor
    """uint8: the code of each block's scale"""
    packed: torch.Tensor
    """uint8: two weights a byte, the first in the upper half"""


def split(weight4: torch.Tensor, count: int, per_nested: int = NESTED) -> Parts:
    """The parts of one weight of `count` elements, of which so many blocks share a scale of scales."""
    blocks = -(-count // BLOCK)
    nested = -(-blocks // per_nested)
    scales_at = _aligned(4 * nested + 4)
    packed_at = scales_at + _aligned(blocks)
    numbers = weight4[: 4 * nested + 4].view(torch.float32)
    return Parts(
        nested=numbers[:nested],
        offset=numbers[nested:],
        scales=weight4[scales_at : scales_at + blocks],
        packed=weight4[packed_at : packed_at + -(-count // 2)],
    )


def size(count: int, per_nested: int = NESTED) -> int:
    """Bytes that hold `count` weights."""
    blocks = -(-count // BLOCK)
    return _aligned(4 * -(-blocks // per_nested) + 4) + _aligned(blocks) + _aligned(-(-count // 2))


@cache
def values(device: torch.device) -> torch.Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def scale_values(device: torch.device) -> torch.Tensor:
    """The 256 numbers a scale's code stands for: seven decades on either side of zero, denser towards one."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2
        found += (10 ** (decade - 6) * means).tolist()
        found += (-(10 ** (decade - 6)) * means).tolist()
    return torch.tensor(sorted(found), dtype=torch.float32).to(device)


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
