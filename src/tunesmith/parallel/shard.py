"""Data parallelism: DDP, ZeRO-1, ZeRO-2, ZeRO-3 (FSDP, full sharding), hybrid sharding (HSDP) and hierarchical
partitioning (hpZ) of weights, gradients and optimizer states over the ranks that see different data, each on FSDP2.

A unit (a decoder layer; everything outside the layers) holds its trained weights as shards, in fp32 (in bf16 where they
are rounded stochastically), and computes with whole ones in the plan's precision. What the strategies differ in is who
shares, how long weights stay whole, and which backward passes reduce gradients:

                 shared by        whole from ... to ...            gradients are reduced
  ddp            nobody           forward .. end of the step       once a step (all-reduce)
  zero1          all ranks        forward .. end of the step       once a step (reduce-scatter)
  zero2          all ranks        forward .. end of the step       in each backward pass
  zero3          all ranks        each use                         in each backward pass
  hybrid         ranks of a node  each use                         in each, between nodes once a step
  hierarchical   all ranks        each use; between them the       in each backward pass
                                  ranks of a node share a copy

Gradients of adapters are small: they are reduced once a step, except by zero2. Frozen weights are gathered where they
are shared, in the form they are held in (nf4 stays 4 bits between ranks), and never reduced; ddp, zero1 and zero2,
which would keep them whole anyway, leave them alone. Adapters are shared as trained weights are: beside a whole base by
themselves, else in its shards and its collectives, where they cost a few percent of the traffic.

Single numbers (a gate of a layer as a tensor without dimensions) have no rows to be shared: they are whole on all ranks
with any strategy, outside of FSDP, and their gradients are summed once a step. So are weights of integers, which are
not trained.

Of a list of modules inside a layer (experts, each called with the tokens that chose it) some may have no gradient on
one rank and one on another: all ranks reduce all of them then. One that no rank has called has none, as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tunesmith.kernels.nf4 import SHARDED
from tunesmith.model.experts import QuantizedExperts
from tunesmith.model.forward import Entrance
from tunesmith.model.fuse import JointLinear, JointMlp
from tunesmith.model.load import DTYPES
from tunesmith.model.local import local
from tunesmith.model.quantized import QuantizedLinear
from tunesmith.optim.fused import spread
from tunesmith.parallel.mesh import nodes
from tunesmith.parallel.quantized import quantize_collectives
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Plan

KEEPS_FULL = ("ddp", "zero1", "zero2")
"""Weights stay whole from the forward pass to the end of the step."""
REDUCES_ONCE = ("ddp", "zero1")
"""Gradients of a step are summed on each rank before they are reduced."""
HOLDERS = (JointLinear, JointMlp, QuantizedLinear, QuantizedExperts)
"""Modules that hold frozen weights as buffers, which FSDP would leave whole."""


def is_sharded(plan: Plan) -> bool:
    """Whether a rank holds shards of the weights between their uses."""
    return plan.sharding not in ("none", *KEEPS_FULL)


class Sharded(Entrance):
    """A model whose weights lie over several ranks."""

    def __init__(self, model: nn.Module, plan: Plan, *, has_adapters: bool):
        super().__init__(model)
        self.keeps_whole = plan.sharding in KEEPS_FULL
        self.reduces_once = plan.sharding in REDUCES_ONCE or (has_adapters and plan.sharding != "zero2")
        self.reduces_between_nodes_once = plan.sharding == "hybrid"
        self.tensor_ranks: dist.ProcessGroup | None = None
        self.data_ranks: list[dist.ProcessGroup] = []
        """Along each dimension of the mesh of ranks that see different data."""
        self.numbers: list[nn.Parameter] = []
        """Trained weights without dimensions, which are no part of FSDP's."""
        self.listed: list[nn.Module] = []
        """Modules in lists inside layers, which a micro-batch may not call."""
        self._called: set[nn.Module] = set()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """To be told before each forward and backward pass of a step; the last one ends with reduced gradients."""
        if self.reduces_once:
            self.set_requires_gradient_sync(is_last)
        if self.reduces_between_nodes_once:
            self.set_requires_all_reduce(is_last)
        if self.keeps_whole:
            self.set_reshard_after_backward(is_last)

    def end_backward(self) -> None:
        """After the last backward pass of a step. Ranks with different data each have a part of the gradient of single
        numbers. Where layers are split over ranks, weights that are whole on each of them have a part of their gradient
        on each."""
        for group in self.data_ranks if self.numbers else ():
            for number in self.numbers:  # a rank whose tokens have not come by it has a part, too: 0
                number.grad = torch.zeros_like(number) if number.grad is None else number.grad
            _sum_over([number.grad for number in self.numbers], group)
        if self.listed and self.data_ranks:
            self._forget_uncalled()
        if self.tensor_ranks is not None:
            gradients = [weight.grad for weight in self.parameters() if weight.grad is not None]
            _sum_over([local(gradient) for gradient in gradients if not _is_cut_by_tensor(gradient)], self.tensor_ranks)

    def watch_list(self, modules: Sequence[nn.Module]) -> None:
        """Which of these a step calls."""
        self.listed += modules

        def note(called: nn.Module, *_: object) -> None:
            if torch.is_grad_enabled():
                self._called.add(called)

        for module in modules:
            module.register_forward_hook(note)

    def _forget_uncalled(self) -> None:
        """Gradients of modules that no rank has called: made of nothing, so that all ranks reduce the same."""
        is_used = [module in self._called or _has_gradient(module) for module in self.listed]
        used = torch.tensor(is_used, dtype=torch.int32, device=next(self.parameters()).device)
        for group in self.data_ranks:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        for module, is_one in zip(self.listed, used.tolist(), strict=True):
            for weight in () if is_one else module.parameters():
                weight.grad = None
        self._called.clear()

    def agreed(self, norm: torch.Tensor) -> torch.Tensor:
        """The first rank's, where the last bit of a sum over several axes could be another one on each."""
        if self.tensor_ranks is not None:
            dist.broadcast(norm, 0)
        return norm

    def free_full_weights(self) -> None:
        """Free the full weights that a forward pass without a backward pass has left."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class Sharding:
    """The strategy of a plan, put on one unit of a model after the other: its layers, and last what is around them."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh, *, has_adapters: bool):
        self.root = Sharded(model, plan, has_adapters=has_adapters)
        """What is around the layers, and to be called in the end."""
        self.root.data_ranks = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._plan, self._mesh = plan, mesh
        self._has_whole_base = has_adapters and plan.sharding in KEEPS_FULL
        precision = getattr(torch, DTYPES[plan.precision])
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if has_adapters else precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        self._offload = OffloadPolicy()
        if plan.offload_parameters:
            self._offload = CPUOffloadPolicy(pin_memory=plan.device == "cuda")
        self._is_quantized = (plan.quantized_all_gather, plan.quantized_reduce_scatter) != ("plain", "plain")
        self._is_rounded = plan.precision == "bf16" and not plan.master_weights and not has_adapters
        self._nodes = nodes(plan) if self._is_quantized else None
        # What is made is then the gradient itself, and not something it is made from on another stream.
        is_single = plan.accumulation_steps == 1 and not plan.by_length
        is_elsewhere = plan.offload_parameters or self._is_rounded
        self._is_gradient = not is_elsewhere and (self.root.reduces_once or is_single)

    def shard(self, unit: nn.Module) -> None:
        """Weights that are on the meta device still are sharded, too, and want their rows then."""
        plan = self._plan
        has_experts = plan.mesh.expert > 1  # which lie over ranks already, some on each
        apart = {weight for weight in unit.parameters() if has_experts and isinstance(weight, DTensor)}
        if self._has_whole_base:
            apart |= {weight for weight in unit.parameters() if not weight.requires_grad}
        else:
            _buffers_to_parameters(unit, but=(QuantizedExperts,) if has_experts else ())
        numbers = [weight for weight in unit.parameters() if not has_rows(weight)]
        apart |= set(numbers)
        self.root.numbers += [
            number for number in numbers if number.requires_grad and number not in set(self.root.numbers)
        ]
        if not self._is_rounded:
            _in_fp32(unit)
        others = [weight for weight in unit.parameters() if weight not in apart]
        shapes = [weight.shape for weight in others if not isinstance(weight, DTensor)]
        fully_shard(
            unit,
            mesh=self._mesh,
            reshard_after_forward=self._reshards_after_forward(unit),
            mp_policy=self._policy,
            offload_policy=self._offload,
            ignored_params=apart,
        )
        self._take_lists(unit)
        if self._is_quantized:
            quantize_collectives(
                unit,
                shapes,
                plan.mesh.data_ranks,
                self._nodes,
                quantized_all_gather=plan.quantized_all_gather,
                quantized_reduce_scatter=plan.quantized_reduce_scatter,
            )
        if self._mesh.shape[-1] == 1 and self._is_gradient and hasattr(unit, "set_custom_reduce_scatter"):
            unit.set_custom_reduce_scatter(_InPlace())
        if self._mesh.size() > 1:  # the loss is divided by the target tokens of all ranks; on one FSDP would by one
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    def _take_lists(self, unit: nn.Module) -> None:
        if self._mesh.size() == 1:
            return
        known = {id(module) for module in self.root.listed}
        lists = [module for module in unit.modules() if isinstance(module, nn.ModuleList)]
        unlisted = [
            module
            for modules in lists
            for module in modules
            if not isinstance(module, FSDPModule) and id(module) not in known
        ]
        trained = [module for module in unlisted if any(weight.requires_grad for weight in module.parameters())]
        if not trained:
            return
        # Before FSDP's own, which gives the whole weights back.
        unit.register_forward_hook(partial(_reach_all, trained), prepend=True)
        self.root.watch_list(trained)

    def _reshards_after_forward(self, unit: nn.Module) -> bool | int:
        if unit is self.root:
            return False
        if self._plan.sharding == "hierarchical":
            return self._plan.mesh.shard * self._plan.mesh.context
        return self._plan.sharding not in KEEPS_FULL


def _reach_all(modules: Sequence[nn.Module], _unit: nn.Module, _arguments: object, output: Any) -> Any:
    """The unit's output, by which weights of these modules have a gradient, of zeros where none of them was called."""
    weights = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
    return _first_changed(output, lambda first: _Reached.apply(first, *weights))[0]


def _first_changed(output: Any, change: Callable[[torch.Tensor], Any]) -> tuple[Any, bool]:
    """The output with another tensor for the first that has a gradient; and whether there was one."""
    if isinstance(output, torch.Tensor):
        return (change(output), True) if output.requires_grad else (output, False)
    if isinstance(output, tuple | list):
        for at, item in enumerate(output):
            changed, is_changed = _first_changed(item, change)
            if is_changed:
                return type(output)([*output[:at], changed, *output[at + 1 :]]), True
    if isinstance(output, dict):
        for name, item in output.items():
            output[name], is_changed = _first_changed(item, change)
            if is_changed:
                return output, True
    return output, False


class _Reached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, *weights):
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return output.view_as(output)

    @staticmethod
    def backward(ctx, d_output):
        return d_output, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def has_rows(weight: torch.Tensor) -> bool:
    """Whether ranks can share it."""
    return weight.ndim > 0 and weight.is_floating_point()


def _sum_over(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Put into each tensor the sum of what the ranks of a group have in it."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    summed = flat.split([part.numel() for part in parts])
    torch._foreach_copy_(list(parts), [total.view_as(part) for total, part in zip(summed, parts, strict=True)])


def _has_gradient(module: nn.Module) -> bool:
    """Of other than zeros: its weights may be read without a call."""
    gradients = [local(weight.grad) for weight in module.parameters() if weight.grad is not None]
    return any(bool(gradient.any()) for gradient in gradients)


def _is_cut_by_tensor(weight: torch.Tensor) -> bool:
    return isinstance(weight, DTensor) and "tensor" in weight.device_mesh.mesh_dim_names


class _InPlace:
    """How a rank reduces gradients that it shares with nobody: FSDP asks for room for what is sent, then for what is
    received, and copies the one to the other; here they are the same."""

    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        received, self._sent = self._sent, None
        if received is not None:
            return received
        self._sent = torch.empty(*size, dtype=dtype, device=device)
        return self._sent

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        raise AssertionError("one rank alone has nothing to send")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, gathered where it lies over several ranks, all of which must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks, dtype: torch.dtype | None = None, *, keeps: bool | None = None
) -> dict[str, torch.Tensor]:
    """The tensors whole and in host memory on the first rank, one after the other; nothing on the others. Where stages
    have different ones, each has a rank that `keeps` its own, and the first gets them all."""
    in_host_memory = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if ranks.is_first if keeps is None else keeps:
            in_host_memory[name] = full.to("cpu", dtype).contiguous()
    return in_host_memory if keeps is None else ranks.collect(in_host_memory)


class ShardSlice(NamedTuple):
    """What one rank holds of a tensor: rows from `start` on, of `total`; all of a number (total None)."""

    tensor: torch.Tensor
    start: int
    total: int | None


def own_parts(
    tensors: Mapping[str, torch.Tensor], *, is_first: bool, tensor: tuple[int, int] = (0, 1)
) -> Iterator[tuple[str, ShardSlice]]:
    """This rank's share of the work of writing `tensors`: its rows of each, taken in turn where ranks replicate; the
    first of those that have these tensors writes what is not spread. All ranks must ask at once, since columns that lie
    apart are put together. `tensor`: which of how many tensor ranks this is."""
    for index, name in enumerate(sorted(tensors)):  # states are not in the same order on all ranks
        value = tensors[name]
        if isinstance(value, DTensor):
            start, stop = rows_of(value)
            mine, copies = (0, 1) if _cut_dim(value) == 0 else tensor
            if _cut_dim(value) == 1:
                value = value.redistribute(placements=[*value.placements[:-1], Replicate()])
            if "replicate" in value.device_mesh.mesh_dim_names:
                replicas = value.device_mesh["replicate"]
                mine, copies = mine * replicas.size() + replicas.get_local_rank(), copies * replicas.size()
            if index % copies == mine and start < stop:
                yield name, ShardSlice(value.to_local(), start, value.shape[0])
        elif is_first:
            yield name, ShardSlice(value, 0, value.shape[0] if value.ndim else None)


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """The rows that this rank holds: shards are of equal size but for the last ones."""
    start, stop = 0, tensor.shape[0]
    for axis in ("tensor", "shard") if _cut_dim(tensor) == 0 else ("shard",):
        along = tensor.device_mesh[axis]
        each = -(-(stop - start) // along.size())
        start = min(stop, start + each * along.get_local_rank())
        stop = min(stop, start + each)
    return start, stop


def from_rows(rows: torch.Tensor, weight: DTensor) -> DTensor:
    """A tensor with the weight's rows, of which this rank has its own, where they are."""
    shape = torch.Size((weight.shape[0], *rows.shape[1:]))
    if _cut_dim(weight) == 1:
        along = weight.device_mesh["tensor"]
        rows = rows.chunk(along.size(), 1)[along.get_local_rank()].contiguous()
    return spread(rows, weight, shape)


def _cut_dim(tensor: DTensor) -> int | None:
    """The dimension of it that is cut over tensor ranks, where one is."""
    names = tensor.device_mesh.mesh_dim_names
    placed = tensor.placements[names.index("tensor")] if "tensor" in names else None
    return placed.dim if isinstance(placed, Shard) else None


def _in_fp32(unit: nn.Module) -> None:
    """Trained weights as the optimizer updates them; what the forward pass uses is made from these when gathered."""
    for weight in unit.parameters():
        if weight.requires_grad and not isinstance(weight, DTensor):
            weight.data = weight.data.float()


def _buffers_to_parameters(unit: nn.Module, but: tuple[type[nn.Module], ...]) -> None:
    for module in unit.modules():
        if isinstance(module, HOLDERS) and not isinstance(module, but):
            for name, buffer in list(module.named_buffers(recurse=False)):
                delattr(module, name)
                held = buffer.view(SHARDED) if buffer.dtype in (torch.uint8, torch.int8) else buffer
                module.register_parameter(name, nn.Parameter(held, requires_grad=False))
