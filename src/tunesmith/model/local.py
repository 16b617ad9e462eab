"""Weights of which a rank holds a part only: matmuls use that part."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that is here; its gradient belongs to the weight again."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
