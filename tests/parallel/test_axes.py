"""A run on one rank, and with its layers or its sequences split over several: the same losses and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny import SETTINGS, write_data

STEPS = 20
METHODS = ("full", "lora", "qlora")
WAYS = {
    "context 2": ({"context": 2}, "ddp"),
    "context 2 x shard 2": ({"context": 2, "shard": 2}, "zero3"),
}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory) -> Path:
    """A folder with data and settings: documents of many lengths, three sequences a step."""
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
        "batch_tokens": 3 * 64,
        "steps": STEPS,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def alone(world, settings, tmp_path_factory):
    """By method: the steps of a run on one rank."""
    known = {}

    def of(method: str) -> list[dict]:
        if method not in known:
            output = str(tmp_path_factory.mktemp("alone") / "run")
            options = {"folder": str(settings), "mesh": {}, "sharding": "none", "method": method, "output": output}
            known[method] = world(1)("parallel.on_ranks:steps", count=STEPS, **options)[0]
        return known[method]

    return of


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_splitting_layers_or_sequences_gives_the_steps_of_one_rank(world, settings, alone, tmp_path, method, way):
    mesh, sharding = WAYS[way]
    ranks = mesh.get("tensor", 1) * mesh.get("context", 1) * mesh.get("shard", 1)
    options = {"folder": str(settings), "mesh": mesh, "sharding": sharding, "method": method}
    on_ranks = world(ranks)("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), **options)
    group = ranks // mesh.get("shard", 1)  # see the same data
    for number, expected in enumerate(alone(method)):
        found = [steps[number] for steps in on_ranks]
        assert all(one["loss"] == found[0]["loss"] and one["norm"] == found[0]["norm"] for one in found)
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert sorted(origin for one in found[::group] for origin in one["data"]) == sorted(expected["data"])
