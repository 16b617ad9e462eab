from __future__ import annotations

import json
from typing import Any

import pytest

from parallel.on_ranks import STEPS


@pytest.fixture(scope="module")
def alone(world, settings, tmp_path_factory):
    """By method and changes of it: the steps of a run on one rank, with the `settings` of the module that asks."""
    known = {}

    def of(method: str, **changes: Any) -> list[dict]:
        if (key := json.dumps([method, changes])) not in known:
            output = str(tmp_path_factory.mktemp("alone") / "run")
            options = {"folder": str(settings), "mesh": {}, "sharding": "none", "method": method, "output": output}
            known[key] = world(1)("parallel.on_ranks:steps", count=STEPS, **options, **changes)[0]
        return known[key]

    return of
