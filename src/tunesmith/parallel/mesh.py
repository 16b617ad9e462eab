"""Plan.mesh -> DeviceMesh: which ranks replicate each other and which share the model's weights.

Neighbouring ranks, those of a node, lie along `shard`; `replicate` goes from node to node. Axes that split a layer or
a sequence (tensor, context, pipeline) are further dimensions of this mesh, inside or outside of these two; every
function here gives the ranks that see different data.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Plan


def check_ranks(plan: Plan, ranks: Ranks) -> None:
    """The plan is for as many ranks as there are."""
    if plan.mesh.ranks != ranks.count:
        raise UserError(
            f"The plan is for {plan.mesh.ranks} ranks, and {ranks.count} were started; start as many, or leave the "
            "plan out and have one made for these."
        )


def data_mesh(plan: Plan) -> DeviceMesh:
    """The mesh over which weights are sharded (its last dimension) and replicated (its first, where it has two)."""
    sizes = plan.mesh
    if plan.sharding in ("ddp", "hybrid"):
        return init_device_mesh(plan.device, (sizes.replicate, sizes.shard), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(plan.device, (sizes.data_ranks,), mesh_dim_names=("shard",))
