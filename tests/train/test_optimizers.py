"""Every kind of optimizer state goes through the checkpoints of a real run: killed and continued, the same bytes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors import safe_open

from tiny import Die, assert_same, write_all
from tiny_model import make_tiny_model
from tunesmith.train import events

TRAIN = ("train", "run.yaml", "--plan", "plan.json")
STEP = "tunesmith.train.step:TrainStep._forward_backward"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows that have a block."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), intermediate_size=256, initializer_range=0.05)


@pytest.mark.parametrize(
    ("optimizer", "changes", "dtypes"),
    [
        ("adamw_8bit", {}, {"U8", "F32"}),
        ("muon", {}, {"F32"}),
        ("badam", {"precision": "bf16", "master_weights": True}, {"F32", "BF16"}),
        pytest.param("lisa", {}, {"F32"}, marks=pytest.mark.slow),
        (
            "adamw",
            {"precision": "bf16", "master_weights": True, "micro_batch": 4, "optimizer_in_backward": True},
            {"F32"},
        ),
        ("adamw_4bit", {"precision": "bf16", "master_weights": False}, {"U8", "F32", "BF16"}),
    ],
)
def test_a_killed_run_continues_to_the_same_bytes(optimizer, changes, dtypes, runs, model, tmp_path):
    folders = []
    for name in ("whole", "killed"):
        folder = write_all(
            tmp_path / name,
            model,
            method="full",
            optimizer=optimizer,
            steps=5,
            learning_rate=1e-3,
            save_every=3,
            max_grad_norm=None if "optimizer_in_backward" in changes else 1.0,
        )
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | changes))
        folders.append(folder)
    whole, killed = folders
    ended = runs(whole, *TRAIN)
    assert ended.code == 0, ended
    assert runs(killed, *TRAIN, die=Die(STEP, 20 // changes.get("micro_batch", 1))).code == -signal.SIGKILL
    ended = runs(killed, *TRAIN)
    assert ended.code == 0, ended
    assert "Continuing after step 3" in ended.out
    assert_same(killed / "run", whole / "run")
    losses = [record["loss"] for record in events.read(whole / "run") if record["event"] == "step"]
    assert losses[-1] < losses[0]
    newest = max((whole / "run" / "checkpoints").glob("step-*")) / "tensors.safetensors"
    with safe_open(newest, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == dtypes  # noqa: SIM118


def test_a_plan_with_other_states_than_the_optimizer_asked_for_is_refused(runs, model, tmp_path):
    folder = write_all(tmp_path, model, method="full", optimizer="adamw_8bit")
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"optimizer_states":"int8"', '"optimizer_states":"fp32"'))
    ended = runs(folder, *TRAIN)
    assert ended.code == 1
    assert "optimizer_states is fp32, but optimizer: adamw_8bit makes it int8" in ended.err


def test_a_plan_that_releases_gradients_is_refused_where_all_are_needed(runs, model, tmp_path):
    folder = write_all(tmp_path, model, method="full", precision="bf16")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"optimizer_in_backward": True}))
    ended = runs(folder, *TRAIN)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "max_grad_norm 1 needs them all" in ended.err
    ended = runs(folder, *TRAIN, "max_grad_norm=null")
    assert ended.code == 1
    assert "4 micro-batches to sum" in ended.err
