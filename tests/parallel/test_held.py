"""What a rank holds when a step's update begins is what the planner says, within 2%."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from parallel.on_ranks import made
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.plan import memory
from tunesmith.plan.choice import Choice
from tunesmith.plan.hardware import probe, shared
from tunesmith.plan.models import read_facts
from tunesmith.plan.task import make_task

pytestmark = pytest.mark.distributed
NODES = {"replicate": 2, "shard": 2}
WAYS = {
    "ddp": {"replicate": 4},
    "zero1": {"shard": 4},
    "zero2": {"shard": 4},
    "zero3": {"shard": 4},
    "hybrid": NODES,
    "hierarchical": NODES,
}
QUICK = [
    *(("full", way, {}) for way in WAYS),
    ("full", "hierarchical", {"quantized_all_gather": "int8", "quantized_reduce_scatter": "int8"}),
    *(("lora", way, {}) for way in ("ddp", "zero3")),
    *(("qlora", way, {}) for way in ("zero3", "hierarchical")),
]
REST = [(method, way, {}) for method in ("lora", "qlora") for way in WAYS if (method, way, {}) not in QUICK]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in REST)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """Sizes that four ranks share without padding, and large enough for the scales of 4-bit weights."""
    folder = tmp_path_factory.mktemp("held")
    model = make_tiny_model(folder / "model", vocab_size=272, hidden_size=256, intermediate_size=512)
    write_data(folder / "train.jsonl", 60)
    content = {
        **SETTINGS,
        "model": str(model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [],
        "batch_tokens": 8 * 64,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("method", "way", "wire"), CELLS)
def test_a_rank_holds_what_the_planner_says(world, settings, tmp_path, method, way, wire):
    job = {"mesh": WAYS[way], "sharding": way, "wire": wire, "method": method, "output": str(tmp_path / "run")}
    ranks = world(4)("parallel.held_on_ranks:held", folder=str(settings), **job)
    run = from_mapping(json.loads((settings / "run.yaml").read_text()) | {"method": method})
    plan = made(run, WAYS[way], way, wire)
    task, *_ = make_task(run, read_facts(run.model), shared(probe(), 2, 2), lambda *_: None)
    given = {**dict(plan), **dict(plan.mesh)}
    choice = Choice(**{field.name: given[field.name] for field in dataclasses.fields(Choice)})
    planned = memory.timeline(task, choice)[-1].memory
    for found in ranks:
        for part, size in found.items():
            assert size == pytest.approx(getattr(planned, part), rel=0.02), part
