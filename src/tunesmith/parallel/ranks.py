"""The processes of a run: how they meet, and the few words they exchange beside the model's own tensors.

Alone, every exchange is a no-op, so that one code serves one process and many. What is said in words (a decision, a
file's name) goes over gloo with a timeout of a day, since some ranks wait while one tokenizes or writes; collectives
over the model's tensors have PyTorch's usual one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tunesmith.launch.rank_environment import RankEnvironment

PATIENCE = timedelta(days=1)
"""For waits that are no collective of a step."""
TIMEOUT = timedelta(minutes=30)
"""Of collectives; a step that hangs is noticed before (`train.hang`)."""
ALONE = RankEnvironment()


@dataclass(frozen=True)
class Ranks:
    environment: RankEnvironment = ALONE
    control: dist.ProcessGroup | None = None
    """None where there is one process only."""

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def count(self) -> int:
        return self.environment.ranks

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and talks to the user."""
        return self.environment.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In place, over all ranks; on a GPU without waiting for it."""
        if self.control is not None:
            dist.all_reduce(values)
        return values

    def rows(self, values: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """The rows of all ranks, in their order and on every rank, and which of them are this one's."""
        if self.control is None:
            return values, slice(0, values.shape[0])
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.rank] = values.shape[0]
        dist.all_reduce(sizes, group=self.control)
        padded = values.new_zeros(max(1, int(sizes.max())), *values.shape[1:])
        padded[: values.shape[0]] = values
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        begin = int(sizes[: self.rank].sum())
        rows = [part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]
        return torch.cat(rows), slice(begin, begin + values.shape[0])

    def any(self, facts: Sequence[bool]) -> list[bool]:
        """Each fact, where it is so on at least one rank."""
        if self.control is None:
            return list(facts)
        values = torch.tensor(facts, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in values.tolist()]

    def tell(self, text: str) -> str:
        """What the first rank says, on every rank."""
        return self.gather(text if self.is_first else "")[0]

    def gather(self, text: str) -> list[str]:
        """What each rank says, in their order."""
        if self.control is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0).byte()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.control)
        longest = max(1, max(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded, group=self.control)
        return [
            bytes(part[: int(size)].tolist()).decode(errors="replace") for part, size in zip(parts, sizes, strict=True)
        ]

    def collect(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors of all ranks, in host memory, on the first one; of a name that several have, the first's."""
        if self.control is None:
            return dict(tensors)
        here = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]
        collected = dict(tensors) if self.is_first else {}
        known: set[str] = set()
        for rank, said in enumerate(self.gather(json.dumps(here))):
            for name, shape, dtype in json.loads(said):
                if name in known:
                    continue
                known.add(name)
                if rank == 0:
                    continue
                if self.is_first:
                    collected[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    dist.recv(collected[name].view(-1).view(torch.uint8), src=rank, group=self.control)
                elif self.rank == rank:
                    dist.send(tensors[name].view(-1).view(torch.uint8), dst=0, group=self.control)
        return collected

    def wait(self) -> None:
        """Until every rank is here."""
        if self.control is not None:
            dist.monitored_barrier(self.control, PATIENCE)


@contextmanager
def connected(environment: RankEnvironment) -> Iterator[Ranks]:
    """Meet the other ranks, as the environment says (MASTER_ADDR, MASTER_PORT), for as long as this lasts."""
    if not environment.is_started:
        yield Ranks(environment)
        return
    gpus = torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(environment.local_rank % gpus)
    # NCCL refuses two ranks on a device. Gloo takes their tensors through host memory: a test of kernels, not of speed.
    backend = "cpu:gloo,cuda:nccl" if gpus >= environment.local_ranks else "gloo"
    dist.init_process_group(backend, rank=environment.rank, world_size=environment.ranks, timeout=TIMEOUT)
    try:
        yield Ranks(environment, dist.new_group(backend="gloo", timeout=PATIENCE))
    finally:
        dist.destroy_process_group()
