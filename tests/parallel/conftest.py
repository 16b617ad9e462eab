from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """Worlds by their number of ranks, each started once."""
    cache = tmp_path_factory.mktemp("cache")
    worlds: dict[int, World] = {}

    def of(count: int) -> World:
        if count not in worlds or worlds[count].is_over:
            worlds[count] = World(count, cache)
        return worlds[count]

    yield of
    for one in worlds.values():
        one.close()
