"""What each rank reads of a model's files, and how ranks put together on their devices what they need whole.

Stages, strips of layers and experts are read by the ranks that have them, straight to their devices; so are the rows of
weights that ranks share (zero3 and its kin) as the files have them. Weights that become something else first (nf4, a
matmul with an adapter, strips in shards) are exchanged between the devices once each rank has read its rows: a layer
is whole for a moment. The files are read once by all ranks together, and the host holds a few tensors at a time.

  one weight, 4 ranks           read by the ranks               on each device for a moment    kept
    zero3                       rows 0/4, 1/4, 2/4, 3/4                                        the same rows
    zero3, under an adapter     rows 0/4, 1/4, 2/4, 3/4         the whole weight               a quarter of it, joined
    tensor 2 x shard 2          rows 0/2 and 1/2 of strip 0,    the strip                      half of its strip
                                0/2 and 1/2 of strip 1

Weights that every rank holds whole (ddp, zero1, zero2) are read by each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tunesmith.model.experts import experts_of_layers
from tunesmith.model.files import Block, own_copy
from tunesmith.model.finite import Finite
from tunesmith.model.quantized import Reading
from tunesmith.model.source import WeightSource
from tunesmith.model.structure import linears_of_layers
from tunesmith.optim.fused import spread
from tunesmith.parallel.collectives import gather_rows, group_of
from tunesmith.parallel.mesh import data_mesh
from tunesmith.parallel.shard import has_rows, is_sharded, rows_of
from tunesmith.parallel.tensor import TensorParallelPlan, as_part
from tunesmith.plan.plan import Plan


@dataclass(frozen=True)
class SharedReading(Reading):
    """What ranks read of tensors that they need together, and how they put them together on their devices."""

    cuts: Mapping[str, tuple[int, DeviceMesh]]
    """Tensors of which a rank keeps a part only: along which dimension, over which ranks."""
    joined: Mapping[str, Sequence[DeviceMesh]]
    """Tensors whose rows are shared out over these ranks, one mesh after the other, unless as `otherwise`."""
    otherwise: Sequence[DeviceMesh]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        world: DeviceMesh,
        split: TensorParallelPlan | None,
        experts: Mapping[str, nn.Module],
    ) -> SharedReading:
        sharers = [world["shard"]] if is_sharded(plan) and world["shard"].size() > 1 else []
        cuts, joined = {}, {}
        if split is not None:
            cuts = {name: (dim, split.mesh) for name, dim in split.dims(model).items()}
            for name in linears_of_layers(model) if plan.storage != "plain" else []:
                joined[f"{name}.weight"] = [split.mesh, *sharers]  # quantized as a whole, and cut then
                cuts.pop(f"{name}.weight", None)
        for name, stack in experts.items():
            for leaf, _ in stack.named_parameters(recurse=False):
                if plan.storage != "plain":
                    joined[f"{name}.{leaf}"] = [data_mesh(world)]  # quantized as a whole, and cut then
                else:
                    cuts[f"{name}.{leaf}"], joined[f"{name}.{leaf}"] = (0, data_mesh(world)), []
        return cls(cuts, joined, sharers)

    def part(self, name: str, shape: tuple[int, ...]) -> Block:
        block = [slice(0, size) for size in shape]
        if name in self.cuts:
            dim, mesh = self.cuts[name]
            block[dim] = _own(block[dim], mesh)
        for mesh in self._sharers(name, shape):
            block[0] = _own(block[0], mesh)
        return () if block == [slice(0, size) for size in shape] else tuple(block)

    def assemble(self, name: str, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        dim, mesh = self.cuts.get(name, (None, None))
        rows, shared = slice(0, shape[0] if shape else 0), []
        rows = _own(rows, mesh) if dim == 0 else rows
        for sharers in self._sharers(name, shape):
            shared.append((rows, sharers))
            rows = _own(rows, sharers)
        tensor = part
        for rows, sharers in reversed(shared):
            tensor = _joined(tensor, rows.stop - rows.start, sharers)
        if dim is None:
            return tensor
        tensor = own_copy(part) if tensor is part else tensor  # not the mapped file itself
        return as_part(tensor, dim, mesh, shape)

    def _sharers(self, name: str, shape: tuple[int, ...]) -> Sequence[DeviceMesh]:
        """Vectors are small: everybody reads them."""
        return self.joined.get(name, self.otherwise) if len(shape) > 1 else ()


def shared_as_they_are(model: nn.Module, plan: Plan, targets: Sequence[str], reading: SharedReading) -> set[str]:
    """Weights of which a rank will hold rows just as they are in the files: read once their unit is sharded."""
    if plan.mesh.tensor > 1 or not is_sharded(plan):
        return set()
    changed = set(targets)
    if plan.storage != "plain":
        changed |= linears_of_layers(model).keys() | experts_of_layers(model).keys()
    names = {name for name, weight in model.named_parameters() if has_rows(weight)}
    names = {name for name in names if name.rpartition(".")[0] not in changed}
    return names - reading.cuts.keys()


def read_rows(
    source: WeightSource, weights: Mapping[str, nn.Parameter], device: torch.device
) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's rows of sharded weights."""

    def rows(name: str, _: tuple[int, ...]) -> Block:
        return (slice(*rows_of(weights[name])),)

    own_rows = {}
    finite = Finite(next(iter(weights.values())).dtype if weights else torch.float32)
    for name, part, _ in source.read(weights.keys(), pin=device.type == "cuda", part=rows, codes={}):
        finite.look(name, part)
        local = part.to(device, weights[name].dtype, non_blocking=True)
        # On a CPU not the mapped file itself.
        own_rows[weights[name]] = own_copy(local) if device.type == "cpu" else local
    finite.say(source.files)
    return own_rows


def put_rows(unit: nn.Module, rows: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Have sharded weights of a unit hold these."""
    known = {old: nn.Parameter(spread(new, old, old.shape), old.requires_grad) for old, new in rows.items()}
    for module in unit.modules():  # a weight may be tied
        for leaf, weight in module._parameters.items():
            if weight is not None and weight in known:
                module._parameters[leaf] = known[weight]


def _own(span: slice, mesh: DeviceMesh) -> slice:
    """This rank's part of a range: all of equal size but for the last ones."""
    each = -(-(span.stop - span.start) // mesh.size())
    start = min(span.stop, span.start + each * mesh.get_local_rank())
    return slice(start, min(span.stop, start + each))


def _joined(part: torch.Tensor, rows: int, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of all ranks of the mesh, of which each has those that `_own` says."""
    each = -(-rows // mesh.size())
    flat = part.reshape(part.shape[0], math.prod(part.shape[1:])).contiguous().view(torch.uint8)
    if part.shape[0] < each:
        flat = F.pad(flat, (0, 0, 0, each - part.shape[0]))
    flat = gather_rows(flat, group_of(mesh))
    return flat[:rows].view(part.dtype).view(rows, *part.shape[1:])
