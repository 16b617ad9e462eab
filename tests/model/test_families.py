"""Every causal family of the installed transformers trains as by a plain loop, or is refused in one sentence."""

from __future__ import annotations

import pytest

import parity
from families import causal_families

USUAL = {"bloom": "packed", "gemma2": "packed", "jetmoe": "packed", "mamba": "padded"}
"""Of each kind one, which is tried every time."""


@pytest.mark.parametrize("family", USUAL)
def test_losses_are_those_of_a_plain_loop(tmp_path, family):
    row = parity.compare(family, "lora", tmp_path / "run")
    assert (row.outcome, row.layout) == ("right", USUAL[family]), row


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", causal_families())
def test_every_family_is_right_or_refused_in_one_sentence(tmp_path, family, method):
    row = parity.compare(family, method, tmp_path / "run")
    assert row.is_acceptable, row
    if row.outcome == "refused":
        assert "\n" not in row.reason
        assert row.reason.endswith(".")
