"""How fast ranks exchange tensors: the collectives that training uses, by size, within a node and between nodes.

Bus bandwidth is what a link would show if it carried the least that any algorithm must: it can be compared between
collectives and numbers of ranks, and with what the maker of the link says. The best that gathering or scattering
reaches is kept for the planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.hardware import BETWEEN_NODES, CPU_KEY, keep_measured, measured_links, measured_links_file
from tunesmith.plan.speed import LINK, NETWORK

SIZES = {"cpu": (1 << 16, 1 << 20, 1 << 24), "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30)}
"""Bytes of the whole tensor."""
SECONDS = 0.3
"""To spend on one measurement, about."""


@dataclass(frozen=True)
class Exchange:
    """One collective at one size."""

    reach: str
    """Over which ranks: all, those of a node, or one of each node."""
    ranks: int
    collective: str
    bytes: int
    """Of the whole tensor."""
    seconds: float
    algorithm: float
    """Bytes of it a second."""
    bus: float
    """Bytes a second that each rank must at least have sent."""


def measure(ranks: Ranks, device: torch.device, sizes: Sequence[int] | None = None) -> list[Exchange]:
    """All ranks must call this; each gets the same result, that of the slowest."""
    found = []
    for reach, group in groups(ranks):
        count = dist.get_world_size(group)
        for name, make in COLLECTIVES.items():
            for size in sizes or SIZES[device.type]:
                call = make(size // 4 // count * count, count, group, device)
                seconds = _seconds(call, ranks, device)
                least = (2 if name == "all-reduce" else 1) * (count - 1) / count
                found.append(Exchange(reach, count, name, size, seconds, size / seconds, least * size / seconds))
    return found


def groups(ranks: Ranks) -> list[tuple[str, dist.ProcessGroup | None]]:
    """The ranks between which it is measured: all, and where there are several nodes, within and between them."""
    environment, everyone = ranks.environment, [("all ranks", None)]
    if environment.nodes == 1 or environment.local_ranks == 1:
        return everyone
    within, between = None, None
    for node in range(environment.nodes):
        members = list(range(node * environment.local_ranks, (node + 1) * environment.local_ranks))
        group = dist.new_group(members)
        within = group if environment.rank in members else within
    for local in range(environment.local_ranks):
        members = list(range(local, environment.ranks, environment.local_ranks))
        group = dist.new_group(members)
        between = group if environment.rank in members else between
    return [*everyone, ("within a node", within), ("between nodes", between)]


def keep(found: Sequence[Exchange], ranks: Ranks, device_name: str | None) -> dict[str, float]:
    """Write down what the planner can use, by GPU (None: the CPU); returns it, in bytes a second."""
    environment = ranks.environment

    def best(reach: str) -> float:
        useful = [one.bus for one in found if one.reach == reach and one.collective in ("all-gather", "reduce-scatter")]
        return max(useful, default=0.0)

    inside = best("within a node") if environment.nodes > 1 else best("all ranks")
    outside = 0.0
    if environment.nodes > 1:  # at once from every rank of a node, over the same link
        outside = best("between nodes") * environment.local_ranks if environment.local_ranks > 1 else best("all ranks")
    kept = {device_name or CPU_KEY: inside / LINK} if inside and environment.local_ranks > 1 else {}
    kept |= {BETWEEN_NODES: outside / NETWORK} if outside else {}
    keep_measured(measured_links_file(), measured_links() | kept)
    return kept


# the collectives, on as many fp32 values; torch 2.13 has new names for two of them

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce(count: int, _ranks: int, group, device: torch.device) -> Callable[[], object]:
    values = torch.zeros(count, device=device)
    return lambda: dist.all_reduce(values, group=group)


def _all_gather(count: int, ranks: int, group, device: torch.device) -> Callable[[], object]:
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    return lambda: _gather(whole, part, group=group)


def _reduce_scatter(count: int, ranks: int, group, device: torch.device) -> Callable[[], object]:
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    return lambda: _scatter(part, whole, group=group)


def _all_to_all(count: int, _ranks: int, group, device: torch.device) -> Callable[[], object]:
    here, there = torch.zeros(count, device=device), torch.zeros(count, device=device)
    return lambda: dist.all_to_all_single(there, here, group=group)


COLLECTIVES = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}


def _seconds(call: Callable[[], object], ranks: Ranks, device: torch.device) -> float:
    """Of one call: the mean of as many as fit into SECONDS, on the slowest rank."""

    def timed(rounds: int) -> float:
        ranks.wait()
        began = time.perf_counter()
        for _ in range(rounds):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return max(float(said) for said in ranks.gather(str((time.perf_counter() - began) / rounds)))

    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    once = timed(1)
    return timed(max(1, min(1000, int(SECONDS / once))))
