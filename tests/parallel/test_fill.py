"""A sharded model is read layer by layer: no rank ever holds more of it than its share and one layer."""

from __future__ import annotations

import json

import pytest

from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_rank_never_holds_more_than_its_share_and_one_layer(world, tmp_path, method):
    model = make_tiny_model(tmp_path / "model", num_hidden_layers=8, hidden_size=64)
    write_data(tmp_path / "train.jsonl", 20)
    content = {**SETTINGS, "model": str(model), "lora": {"rank": 4}, "eval": [], "method": method}
    content["data"] = [{"path": str(tmp_path / "train.jsonl")}]
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    options = {"folder": str(tmp_path), "mesh": {"shard": 4}, "sharding": "zero3", "output": str(tmp_path / "run")}
    for found in world(4)("parallel.on_ranks:most_that_was_whole", **options):
        assert found["parts"] == 9  # eight layers, and what is around them
        outside = found["all"] - 8 * found["layer"]
        share = found["all"] / 4
        assert found["most"] < share + 1.1 * max(found["layer"], outside) + 4096
        assert found["most"] < 0.75 * found["all"]
