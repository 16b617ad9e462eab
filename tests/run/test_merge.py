"""A merged model has all of what its adapter learned, in the base's precision."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import write_all
from tunesmith.model import lora
from tunesmith.run.merge import merge_run
from tunesmith.run.open import open_run


@pytest.fixture(scope="module")
def folder(runs, tiny_model, tmp_path_factory):
    """A short run over a base in bf16."""
    model = tmp_path_factory.mktemp("models") / "bf16"
    shutil.copytree(tiny_model, model)
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(model)
    folder = write_all(
        tmp_path_factory.mktemp("run"), model, method="lora", lora={"rank": 4}, steps=4, learning_rate=3e-4
    )
    ended = runs(folder, "train", "run.yaml")
    assert ended.code == 0, ended
    return folder


def test_rounding_to_bf16_keeps_what_an_adapter_adds(folder, tmp_path):
    merged = merge_run(folder / "run", tmp_path / "merged")
    assert merged.precision == "bf16"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    adapters = lora.adapters(open_run(folder / "run", precision="fp32", storage="plain").model)
    assert len(adapters) == merged.adapters
    added = lengths = nearest = 0.0
    for name, adapter in adapters.items():
        base, delta, result = adapter.base.weight, adapter.delta(), found[f"{name}.weight"]
        assert result.dtype == torch.bfloat16
        assert ((result.float() - base - delta).abs() <= 2**-7 * (base + delta).abs()).all()  # one of the two beside it
        added += ((result.float() - base) * delta).sum().item()
        nearest += (((base + delta).bfloat16().float() - base) * delta).sum().item()
        lengths += delta.square().sum().item()
    assert added / lengths == pytest.approx(1.0, abs=0.05)
    assert nearest / lengths < 0.9  # what there is to lose


def test_it_is_the_same_each_time(folder, tmp_path):
    for name in ("once", "again"):
        merge_run(folder / "run", tmp_path / name)
    once, again = (tmp_path / name / "model.safetensors" for name in ("once", "again"))
    assert once.read_bytes() == again.read_bytes()
