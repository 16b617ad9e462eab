"""The rank environment: which of a run's processes this is, by the variables that torchrun and `launch.local` set."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tunesmith.errors import UserError

PLAN = "TUNESMITH_PLAN"
"""The variable in which ranks are given the plan that they were started for, where it was made for that."""


@dataclass(frozen=True)
class RankEnvironment:
    """One process among those of a run."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Among those of this node: the number of its GPU."""
    local_ranks: int = 1
    is_started: bool = False
    """Started as a rank, by a launcher; otherwise this process may start ranks itself."""

    @property
    def nodes(self) -> int:
        return self.ranks // self.local_ranks


def read_rank_environment() -> RankEnvironment:
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return RankEnvironment()
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    local_ranks = _number("LOCAL_WORLD_SIZE", ranks)
    local_rank = _number("LOCAL_RANK", rank % local_ranks)
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks and ranks % local_ranks == 0):
        raise UserError(
            f"The environment says RANK {rank} of WORLD_SIZE {ranks} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
            f"{local_ranks}, which cannot be: start ranks by torchrun, the same number on each node, or unset these."
        )
    return RankEnvironment(rank, ranks, local_rank, local_ranks, is_started=True)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"The environment's {name} is '{text}', which is no number; torchrun sets it.") from None
