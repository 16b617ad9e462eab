"""A run's model is opened where it was trained, or elsewhere in full precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunesmith.errors import UserError
from tunesmith.plan.plan import Memory, Plan
from tunesmith.run.open import open_model, placement


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
