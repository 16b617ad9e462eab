"""Plan.mesh -> DeviceMesh: which ranks replicate each other and which share the model's weights.

From the outermost axis to the innermost: `pipeline`, whose stages say the least to each other; `replicate`, from node
to node; `shard`, over the neighbouring ranks of a node; then `context` and `tensor`, which talk within each layer. Axes
of size 1 are left out, but for those that weights are sharded over. Ranks of a context group hold the same weights and
share them like ranks with different data: `shard` of this mesh (`replicate` for ddp) is the plan's times `context`.
"""

from __future__ import annotations

import atexit

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tunesmith.errors import UserError
from tunesmith.parallel.quantized import Nodes
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Plan


def check_ranks(plan: Plan, ranks: Ranks) -> None:
    """The plan is for as many ranks as there are."""
    if plan.mesh.ranks != ranks.count:
        raise UserError(
            f"The plan is for {plan.mesh.ranks} ranks, and {ranks.count} were started; start as many, or leave the "
            "plan out and have one made for these."
        )


def nodes(plan: Plan) -> Nodes | None:
    """This rank's groups within its node and between nodes, where weights lie in both."""
    if plan.sharding != "hierarchical":
        return None
    sizes = plan.mesh
    mesh = init_device_mesh(plan.device, (sizes.replicate, sizes.shard), mesh_dim_names=("between", "within"))
    return Nodes(mesh.get_group("within"), mesh.get_group("between"))


def world_mesh(plan: Plan) -> DeviceMesh:
    """All ranks; one, where none were started, is a world of its own."""
    sizes = plan.mesh
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    if plan.sharding == "ddp":
        data = {"replicate": sizes.data_ranks * sizes.context, "shard": 1}
    elif plan.sharding == "hybrid":
        data = {"replicate": sizes.replicate, "shard": sizes.shard * sizes.context}
    else:
        data = {"shard": sizes.data_ranks * sizes.context}
    around = {"pipeline": sizes.pipeline, **data, "tensor": sizes.tensor}
    axes = {name: size for name, size in around.items() if size > 1 or name in data}
    return init_device_mesh(plan.device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(world: DeviceMesh) -> DeviceMesh:
    """The mesh over which weights are sharded (its last dimension) and replicated (its first, where it has two)."""
    return world[("replicate", "shard") if "replicate" in world.mesh_dim_names else "shard"]


def context_mesh(plan: Plan) -> DeviceMesh:
    """The ranks that compute parts of the same sequences."""
    sizes = plan.mesh
    shape = (sizes.pipeline * sizes.data_ranks, sizes.context, sizes.tensor)
    return init_device_mesh(plan.device, shape, mesh_dim_names=("outside", "context", "tensor"))["context"]
