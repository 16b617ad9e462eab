"""The work of layers that run as they are, operator by operator, without a compiler: bytes passed over, operations of
matmuls, and kernels started, counted while a layer is called.

Every operator that makes a tensor reads what it is given and writes what it gives. A matmul that takes longer to
compute than to read counts by its operations, others by their bytes. What grows with the number of tokens is told from
what does not (weights that a method of peft makes anew in each pass).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.plan.facts import Work

MATMULS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""The place of the first factor among the arguments."""
NOTHING = {"detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}
NOTHING |= {"new_empty_strided", "_reshape_alias", "_local_scalar_dense", "view_as_real"}
PARTLY = {"block_diag"}
"""These start a kernel for each tensor that they are given."""
INTENSITY = {2: 100, 4: 12, 8: 6}
"""Operations for each byte, by the width of a value, above which GPUs compute for longer than they read."""


@dataclass
class Tally(TorchDispatchMode):
    """Sums of all that is called while it is entered. `is_of_tokens` says so of a shape."""

    is_of_tokens: Callable[[torch.Size], bool]
    tokens: int
    left_out: tuple[str, ...] = ()
    """Operators whose work is known otherwise."""
    part: int = 1
    """Widths are such a part of the model's: matmuls at its own have so many times the operations for each byte."""
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name in NOTHING or name in self.left_out):
            self._add(name, args, [*_tensors((args, kwargs or {}))], [*_tensors(result)])
        return result

    def work(self) -> Work:
        pairs = {
            name: (self.sums.get(f"{name}, of tokens", 0.0) / self.tokens, self.sums.get(name, 0.0))
            for name in ("bytes", "half", "full")
        }
        return Work(**pairs, kernels=round(self.sums.get("kernels", 0.0)))

    def _add(self, name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        if not made:
            return
        self._sum("kernels", len(given) if name in PARTLY else 1)
        moved = [*{_key(one): one for one in given}.values(), *made]
        if name in MATMULS and self._is_computed(*(factors := args[MATMULS[name] :][:2]), moved):
            part = "half" if factors[0].element_size() == 2 else "full"
            is_of_tokens = any(self.is_of_tokens(one.shape) for one in factors)
            self._sum(f"{part}, of tokens" if is_of_tokens else part, _operations(*factors))
            return
        for one in moved:
            self._sum("bytes, of tokens" if self.is_of_tokens(one.shape) else "bytes", _size(one))

    def _is_computed(self, first: torch.Tensor, second: torch.Tensor, moved: list[torch.Tensor]) -> bool:
        """Whether a matmul takes longer than what it reads and writes."""
        least = INTENSITY[first.element_size()] * sum(_size(one) for one in moved)
        return self.part * _operations(first, second) > least

    def _sum(self, name: str, size: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + size


def _operations(first: torch.Tensor, second: torch.Tensor) -> int:
    return 2 * math.prod(first.shape) * second.shape[-1]


def _size(tensor: torch.Tensor) -> int:
    """Bytes that lie in memory: what is expanded lies there once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    """The same for views of the same memory, which may have no data."""
    return tensor.untyped_storage()._cdata


def _key(tensor: torch.Tensor) -> Any:
    return storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
