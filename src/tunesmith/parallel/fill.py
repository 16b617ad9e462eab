"""A model over several ranks, read from its files layer by layer: a rank reads what it will hold, and no more.

Stages, strips of layers and experts are read by the ranks that have them, straight to their devices; so are the rows of
weights that ranks share (zero3 and its kin) as the files have them. Weights that become something else first (nf4, a
product with an adapter, strips in shards) are exchanged between the devices once each rank has read its rows: a layer
is whole for a moment, is quantized as by one process, given its adapters and sharded before the next one is read. The
files are read once by all ranks together, and the host holds a few tensors at a time.

  one weight, 4 ranks           read by the ranks               on each device for a moment    kept
    zero3                       rows 0/4, 1/4, 2/4, 3/4                                        the same rows
    zero3, under an adapter     rows 0/4, 1/4, 2/4, 3/4         the whole weight               a quarter of it, joined
    tensor 2 x shard 2          rows 0/2 and 1/2 of strip 0,    the strip                      half of its strip
                                0/2 and 1/2 of strip 1

Weights that every rank holds whole (ddp, zero1, zero2) are read by `model.load`, as in one process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import load, lora, quantized
from tunesmith.model.content import Content
from tunesmith.model.experts import experts_of_layers
from tunesmith.model.files import Block, Held, alone, read_ahead
from tunesmith.model.finite import Finite
from tunesmith.model.fp8 import use_fp8_products
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import make_activations_again
from tunesmith.model.rotary import rotate_in_kernels
from tunesmith.optim.fused import spread
from tunesmith.parallel.apply import decoder_layers
from tunesmith.parallel.collectives import gather_rows, group_of
from tunesmith.parallel.expert import find_experts, spread_experts
from tunesmith.parallel.mesh import data_mesh, world_mesh
from tunesmith.parallel.pipeline import Pipelined, cut
from tunesmith.parallel.shard import KEEPS_WHOLE, rows_of, shard
from tunesmith.parallel.tensor import Split, as_part
from tunesmith.plan.plan import Plan


@dataclass(frozen=True)
class Loaded:
    """A trainable model whose layers are not wrapped yet."""

    model: nn.Module
    called: nn.Module
    """What is to be called: the model, or what stands before its shards or stages."""
    layers: list[nn.Module]
    """Those that are on this rank."""


def lies_in_parts(plan: Plan) -> bool:
    """Whether no rank has the whole model."""
    is_cut = plan.mesh.tensor * plan.mesh.pipeline * plan.mesh.expert > 1
    return is_cut or plan.sharding not in ("none", *KEEPS_WHOLE)


def load_in_parts(
    run: Run, plan: Plan, device: torch.device, content: Content | None = None, *, can_fuse: bool = True
) -> Loaded | None:
    """None where the files hold the model in other ways than it is built, so that it must be loaded whole first. What
    this rank reads is hashed into `content`."""
    sizes = plan.mesh
    model, folder = load.load_empty(run, dtype=plan.precision)
    files = quantized.files_of(model, folder)
    if files is None:
        return None
    targets = lora.find_targets(model, run.lora) if run.has_adapters else []
    if run.has_adapters:  # what will be trained; by this, stages without any are found
        model.requires_grad_(False)
        for name in targets:
            model.get_submodule(name).requires_grad_(True)
    world = world_mesh(plan)
    stages = cut(model, plan, world.get_local_rank("pipeline")) if sizes.pipeline > 1 else None
    layers = decoder_layers(model) if stages is None else stages.layers
    split = Split.of(model, world) if sizes.tensor > 1 else None
    experts = find_experts(model, sizes.expert) if sizes.expert > 1 else {}
    reading = _reading_together(model, plan, world, split, experts)
    names = {name for name, _ in model.named_modules()} | model.state_dict().keys()
    files = {name: held for name, held in files.items() if name in names}
    targets = [name for name in targets if name in names]
    prefixes = {layer: f"{name}." for name, layer in model.named_modules() if layer in set(layers)}
    is_sharded = plan.sharding not in ("none", *KEEPS_WHOLE)
    later = _shared_as_they_are(model, plan, targets, reading) if is_sharded else set()
    dtype = getattr(torch, load.DTYPES[plan.precision])
    reads = {"reading": reading, "content": content}

    def belongs(unit: nn.Module, name: str) -> bool:
        if within := prefixes.get(unit, ""):
            return name.startswith(within)
        return not name.startswith(tuple(prefixes.values()))

    def weights_of(unit: nn.Module) -> list[tuple[str, nn.Parameter]]:
        if within := prefixes.get(unit, ""):
            return [(within + name, weight) for name, weight in unit.named_parameters()]
        return [(name, weight) for name, weight in model.named_parameters() if belongs(unit, name)]

    def prepare(unit: nn.Module) -> None:
        """Everything of one layer, or of what is around the layers."""
        within, is_here = prefixes.get(unit, ""), partial(belongs, unit)
        part = {name: held for name, held in files.items() if is_here(name) and name not in later}
        quantized.fill_part(model, part, dtype=dtype, device=device, storage=plan.storage, **reads)
        if not within and (stages is None or (stages.tied and stages.parts[-1].is_last)):
            model.tie_weights()
        for name, weight in weights_of(unit):
            if weight.is_meta and (name not in files or name not in later):
                raise UserError(f"model: the weights of {run.model} hold no {name}.")
            if run.has_adapters:
                weight.requires_grad_(False)
        _move_buffers(unit, device)
        lora.put_on(model, filter(is_here, targets), run.lora, seed=run.seed)
        if split is not None:
            split.cut(model, is_here)
        for name in filter(is_here, experts):
            spread_experts(model.get_submodule(name), data_mesh(world))
        if run.has_adapters and can_fuse:
            fuse(unit, fp8=plan.products == "fp8", whole_mlps=device.type == "cuda")
        elif plan.products == "fp8" and within:
            use_fp8_products(unit)
        elif device.type == "cuda" and within:
            make_activations_again(unit)
        if device.type == "cuda" and within and split is None:
            rotate_in_kernels(unit, dtype, device)
        _close_gaps(device)

    @torch.no_grad()
    def finish(unit: nn.Module) -> None:
        """The rows of those weights that are shared as they are; for others, room for nothing but their rows."""
        weights = dict(weights_of(unit))
        part = {name: held for name, held in files.items() if name in weights and name in later}
        rows = _read_rows(part, weights, torch.device("cpu") if plan.offload_parameters else device, content)
        if device.type == "cpu":  # where FSDP has put rows in between whole weights
            others = [one for name, one in weights.items() if name not in part and isinstance(one, DTensor)]
            rows |= {weight: alone(weight.to_local()) for weight in others}
        _put(unit, rows)
        if device.type == "cpu":
            unit.to(device)  # where it is already: this makes FSDP let go of the rows that it had
        _close_gaps(device)

    if not is_sharded:
        for unit in (*layers, model):
            prepare(unit)
    called = model
    if plan.sharding != "none":
        ways = {"finish": finish, **({"prepare": prepare} if is_sharded else {})}
        called = shard(model, layers, plan, data_mesh(world), has_adapters=run.has_adapters, **ways)
    if split is not None:
        split.connect(model)
        called.tensor_ranks = split.mesh.get_group()
    if stages is not None:
        called = Pipelined(called, stages, plan, world.get_group("pipeline"))
    return Loaded(model, called, layers)


@dataclass(frozen=True)
class _Together(quantized.Reading):
    """What ranks read of tensors that they need together, and how they put them together on their devices."""

    cuts: Mapping[str, tuple[int, DeviceMesh]]
    """Tensors of which a rank keeps a part only: along which dimension, over which ranks."""
    joined: Mapping[str, Sequence[DeviceMesh]]
    """Tensors whose rows are shared out over these ranks, one mesh after the other, unless as `otherwise`."""
    otherwise: Sequence[DeviceMesh]

    def part(self, name: str, shape: tuple[int, ...]) -> Block:
        block = [slice(0, size) for size in shape]
        if name in self.cuts:
            dim, mesh = self.cuts[name]
            block[dim] = _own(block[dim], mesh)
        for mesh in self._sharers(name, shape):
            block[0] = _own(block[0], mesh)
        return () if block == [slice(0, size) for size in shape] else tuple(block)

    def whole(self, name: str, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        dim, mesh = self.cuts.get(name, (None, None))
        rows, shared = slice(0, shape[0] if shape else 0), []
        rows = _own(rows, mesh) if dim == 0 else rows
        for sharers in self._sharers(name, shape):
            shared.append((rows, sharers))
            rows = _own(rows, sharers)
        found = part
        for rows, sharers in reversed(shared):
            found = _joined(found, rows.stop - rows.start, sharers)
        if dim is None:
            return found
        found = alone(part) if found is part else found  # not the mapped file itself
        return as_part(found, dim, mesh, shape)

    def _sharers(self, name: str, shape: tuple[int, ...]) -> Sequence[DeviceMesh]:
        """Vectors are small: everybody reads them."""
        return self.joined.get(name, self.otherwise) if len(shape) > 1 else ()


def _reading_together(
    model: nn.Module, plan: Plan, world: DeviceMesh, split: Split | None, experts: Mapping[str, nn.Module]
) -> _Together:
    sharers = [] if plan.sharding in ("none", *KEEPS_WHOLE) or world["shard"].size() == 1 else [world["shard"]]
    cuts, joined = {}, {}
    if split is not None:
        cuts = {name: (dim, split.mesh) for name, dim in split.dims(model).items()}
        for name in quantized.linears_of_layers(model) if plan.storage != "plain" else []:
            joined[f"{name}.weight"] = [split.mesh, *sharers]  # quantized as a whole, and cut then
            cuts.pop(f"{name}.weight", None)
    for name, stack in experts.items():
        for leaf, _ in stack.named_parameters(recurse=False):
            if plan.storage != "plain":
                joined[f"{name}.{leaf}"] = [data_mesh(world)]  # quantized as a whole, and cut then
            else:
                cuts[f"{name}.{leaf}"], joined[f"{name}.{leaf}"] = (0, data_mesh(world)), []
    return _Together(cuts, joined, sharers)


def _shared_as_they_are(model: nn.Module, plan: Plan, targets: Sequence[str], reading: _Together) -> set[str]:
    """Weights of which a rank will hold rows just as they are in the files."""
    if plan.mesh.tensor > 1:
        return set()
    changed = set(targets)
    if plan.storage != "plain":
        changed |= quantized.linears_of_layers(model).keys() | experts_of_layers(model).keys()
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in changed}
    return names - reading.cuts.keys()


def _read_rows(
    files: Mapping[str, Held], weights: Mapping[str, nn.Parameter], device: torch.device, content: Content | None
) -> dict[nn.Parameter, torch.Tensor]:
    """This rank's rows of sharded weights."""

    def rows(name: str, _: tuple[int, ...]) -> Block:
        return (slice(*rows_of(weights[name])),)

    found = {}
    finite = Finite(next(iter(weights.values())).dtype if weights else torch.float32)
    for name, part, _ in read_ahead(files, pin=device.type == "cuda", part=rows, content=content):
        finite.look(name, part)
        local = part.to(device, weights[name].dtype, non_blocking=True)
        found[weights[name]] = alone(local) if device.type == "cpu" else local  # not the mapped file itself
    finite.say({name: held.entries[0].path.name for name, held in files.items()})
    return found


def _put(unit: nn.Module, rows: Mapping[nn.Parameter, torch.Tensor]) -> None:
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
    flat = part.reshape(part.shape[0], -1).contiguous().view(torch.uint8)
    if part.shape[0] < each:
        flat = F.pad(flat, (0, 0, 0, each - part.shape[0]))
    flat = gather_rows(flat, group_of(mesh))
    return flat[:rows].view(part.dtype).view(rows, *part.shape[1:])


def _move_buffers(unit: nn.Module, device: torch.device) -> None:
    """What no file holds, since the model computed it when it was built."""
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _close_gaps(device: torch.device) -> None:
    """Give back the host memory that whole layers have left between the parts that stay, where they were there and the
    C library is glibc: it would be as much again as the parts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type == "cpu" and trim is not None:
        trim(0)
