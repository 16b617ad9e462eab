"""What a rank holds of weights and states is what the planner says it does."""

from __future__ import annotations

import json

import pytest

from parallel.on_ranks import made
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.plan import memory
from tunesmith.plan.choice import Choice
from tunesmith.plan.hardware import probe, shared
from tunesmith.plan.models import read_facts
from tunesmith.plan.search import make_task

pytestmark = pytest.mark.distributed
WAYS = {"ddp": {"replicate": 4}, "zero1": {"shard": 4}, "zero3": {"shard": 4}, "hybrid": {"replicate": 2, "shard": 2}}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_holds_what_the_planner_says(world, tmp_path, way):
    model = make_tiny_model(tmp_path / "model", vocab_size=272, hidden_size=64)
    write_data(tmp_path / "train.jsonl", 40)
    content = {**SETTINGS, "model": str(model), "method": "full", "eval": [], "batch_tokens": 4 * 64}
    content |= {"data": [{"path": str(tmp_path / "train.jsonl")}], "output": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    run = from_mapping(content)
    task, _ = make_task(run, read_facts(run.model), shared(probe().changed(gpus=()), 4), lambda *_: None)
    plan = made(run, WAYS[way], way)
    choice = Choice(sharding=way, replicate=plan.mesh.replicate, shard=plan.mesh.shard)
    predicted = next(one for one in memory.timeline(task, choice) if one.name == "optimizer step").memory
    for found in world(4)("parallel.on_ranks:held", folder=str(tmp_path), mesh=WAYS[way], sharding=way):
        assert found["weights"] == pytest.approx(predicted.master or predicted.weights, rel=0.02)
        assert found["states"] == pytest.approx(predicted.optimizer, rel=0.02)
