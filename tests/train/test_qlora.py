"""`method: qlora` from the settings to the merged model: trained, killed and continued, opened, merged."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import Die, Runs, assert_same, write_all
from tunesmith.kernels import nf4
from tunesmith.model import quantized, structure
from tunesmith.run.folder import read_plan
from tunesmith.run.merge import merge_run
from tunesmith.run.open import open_run
from tunesmith.train import events

TRAIN = ("train", "run.yaml", "--plan", "plan.json")
STEP = "tunesmith.train.step:TrainStep._forward_backward"
TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(runs: Runs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("qlora"), tiny_model, method="qlora", lora={"rank": 4})
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended
    return folder


def dequantized(model: Path, to: Path) -> Path:
    """A model folder with the linears of the layers replaced by what nf4 makes of them."""
    full = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for linear in structure.linears_of_layers(full).values():
        rows, columns = linear.weight.shape
        linear.weight.data = nf4.dequantize(nf4.quantize(linear.weight), [rows], columns, torch.float32)
    shutil.copytree(model, to)
    full.save_pretrained(to)
    return to


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in events.read(run) if record["event"] == "step"]


def test_the_losses_are_those_of_lora_over_the_dequantized_base(folder, runs, tiny_model, tmp_path):
    base = dequantized(tiny_model, tmp_path / "base")
    other = write_all(tmp_path / "lora", base, method="lora", lora={"rank": 4})
    assert runs(other, *TRAIN).code == 0
    found, expected = losses(folder / "run"), losses(other / "run")
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    plan = read_plan(folder / "run")
    assert plan is not None
    assert plan.storage == "nf4"


def test_a_killed_run_continues_to_the_same_bytes(folder, runs, tiny_model, tmp_path):
    killed = write_all(tmp_path / "killed", tiny_model, method="qlora", lora={"rank": 4})
    assert runs(killed, *TRAIN, die=Die(STEP, 35)).code == -signal.SIGKILL
    other = runs(killed, "train", "run.yaml", "method=lora")
    assert other.code == 1
    assert 'method was "qlora" and is now "lora"' in other.err
    assert runs(killed, *TRAIN).code == 0
    assert_same(killed / "run", folder / "run")


def test_in_8_bits_it_is_trained_continued_opened_and_merged(runs, tiny_model, tmp_path):
    lora = {"rank": 4, "bits": 8}
    whole, killed = (write_all(tmp_path / name, tiny_model, method="qlora", lora=lora) for name in ("whole", "killed"))
    assert runs(whole, *TRAIN).code == 0
    assert runs(killed, *TRAIN, die=Die(STEP, 35)).code == -signal.SIGKILL
    assert runs(killed, *TRAIN).code == 0
    assert_same(killed / "run", whole / "run")
    opened = open_run(whole / "run")
    assert any(isinstance(module, quantized.Int8Linear) for module in opened.model.modules())
    said = runs(whole, "merge", "run", "--to", str(tmp_path / "merged"))
    assert said.code == 0, said
    assert "rounded to 8 bits" in said.out


def test_dora_over_nf4_is_trained_continued_and_merged(runs, tiny_model, tmp_path):
    lora = {"rank": 4, "dora": True}
    whole, killed = (write_all(tmp_path / name, tiny_model, method="qlora", lora=lora) for name in ("whole", "killed"))
    assert runs(whole, *TRAIN).code == 0
    assert runs(killed, *TRAIN, die=Die(STEP, 35)).code == -signal.SIGKILL
    assert runs(killed, *TRAIN).code == 0
    assert_same(killed / "run", whole / "run")
    assert losses(whole / "run")[-1] < losses(whole / "run")[0]
    merged = merge_run(whole / "run", tmp_path / "merged")
    assert merged.difference < 1e-4 < merged.effect


def test_a_plan_that_does_not_quantize_is_no_plan_for_qlora(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path / "qlora", tiny_model, method="qlora", lora={"rank": 4})
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"storage":"nf4"', '"storage":"plain"'))
    ended = runs(folder, *TRAIN)
    assert ended.code == 1
    assert "method: qlora" in ended.err
    assert "storage" in ended.err


def test_the_adapter_is_one_for_peft_over_the_dequantized_base(folder, tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(dequantized(tiny_model, tmp_path / "base"), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "run" / "adapter").eval()
    opened = open_run(folder / "run")
    assert any(isinstance(module, quantized.Nf4Linear) for module in opened.model.modules())
    with torch.no_grad():
        torch.testing.assert_close(opened.model(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_merging_takes_the_base_of_the_files(folder, runs, tiny_model, tmp_path):
    merged = merge_run(folder / "run", tmp_path / "merged")
    assert merged.bits == 4
    assert merged.difference < 1e-4
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert torch.equal(found["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    name = "model.layers.0.self_attn.q_proj"
    opened = open_run(folder / "run", precision="fp32", storage="plain").model
    delta = opened.get_submodule(name).delta()
    torch.testing.assert_close(found[f"{name}.weight"], base[f"{name}.weight"] + delta)
    said = runs(folder, "merge", "run", "--to", str(tmp_path / "again"))
    assert said.code == 0
    assert "rounded to 4 bits" in said.out + said.err
    evaluated = runs(folder, "eval", "run")
    assert evaluated.code == 0, evaluated
