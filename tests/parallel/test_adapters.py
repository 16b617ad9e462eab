"""Two ranks see the losses of one, and write what it writes, with adapters that begin elsewhere and with peft's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny import write_all
from tunesmith.train import events

pytest.importorskip("peft")
pytestmark = pytest.mark.distributed
IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
SETTINGS = {
    "pissa": {"lora": {"rank": 3, "init": "pissa", "b_rate": 4}},
    "IA3": {"method": "peft", "lora": {}, "peft": {"peft_type": "IA3", **IA3}},
    "PROMPT_TUNING": {"method": "peft", "lora": {}, "peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}},
}


@pytest.fixture(scope="module")
def train(runs, tiny_model, tmp_path_factory):
    known: dict[tuple[str, str], Path] = {}

    def of(kind: str, sharding: str) -> Path:
        if (kind, sharding) not in known:
            folder = tmp_path_factory.mktemp("run") / "x"
            write_all(folder, tiny_model, epochs=1, **SETTINGS[kind])
            plan = json.loads((folder / "plan.json").read_text())
            axis = {"none": {}, "ddp": {"replicate": 2}, "zero3": {"shard": 2}}[sharding]
            plan |= {"sharding": sharding, "mesh": {**plan["mesh"], **axis}}
            (folder / "plan.json").write_text(json.dumps(plan))
            ended = runs(folder, "train", "run.yaml", "--plan", "plan.json", forks_ranks=sharding != "none")
            assert ended.code == 0, ended.err
            known[kind, sharding] = folder / "run"
        return known[kind, sharding]

    return of


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("pissa", "zero3"),
        ("IA3", "ddp"),
        pytest.param("pissa", "ddp", marks=pytest.mark.slow),
        pytest.param("IA3", "zero3", marks=pytest.mark.slow),
        pytest.param("PROMPT_TUNING", "zero3", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_see_the_losses_of_one_and_write_the_same_adapter(train, kind, sharding):
    one, two = train(kind, "none"), train(kind, sharding)
    losses = [[record["loss"] for record in events.read(run) if record["event"] == "step"] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    mine, theirs = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).abs().max() < 2e-3, name
    configs = [json.loads((run / "adapter" / "adapter_config.json").read_text()) for run in (one, two)]
    assert configs[0] == configs[1]
