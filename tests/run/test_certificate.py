"""A certificate tells what training did; each of its checks fails on a run that violates it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from export.models import make_run
from tunesmith.cli.main import app
from tunesmith.model import forward
from tunesmith.run.certificate import certify


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("certified"), tiny_model, steps=3)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def verdicts(made):
    return {name: check["verdict"] for name, check in made["checks"].items()}


def test_a_run_without_faults_passes_every_check_and_is_not_looked_at_twice(run, monkeypatch):
    made = certify(run)
    assert set(verdicts(made).values()) == {"passed"}, made
    assert json.loads((run / "certificate.json").read_text()) == made
    assert all(made["hashes"].values())
    monkeypatch.setattr("tunesmith.run.certificate.open_run", None)
    assert certify(run) == made


def test_weights_that_were_changed_after_training_are_not_what_was_evaluated(run):
    file = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({**tensors, name: tensors[name] * 3}, file, metadata={"format": "pt"})
    assert verdicts(certify(run))["saved_is_evaluated"] == "failed"


def test_a_config_that_was_changed_after_the_certificate_is_looked_at_again(run):
    certify(run)
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 500}))
    assert verdicts(certify(run))["saved_is_evaluated"] == "failed"


def test_documents_that_see_each_other_are_found(run, monkeypatch):
    own = forward.packed_hidden_states

    def leaking(model, inputs, *others, **named):
        everything = torch.tensor([0, len(inputs.tokens)], dtype=torch.int32)
        return own(model, replace(inputs, boundaries=everything, longest=len(inputs.tokens)), *others, **named)

    monkeypatch.setattr(forward, "packed_hidden_states", leaking)
    ended = CliRunner().invoke(app, ["eval", str(run), "--certificate", "--json"])
    assert ended.exit_code == 1
    made = json.loads((run / "certificate.json").read_text())
    assert verdicts(made)["documents_apart"] == "failed", made
    assert "a token's loss changed by" in made["checks"]["documents_apart"]["found"]


def test_weights_without_influence_had_no_gradient_and_stay_where_they_were(tiny_model, tmp_path):
    """Of a layer whose attention is multiplied by 0."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    run = make_run(tmp_path, model, steps=2, lora={"rank": 4, "targets": ["q_proj", "v_proj"]})
    made = certify(run)
    assert verdicts(made)["gradients"] == "failed"
    assert made["checks"]["gradients"]["found"].startswith("4 of 8 trained tensors never had a gradient")
    assert verdicts(made)["moved"] == "failed"
    assert "lora_B" in made["checks"]["moved"]["found"]
    assert verdicts(made)["end_of_turn"] == "passed"


def test_data_that_never_end_a_turn_are_found(tiny_model, tmp_path):
    (tmp_path / "tokens.jsonl").write_text(
        "".join(json.dumps({"input_ids": list(range(10 + n, 40 + n))}) + "\n" for n in range(12))
    )
    run = make_run(tmp_path, tiny_model, steps=2, data=str(tmp_path / "tokens.jsonl"))
    made = certify(run)
    assert verdicts(made)["end_of_turn"] == "failed"
    assert "is a target in none of 12 examples" in made["checks"]["end_of_turn"]["found"]


def test_a_tokenizer_without_an_end_is_found(run):
    """Which training refuses, and which can be lost later. Nothing would end its answers."""
    for file in run.rglob("chat_template.jinja"):
        file.unlink()
    for file in run.rglob("tokenizer_config.json"):
        said = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in said.items() if name != "eos_token"}))
    made = certify(run)
    assert verdicts(made)["end_of_turn"] == "failed", made
    assert "has no token that ends a turn or a text" in made["checks"]["end_of_turn"]["found"]


@pytest.mark.slow
def test_full_runs_are_certified_and_frozen_tensors_found(tiny_model, tmp_path):
    run = make_run(tmp_path, tiny_model, method="full", steps=2, learning_rate=1e-3)
    assert set(verdicts(certify(run)).values()) == {"passed"}
    result, base = run / "model" / "model.safetensors", tiny_model / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**load_file(result), name: load_file(base)[name]}, result, metadata={"format": "pt"})
    made = certify(run)
    assert verdicts(made)["moved"] == "failed"
    assert name in made["checks"]["moved"]["found"]
