"""A process whose optimizer states are more than its memory may be: on disk they train, are saved and go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny import Die, write_all
from tiny_model import make_tiny_model

MIB = 2**20
PARAMETERS = 98304 * 128
MEMORY = 300 * MIB
"""Beside the 94 MiB of the states: weights, gradients, those of the head apart, and its logits. On disk 280 are
enough, in memory 320 are too few."""
PIECES = {"tunesmith.optim.fused:DISK_PIECE": 1 << 17}
"""As much smaller as this model is than those that need a disk."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("wide"), vocab_size=98304, hidden_size=128)


def test_states_that_exceed_the_memory_of_a_process_are_trained_on_disk(runs, wide, tmp_path):
    def train(name: str, home: str, **options):
        folder = tmp_path / name
        if not folder.exists():
            settings = {"method": "full", "steps": 3, "batch_tokens": 64, "eval": [], "learning_rate": 1e-3}
            write_all(folder, wide, **settings)
            plan = json.loads((folder / "plan.json").read_text())
            (folder / "plan.json").write_text(json.dumps(plan | {"offload_optimizer": home, "async_checkpoint": False}))
        return runs(folder, "train", "run.yaml", "--plan", "plan.json", **options)

    assert train("whole", "none").code == 0
    beyond = train("beyond", "none", memory=MEMORY)
    assert beyond.code == 1
    assert "error: The memory of this machine ran out, though" in beyond.err
    assert "checkpointed_layers in" in beyond.err
    limits = {"memory": MEMORY, "constants": PIECES}
    killed = train("run", "disk", die=Die("tunesmith.optim.build:Optimizer.step", 3), **limits)
    assert killed.code == -signal.SIGKILL, killed.err
    assert [file.name for file in (tmp_path / "run" / "run").glob(".scratch*")] == []
    ended = train("run", "disk", **limits)
    assert ended.code == 0, ended.err
    assert "step 2" in ended.out + ended.err  # where it goes on
    found, expected = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("run", "whole"))
    assert sum(tensor.numel() for tensor in found.values()) > PARAMETERS
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-5, name  # torch's own AdamW rounds elsewhere
    states = load_file(tmp_path / "run/run/checkpoints/step-00000003/tensors.safetensors")
    assert sum(tensor.nbytes for name, tensor in states.items() if "/root/" in name) >= 4 * PARAMETERS
