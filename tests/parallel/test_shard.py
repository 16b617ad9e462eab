"""A run on one rank and on two or four, however its weights are shared: the same data, losses and gradients in each
step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parallel.on_ranks import METHODS, STEPS
from tiny import SETTINGS, write_data

WAYS = {
    "ddp": {"replicate": 4},
    "zero1": {"shard": 4},
    "zero2": {"shard": 4},
    "zero3": {"shard": 4},
    "hybrid": {"replicate": 2, "shard": 2},
    "hierarchical": {"replicate": 2, "shard": 2},
}
QUICK = [
    *(("full", way) for way in ("ddp", "zero2", "zero3", "hierarchical")),
    ("lora", "zero1"),
    *(("qlora", way) for way in ("zero3", "hybrid")),
]
"""Every method and every way; the rest of the matrix takes a minute and is slow."""
REST = [(method, way) for method in ("full", "lora", "qlora") for way in WAYS if (method, way) not in QUICK]
REST += [("qlora in 8 bits", "zero3")]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in REST)]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory) -> Path:
    """A folder with data and settings; 7 sequences a step, which 4 ranks cannot share evenly."""
    folder = tmp_path_factory.mktemp("settings")
    write_data(folder / "train.jsonl", 60)
    write_data(folder / "more.jsonl", 20, seed=5)
    write_data(folder / "held_out.jsonl", 7, seed=1)
    content = {
        **SETTINGS,
        "model": str(tiny_model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "more.jsonl"), "name": "more"}],
        "eval": [{"path": str(folder / "held_out.jsonl")}],
        "batch_tokens": 7 * 64,
        "steps": STEPS,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("method", "way"), CELLS)
def test_every_way_of_sharing_gives_the_steps_of_one_rank(world, settings, alone, tmp_path, method, way):
    mesh = WAYS[way]
    if method != "full" and len(mesh) == 1:
        mesh = dict.fromkeys(mesh, 2)
    ranks = math.prod(mesh.values())
    settled = METHODS[method] | ({} if method == "full" else {"batch_tokens": ranks * 64})  # one micro-batch is quicker
    options = {"folder": str(settings), "mesh": mesh, "sharding": way, **settled}
    on_ranks = world(ranks)("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), **options)
    for number, expected in enumerate(alone(**settled)):
        found = [steps[number] for steps in on_ranks]
        assert all(one["loss"] == found[0]["loss"] and one["norm"] == found[0]["norm"] for one in found)
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert sorted(origin for one in found for origin in one["data"]) == sorted(expected["data"])
