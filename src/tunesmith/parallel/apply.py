"""The order in which a loaded, adapted model is made ready to train. Mechanisms live elsewhere.

cut into stages  ->  blocks over tensor ranks  ->  attention over context ranks  ->  MLPs in slices  ->  recompute some
layers  ->  compile each layer  ->  offload the inputs of recomputed layers  ->  spread experts over ranks  ->  shard
"""

from __future__ import annotations

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.parallel.activation import HostStore, offloaded, recomputed, slice_mlp
from tunesmith.parallel.compile import compiled
from tunesmith.parallel.context import attend_over
from tunesmith.parallel.expert import find_experts, spread_experts
from tunesmith.parallel.mesh import context_mesh, data_mesh, world_mesh
from tunesmith.parallel.pipeline import Pipelined, cut
from tunesmith.parallel.shard import shard
from tunesmith.parallel.tensor import Split
from tunesmith.plan.plan import Plan


def apply(model: nn.Module, plan: Plan, *, has_adapters: bool, split: Split | None = None) -> nn.Module:
    """Returns what is to be called from now on: the model, or what stands before its shards. `split`: its weights are
    cut over tensor ranks already."""
    if plan.mesh.pipeline > 1:
        return _apply_to_stages(model, plan, has_adapters=has_adapters)
    if split is not None:
        split.connect(model)
    wrap_layers(model, plan)
    if plan.sharding == "none":
        return model
    mesh = data_mesh(split.world if split is not None else world_mesh(plan))
    if plan.mesh.expert > 1:
        for experts in find_experts(model, mesh.size()).values():
            spread_experts(experts, mesh)
    sharded = shard(model, decoder_layers(model), plan, mesh, has_adapters=has_adapters)
    if split is not None:
        sharded.tensor_ranks = split.mesh.get_group()
    return sharded


def wrap_layers(model: nn.Module, plan: Plan, layers: list[nn.Module] | None = None) -> None:
    """All that changes how a layer is computed and not where its weights lie; of all layers, or those of a stage."""
    every = decoder_layers(model)
    layers = layers or every
    recompute_layers = -(-plan.recompute_layers * len(layers) // len(every))  # of a stage the same part as of all
    if plan.mesh.context > 1:
        attend_over(model, context_mesh(plan), plan.attention)
    store = HostStore(torch.device(plan.device)) if plan.offload_activations else None
    for index, layer in enumerate(layers):
        # Early layers are the ones to recompute: what they would keep is kept the longest.
        is_recomputed = index < recompute_layers
        can_slice = not plan.mlp_slice or slice_mlp(
            layer, plan.mlp_slice, recompute=not (is_recomputed and plan.is_compiled)
        )
        if not can_slice:
            raise UserError(
                f"The plan computes MLPs in slices of {plan.mlp_slice:,} tokens, but {type(layer).__name__} has none "
                "that can be; use a shorter sequence_length, or a plan with mlp_slice 0."
            )
        forward = layer.forward
        if is_recomputed:
            forward = recomputed(forward, keep_attention=plan.keep_attention)
        if plan.is_compiled:
            forward = compiled(forward, type(layer).__name__, whole=is_recomputed)
        if is_recomputed and store is not None:
            forward = offloaded(forward, store, stays=index == recompute_layers - 1)
        if forward is not layer.forward:
            layer.forward = forward


def _apply_to_stages(model: nn.Module, plan: Plan, *, has_adapters: bool) -> Pipelined:
    world = world_mesh(plan)
    mine = cut(model, plan, world.get_local_rank("pipeline"))
    wrap_layers(model, plan, mine.layers)
    called = model
    if plan.sharding != "none":
        called = shard(model, mine.layers, plan, data_mesh(world), has_adapters=has_adapters)
    return Pipelined(called, mine, plan, world.get_group("pipeline"))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the longest list of modules it has."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of layers, so nothing can be recomputed layer by layer.")
    return list(max(lists, key=len))
