"""Rows gathered over a group of ranks, and rows summed and dealt out: each is the other's gradient.

Operators with shapes known to the compiler, so that they sit inside compiled and checkpointed layers without a break.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from tunesmith.kernels.operator import operator

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Group(NamedTuple):
    """Ranks that exchange rows; words and numbers alone, so that compiled code can hold it."""

    name: str
    size: int


def group_of(mesh: DeviceMesh) -> Group:
    return Group(mesh.get_group().group_name, mesh.size())


def gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[rows, ...] of each rank of the group, one below the other, on all of them."""
    return _gather(x, group.size, group.name)


def scatter_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[ranks * rows, ...] summed over the ranks of the group, of which each gets its [rows, ...]."""
    return _scatter(x, group.size, group.name)


@operator("gather_rows")
def _gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    rows = x.new_empty(x.shape[0] * size, *x.shape[1:])
    _all_gather(rows, x.contiguous(), group=_resolve_process_group(group))
    return rows


@torch.library.register_fake(_gather)
def _(x, size, group):
    return x.new_empty(x.shape[0] * size, *x.shape[1:])


@operator("scatter_rows")
def _scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    rows = x.new_empty(x.shape[0] // size, *x.shape[1:])
    _reduce_scatter(rows, x.contiguous(), group=_resolve_process_group(group))
    return rows


@torch.library.register_fake(_scatter)
def _(x, size, group):
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _save(ctx, inputs, output):
    _, ctx.size, ctx.group = inputs


torch.library.register_autograd(
    _gather, lambda ctx, g: (_scatter(g, ctx.size, ctx.group), None, None), setup_context=_save
)
torch.library.register_autograd(
    _scatter, lambda ctx, g: (_gather(g, ctx.size, ctx.group), None, None), setup_context=_save
)
