"""Every causal family of the installed transformers trains as by a plain loop, or is refused in one sentence."""

from __future__ import annotations

import pytest

import parity
from families import NAMED, ODD, causal_families
from support import merged, support

USUAL = {
    "bloom": "packed",
    "gemma2": "packed",
    "gemma3n_text": "packed",  # widths of its MLPs layer by layer
    "gemma4": "packed",  # encoders beside it that do not know the text's attention; heads of two sizes
    "jetmoe": "packed",
    "llama4_text": "packed",  # its body is not where it says
    "mamba": "padded",
    "qwen2": "packed",
}
"""Of each kind one, which is tried every time."""


@pytest.mark.parametrize("family", USUAL)
def test_losses_are_those_of_a_plain_loop(tmp_path, family):
    row = parity.compare(family, "lora", tmp_path / "run")
    assert (row.outcome, row.layout) == ("right", USUAL[family]), row


def test_everything_that_a_family_can_do_is_tried(tmp_path):
    row = support("mistral", tmp_path / "run")
    assert max(row[cell] for cell in ("lora", "lora_unpacked", "full", "full_unpacked", "qlora")) < parity.TOLERANCE
    assert row["merge"] < 1e-4
    assert [row[cell] for cell in ("compiled", "tensor", "gguf")] == ["yes"] * 3, row
    assert row["fused"] == ["rope", "swiglu", "adapters"]


@pytest.mark.parametrize("family", ["gemma3n_text", "llama4_text"])
def test_odd_models_are_merged(tmp_path, family):
    """One has adapters outside the layers; one sends its tokens to where the embedding's weight is."""
    job = parity.train(parity.write_model(family, tmp_path / "model"), "lora", tmp_path / "lora").job
    job.write_result()
    assert merged(job.folder, tmp_path / "merged") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", causal_families())
def test_every_family_is_right_or_refused_in_one_sentence(tmp_path, family, method):
    row = parity.compare(family, method, tmp_path / "run")
    assert row.is_acceptable, row
    assert row.outcome == "right" or family not in NAMED, row
    if row.outcome == "refused":
        assert "\n" not in row.reason
        assert row.reason.endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_configs_are_right(tmp_path, odd, method):
    family, changes = ODD[odd]
    row = parity.compare(family, method, tmp_path / "run", **changes)
    assert row.outcome == "right", row
    assert row.layout == "packed"
    assert row.is_acceptable
