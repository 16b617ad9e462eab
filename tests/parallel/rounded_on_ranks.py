"""Collectives in few bits, as ranks do them for `test_quantized.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tunesmith.parallel.quantized import Nodes, Packing, QuantizedGather, QuantizedReduce
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import TrafficDtype


def rounded_collectives(ranks: Ranks, wire: TrafficDtype) -> dict[str, Any]:
    """How far collectives of rounded values are from exact ones, in units of the largest value of any rank; and whether
    all ranks have the same result."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    nodes = Nodes(mesh.get_group("within"), mesh.get_group("between"))
    packing, length, group = Packing([(True, 1000), (False, 30), (True, 77)], wire), 1107, dist.group.WORLD
    parts = torch.randn(4, 4, length, generator=torch.Generator().manual_seed(3))  # from each rank, for each rank
    shards = parts[:, 0]
    found: dict[str, Any] = {"same": True}
    for name, where in (("gather", None), ("nodes_gather", nodes)):
        gather = QuantizedGather(packing, 4, where)
        whole = gather.allocate((4 * length,), dtype=torch.float32, device=torch.device("cpu"))
        gather(whole, shards[ranks.rank].clone(), group)
        found[name] = ((whole.view(4, -1) - shards).abs().max() / shards.abs().max()).item()
        found["same"] &= len(set(ranks.gather(str(whole.sum().item())))) == 1
    for name, where in (("reduce", None), ("nodes_reduce", nodes)):
        reduce, total = QuantizedReduce(packing, where), torch.empty(length)
        reduce(total, parts[ranks.rank].clone().view(-1), group, dist.ReduceOp.SUM)
        exact = parts[:, ranks.rank].sum(0)
        largest = parts.abs().max() if where is None else parts.view(2, 2, 4, length).sum(1).abs().max()
        found[name] = ((total - exact).abs().max() / largest).item()
    return found
