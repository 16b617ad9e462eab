"""States of other kinds over several ranks: each has those of its rows, and they are those of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.kernels.update import halved, preround_

pytestmark = pytest.mark.distributed
STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """A model whose down projections have rows of a block."""
    folder = tmp_path_factory.mktemp("settings")
    model = make_tiny_model(folder / "model", intermediate_size=256, initializer_range=0.05)
    write_data(folder / "train.jsonl", 60)
    content = {
        **SETTINGS,
        "model": str(model),
        "method": "full",
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [],
        "learning_rate": 1e-3,
        "steps": STEPS,
        "save_every": 1000,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


STATE = {"adamw_8bit": "exp_avg", "lion": "exp_avg", "muon": "momentum_buffer"}
OFF = {"adamw_8bit": 1e-4, "lion": 1e-3, "muon": 1e-2}
"""Signs, and matmuls in bf16, make much of the last bits of gradients."""


@pytest.mark.parametrize(("optimizer", "after"), [("adamw_8bit", 1), ("lion", 2), ("muon", 1)])
def test_begun_on_two_ranks_and_ended_on_others_a_run_is_that_of_one(world, settings, tmp_path, optimizer, after):
    def train(until: int, ranks: int, output: str) -> list[float]:
        way = {"mesh": {"shard": 2}, "sharding": "zero3"} if ranks == 2 else {"mesh": {}, "sharding": "none"}
        options = {"folder": str(settings), "output": str(tmp_path / output), "optimizer": optimizer, **way}
        return world(ranks)("parallel.on_ranks:train_for", until=until, **options)[0]["losses"]

    expected = train(STEPS, 1, "whole")
    found = train(STOP, 2, "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    codes = [load_file(file) for file in sorted(checkpoint.glob("rank-*"))]
    name = f"optimizer/{STATE[optimizer]}/model.layers.0.mlp.down_proj.weight"
    assert [one[name].shape for one in codes] == [(16, 256), (16, 256)]
    assert str(codes[0][name].dtype) == ("torch.uint8" if optimizer == "adamw_8bit" else "torch.float32")
    found += train(STEPS, after, "run")
    assert found == pytest.approx(expected, rel=OFF[optimizer])
    assert found[-1] < found[0]


def test_weights_without_masters_are_rounded_over_ranks_as_on_one(world, settings, tmp_path):
    def train(ranks: int, output: str, has_masters: bool) -> list[float]:
        way = {"mesh": {"shard": 2}, "sharding": "zero3"} if ranks == 2 else {"mesh": {}, "sharding": "none"}
        options = {"folder": str(settings), "output": str(tmp_path / output), "batch_tokens": 128}
        # The plan would take fp32 on a CPU without bf16.
        moved = {"precision": "bf16", "micro_batch": 2 // ranks, "master_weights": has_masters}
        return world(ranks)("parallel.on_ranks:train_for", until=STEPS, moved=moved, **options, **way)[0]["losses"]

    rounded = train(2, "rounded", has_masters=False)
    (checkpoint,) = (tmp_path / "rounded" / "checkpoints").glob("step-*")
    held = load_file(next(checkpoint.glob("rank-*")))["weights/model.layers.0.mlp.down_proj.weight"]
    assert held.dtype == torch.bfloat16
    assert held.shape == (16, 256)
    assert rounded == pytest.approx(train(1, "alone", has_masters=False), rel=5e-3)
    masters = train(2, "masters", has_masters=True)
    assert masters == pytest.approx(train(1, "masters alone", has_masters=True), rel=5e-3)
    assert rounded == pytest.approx(masters, rel=2e-2)
    assert rounded[-1] < 0.97 * rounded[0]
    # Shards in fp32 are held so that the nearest bf16 numbers, which FSDP computes with, are drawn stochastically;
    # checkpoints have them as they are.
    (checkpoint,) = (tmp_path / "masters" / "checkpoints").glob("step-*")
    name = "model.layers.0.mlp.down_proj.weight"
    saved = torch.cat([load_file(file)[f"weights/{name}"] for file in sorted(checkpoint.glob("rank-*"))])
    result = load_file(tmp_path / "masters" / "model" / "model.safetensors")[name]
    assert torch.equal(result, halved(saved, torch.bfloat16))
    assert not torch.equal(result, saved.bfloat16())
    preround_(saved)
    assert torch.equal(result, saved.bfloat16())
