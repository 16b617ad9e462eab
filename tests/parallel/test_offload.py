"""Optimizer states and parameters that live elsewhere than on the device, on one rank and on more: the same steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parallel.on_ranks import STEPS
from tiny import SETTINGS, write_data

WAYS = {
    "none": {},
    "alone": {"shard": 1},
    "zero3": {"shard": 2},
    "ddp": {"replicate": 2},
    "zero1": {"shard": 2},
    "hybrid": {"replicate": 2, "shard": 2},
    "hierarchical": {"replicate": 2, "shard": 2},
}
METHODS = ("full", "lora", "qlora")
HOST, DISK, PARAMETERS = {"offload_optimizer": "host"}, {"offload_optimizer": "disk"}, {"offload_parameters": True}
QUICK = [
    ("full", "none", HOST),
    ("lora", "zero3", HOST),
    ("qlora", "zero3", DISK),
    ("full", "ddp", HOST),
    ("full", "zero1", HOST),
    ("full", "zero3", PARAMETERS | DISK),
    ("lora", "none", PARAMETERS),
    ("qlora", "none", PARAMETERS),
    ("qlora", "zero3", PARAMETERS),
    ("full", "hierarchical", PARAMETERS),
]
"""Every method, every way and every place."""
ALL = [
    *((method, way, moved) for method in METHODS for way in ("none", "zero3") for moved in (HOST, DISK)),
    *((method, "zero3", PARAMETERS) for method in METHODS),
    ("full", "alone", PARAMETERS),
    *(("full", "hybrid", moved) for moved in (HOST, PARAMETERS)),
]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ALL if cell not in QUICK)]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory) -> Path:
    """A folder with data and settings; 5 sequences a step, which neither 2 nor 4 ranks can share evenly."""
    folder = tmp_path_factory.mktemp("settings")
    write_data(folder / "train.jsonl", 60)
    content = {
        **SETTINGS,
        "model": str(tiny_model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [],
        "batch_tokens": 5 * 64,
        "steps": STEPS,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


def name_of(value: object) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("method", "way", "moved"), CELLS, ids=name_of)
def test_what_lives_in_host_memory_or_on_disk_gives_the_steps_of_one_rank(
    world, settings, alone, tmp_path, method, way, moved
):
    sharding = "zero3" if way == "alone" else way
    settled = {"method": method} | ({} if method == "full" else {"batch_tokens": 2 * 64})  # one micro-batch is quicker
    options = {"folder": str(settings), "mesh": WAYS[way], "sharding": sharding, **settled}
    ranks = world(math.prod(WAYS[way].values()))
    found = ranks("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), moved=moved, **options)
    for number, expected in enumerate(alone(**settled)):
        here = [steps[number] for steps in found]
        assert all(one["loss"] == here[0]["loss"] and one["norm"] == here[0]["norm"] for one in here)
        assert here[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert here[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert sorted(origin for one in here for origin in one["data"]) == sorted(expected["data"])


def test_saved_on_four_ranks_with_states_on_disk_a_run_goes_on_on_others(world, settings, tmp_path):
    def train(until: int, ranks: int, **moved) -> list[float]:
        way = {"mesh": {"shard": ranks}, "sharding": "zero3"} if ranks > 1 else {"mesh": {}, "sharding": "none"}
        options = {"folder": str(settings), "method": "full", "steps": 9, "output": str(tmp_path / "run"), **way}
        return world(ranks)("parallel.on_ranks:train_for", until=until, moved=moved, **options)[0]["losses"]

    options = {"folder": str(settings), "method": "full", "steps": 9, "output": str(tmp_path / "whole")}
    whole = world(1)("parallel.on_ranks:train_for", until=9, mesh={}, sharding="none", **options)[0]["losses"]
    found = train(3, 4, offload_optimizer="disk")
    found += train(6, 2, offload_optimizer="disk")
    found += train(9, 1)
    assert found == pytest.approx(whole, rel=1e-5)
