"""Quantized collectives of FSDP2, after ZeRO++: quantized all-gather of weights in int8 (qwZ), quantized reduce-scatter
of gradients in int8 or int4 (qgZ).

Matrices travel in blocks with an fp32 scale each; vectors (norms, biases), which are few and each of which touches
every token, travel as they are. A value is off by at most half a step of its block:

          values of a block   bytes a value   at most, of the block's largest   usual values, root mean square
  int8    128                 1.03            1/254                             0.6%
  int4    64                  0.56            1/14                              11%

Rounding is to the nearest: the same bits every time, and half the worst error of stochastic rounding, which would be
for sums of many roundings. There are none: a value is rounded once on its whole way, sums are made in fp32, and what a
rank has itself it adds as it is.

Where the mesh has nodes, little goes between them:

  gather   shard -> rounded -> ranks of the same place in the other nodes -> ranks of the node -> weights
  reduce   gradients -> fp32 sums within the node -> rounded -> ranks of the same place in the other nodes -> fp32 sums

Gathers within a node, of the copy that hierarchical sharding keeps there, are exact: the backward pass has the weights
of the forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tunesmith.errors import UserError
from tunesmith.plan.plan import TrafficDtype

BITS = {"int8": 8, "int4": 4}
BLOCK = {"int8": 128, "int4": 64}
"""Values that share a scale."""
SMALLEST_SCALE = 1e-38
ALIGNMENT = 16


@dataclass(frozen=True)
class Nodes:
    """The groups of a rank where ranks lie in nodes: its node's, and that of the ranks with its place in each node."""

    within: dist.ProcessGroup
    between: dist.ProcessGroup


def quantize_collectives(
    unit: nn.Module,
    weights: Sequence[torch.Size],
    ranks: int,
    nodes: Nodes | None,
    *,
    quantized_all_gather: TrafficDtype,
    quantized_reduce_scatter: TrafficDtype,
) -> None:
    """Let an FSDP unit with weights of these shapes, over so many ranks, gather or reduce them in fewer bits."""
    assert isinstance(unit, FSDPModule)
    if not hasattr(unit, "set_custom_all_gather") or not hasattr(unit, "set_custom_reduce_scatter"):
        raise UserError(
            f"The plan sends weights or gradients in 8 or 4 bits, which torch {torch.__version__} has no place for; "
            "install torch 2.13, or use a plan whose quantized_all_gather and quantized_reduce_scatter are plain."
        )
    pieces = [(len(shape) > 1, -(-shape[0] // ranks) * shape[1:].numel()) for shape in weights]
    if quantized_all_gather != "plain":
        unit.set_custom_all_gather(QuantizedGather(Packing(pieces, quantized_all_gather), ranks, nodes))
    if quantized_reduce_scatter != "plain":
        unit.set_custom_reduce_scatter(QuantizedReduce(Packing(pieces, quantized_reduce_scatter), nodes))


class Packing:
    """Between a flat shard and its bytes between ranks: scales, what travels as it is, values of 8 or 4 bits.

    `pieces` says of each weight in the shard whether it is a matrix, and its length. A shard of another length, which
    has some of these weights only, is taken for one matrix.
    """

    def __init__(self, pieces: Sequence[tuple[bool, int]], dtype: TrafficDtype):
        self.bits, self.block = BITS[dtype], BLOCK[dtype]
        self.zero = 2 ** (self.bits - 1)  # as a code between ranks; values reach so many steps, less one, either way
        self.length = sum(length for _, length in pieces)
        self.runs = [
            (is_matrix, sum(length for _, length in run))
            for is_matrix, run in itertools.groupby(pieces, lambda p: p[0])
        ]

    def bytes(self, length: int, dtype: torch.dtype) -> int:
        """Of a packed shard of so many values."""
        return -(-sum(self._sizes(length, dtype)) // ALIGNMENT) * ALIGNMENT

    def pack(self, flat: torch.Tensor, packed: torch.Tensor) -> None:
        matrices, rest = self._parts(flat)
        scales, plain, values = self._sections(packed, flat.numel(), flat.dtype)
        plain.copy_(torch.cat(rest) if rest else flat[:0])
        if not matrices:
            return
        together = torch.cat(matrices).float()
        blocks = nn.functional.pad(together, (0, -together.numel() % self.block)).view(-1, self.block)
        scales.copy_(blocks.abs().amax(1) / (self.zero - 1))
        steps = (blocks / scales.clamp_min(SMALLEST_SCALE)[:, None]).round_()
        codes = (steps + self.zero).to(torch.uint8)
        if self.bits == 4:  # two in a byte: one of the first half of a block, and one of the other
            first, second = codes.chunk(2, 1)
            codes = first | second << 4
        values.copy_(codes)

    def unpack(self, packed: torch.Tensor, flat: torch.Tensor, *, add: bool = False) -> None:
        """Write what was packed to `flat`, or add it to what is there."""
        matrices, rest = self._parts(flat)
        scales, plain, values = self._sections(packed, flat.numel(), flat.dtype)
        codes = values if self.bits == 8 else torch.cat([values & 15, values >> 4], 1)
        together = ((codes.float() - self.zero) * scales[:, None]).view(-1)
        together = together[: sum(part.numel() for part in matrices)]
        for parts, source in ((matrices, together), (rest, plain)):
            for target, part in zip(parts, source.split([part.numel() for part in parts]), strict=True):
                if add:
                    target += part
                else:
                    target.copy_(part)

    def _lengths(self, length: int) -> tuple[int, int]:
        if length != self.length:
            return length, 0
        matrices = sum(size for is_matrix, size in self.runs if is_matrix)
        return matrices, length - matrices

    def _parts(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the matrices, and of the rest."""
        if flat.numel() != self.length:
            return [flat], []
        parts = flat.split([size for _, size in self.runs])
        is_matrix = [kind for kind, _ in self.runs]
        return (
            list(itertools.compress(parts, is_matrix)),
            list(itertools.compress(parts, (not kind for kind in is_matrix))),
        )

    def _sections(
        self, packed: torch.Tensor, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self._sizes(length, dtype)
        scales, plain, values, _ = packed.split([*sizes, packed.numel() - sum(sizes)])
        return scales.view(torch.float32), plain.view(dtype), values.view(-1, self.block * self.bits // 8)

    def _sizes(self, length: int, dtype: torch.dtype) -> list[int]:
        matrices, rest = self._lengths(length)
        blocks = -(-matrices // self.block)
        return [4 * blocks, rest * dtype.itemsize, blocks * self.block * self.bits // 8]


class _Comm:
    """FSDP asks its collectives for their memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedGather(_Comm):
    """Every rank has the same weights afterwards, its own shard included: rounded like the others' copies of it."""

    def __init__(self, packing: Packing, ranks: int, nodes: Nodes | None):
        self.packing, self.ranks, self.nodes = packing, ranks, nodes

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if group.size() != self.ranks:  # the ranks of a node, from the copy they keep
            return _all_gather(output_tensor, input_tensor, group, async_op)
        size = self.packing.bytes(input_tensor.numel(), input_tensor.dtype)
        own = input_tensor.new_zeros(size, dtype=torch.uint8)
        self.packing.pack(input_tensor, own)
        if self.nodes is None:
            shards = _gathered(own, group).view(-1, size)
        else:
            by_place = _gathered(_gathered(own, self.nodes.between), self.nodes.within)
            shards = by_place.view(self.nodes.within.size(), -1, size).transpose(0, 1).flatten(0, 1)
        for packed, flat in zip(shards, output_tensor.view(self.ranks, -1), strict=True):
            self.packing.unpack(packed, flat)
        return None


class QuantizedReduce(_Comm):
    """Sums of gradients: each rank is sent the others' parts of its shard, and adds them up in fp32."""

    def __init__(self, packing: Packing, nodes: Nodes | None):
        self.packing, self.nodes = packing, nodes

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        assert not async_op
        parts = input_tensor.view(group.size(), -1)
        if self.nodes is not None:
            parts = _reduced(parts, self.nodes.within)
            group = self.nodes.between
        size = self.packing.bytes(output_tensor.numel(), output_tensor.dtype)
        sent = parts.new_zeros(group.size(), size, dtype=torch.uint8)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        for rank in others:
            self.packing.pack(parts[rank], sent[rank])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(parts[group.rank()])
        for rank in others:
            self.packing.unpack(received[rank], output_tensor, add=True)


def _gathered(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    everyone = own.new_empty(group.size() * own.numel())
    _all_gather(everyone, own, group)
    return everyone


def _reduced(parts: torch.Tensor, node: dist.ProcessGroup) -> torch.Tensor:
    """A node's sums of the parts that are for ranks of this rank's place, one for each node. Parts are in the order of
    the ranks, node by node."""
    by_place = parts.view(-1, node.size(), parts.shape[1]).transpose(0, 1).contiguous()
    sums = torch.empty_like(by_place[0])
    reduce_scatter = dist.reduce_scatter_single if _HAS_SINGLE else dist.reduce_scatter_tensor
    reduce_scatter(sums.view(-1), by_place.view(-1), group=node)
    return sums


def _all_gather(
    output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    gather = dist.all_gather_single if _HAS_SINGLE else dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)


_HAS_SINGLE = hasattr(dist, "all_gather_single")
"""torch 2.13 has new names for collectives, and warns of the old ones, which are the only ones in 2.11."""
