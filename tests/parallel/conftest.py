from __future__ import annotations

import pytest

from parallel.on_ranks import STEPS


@pytest.fixture(scope="module")
def alone(world, settings, tmp_path_factory):
    """By method: the steps of a run on one rank, with the `settings` of the module that asks."""
    known = {}

    def of(method: str) -> list[dict]:
        if method not in known:
            output = str(tmp_path_factory.mktemp("alone") / "run")
            options = {"folder": str(settings), "mesh": {}, "sharding": "none", "method": method, "output": output}
            known[method] = world(1)("parallel.on_ranks:steps", count=STEPS, **options)[0]
        return known[method]

    return of
