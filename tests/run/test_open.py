"""A run's model is opened where it was trained, or elsewhere in full precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.export.source import Source
from tunesmith.plan.plan import Memory, Plan
from tunesmith.run.assemble import assemble
from tunesmith.run.evaluate import held_out_of
from tunesmith.run.folder import read_plan, read_run
from tunesmith.run.open import open_model, placement
from tunesmith.run.start import prepare_run
from tunesmith.run.there import why_checkpoint


def plan(device: str) -> Plan:
    return Plan(
        device=device,
        threads=2,
        precision="bf16",
        attention="sdpa",
        is_compiled=False,
        master_weights=False,
        sequence_length=64,
        sequences_per_step=2,
        micro_batch=1,
        learning_rate=1e-3,
        deterministic=True,
        memory=Memory(),
        memory_limit=1,
    )


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_run_trained_on_a_gpu_is_opened_without_one(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert placement(plan("cuda")) == (("cuda", "bf16") if has_gpu else ("cpu", "fp32"))
    assert placement(plan("cpu")) == ("cpu", "bf16")
    assert placement(None) == ("cpu", "fp32")
    assert placement(plan("cuda"), precision="fp16", device="cpu") == ("cpu", "fp16")


def test_a_model_folder_is_opened_by_itself_and_others_are_refused(tiny_model, tmp_path):
    opened = open_model(Path(tiny_model))
    assert opened.step is None
    assert not opened.model.training
    ids = opened.tokenizer("hello", return_tensors="pt").input_ids
    assert torch.isfinite(opened.model(input_ids=ids).logits).all()
    with pytest.raises(UserError, match="holds no run"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ((), "holds no run .*; give the output folder of a run"),
        (None, "no such folder; give the output folder of a run"),
        (("config.json",), "holds no run .* but a model by itself, which `tunesmith chat`"),
        (("adapter_config.json",), "holds no run .* but an adapter by itself; peft merges it"),
        (("config.json", "../run.json"), "holds no run .* but what the run in .* has given; give that folder"),
    ],
)
def test_what_is_given_for_a_run_is_told_and_what_takes_it(tmp_path, there, said):
    folder = tmp_path / "out" / "model"
    if there is not None:
        folder.mkdir(parents=True)
    for name in there or ():
        (folder / name).write_text("{}")
    with pytest.raises(UserError, match=said):
        read_run(folder)


def test_a_classifier_by_itself_is_neither_talked_to_nor_quantized(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}'
    )
    with pytest.raises(UserError, match=r"is a classifier .* can be opened here"):
        open_model(tmp_path)
    with pytest.raises(UserError, match=r"is a classifier .* can be quantized here"), Source.of_model(str(tmp_path)):
        pass


@pytest.mark.parametrize("words", [["export", "--to", "gguf"], ["serve"], ["chat"], ["eval"], ["report"]])
def test_the_folder_of_a_sweep_is_refused_and_its_runs_are_named(tmp_path, words):
    variants = [{"name": "learning_rate=0.001"}, {"name": "learning_rate=0.002"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "variants": variants}))
    verb, *options = words
    ended = CliRunner().invoke(app, [verb, str(tmp_path), *options])
    assert ended.exit_code == 1
    said = ended.output.replace("\n", "")
    assert f"{tmp_path} holds a sweep of 2 runs; give the folder of one of them" in said
    assert "learning_rate=0.002" in said


def test_held_out_data_of_a_model_with_few_positions_are_read_as_they_were_in_training(tiny_model, tmp_path):
    """Nothing was said of `sequence_length`, so that its usual value is cut to what the model was made for."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": f"{n} words " * 400}) + "\n" for n in range(30)))
    given = {"model": str(tiny_model), "data": str(tmp_path / "train.jsonl"), "output": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    setting = prepare_run(from_mapping(given | {"device": "cpu", "steps": 2, "held_out": 4}), warn=lambda _: None)
    folder = assemble(setting).folder
    (found,) = held_out_of(folder, read_run(folder), read_plan(folder))
    assert found.fingerprint == setting.data.evals[0].fingerprint


@pytest.mark.parametrize("gone", ["", "adapter_config.json", "*.safetensors"])
def test_of_a_finished_run_whose_result_is_gone_the_checkpoint_is_opened_and_why_is_said(trained, tmp_path, gone):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    lose(folder / "adapter", gone)
    lost = folder / "adapter" / gone if gone else folder / "adapter"
    step = open_model(folder).step
    assert step == 12
    assert why_checkpoint(folder, step) == (
        f"The run was finished, but {lost} is gone; this is its checkpoint of step 12, and `tunesmith train` makes "
        "the result again."
    )
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match=r"was finished, but .*adapter.* is gone; put it back, or `tunesmith train`"):
        open_model(folder)
    (folder / "summary.json").unlink()
    assert why_checkpoint(folder, step) == "The run is not finished; this is its checkpoint of step 12."
    with pytest.raises(UserError, match=r"holds no trained weights yet; run `tunesmith train` first"):
        open_model(folder)


def lose(result: Path, what: str) -> None:
    if not what:
        shutil.rmtree(result)
    for file in result.glob(what) if what else ():
        file.unlink()
