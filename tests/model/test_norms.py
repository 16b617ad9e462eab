"""RMS norms are swapped where torch's kernel computes the same, and nowhere else."""

from __future__ import annotations

import pytest
import torch

import families
from tunesmith.model.norms import FusedNorm, FusedNorms


@pytest.mark.parametrize(("family", "count"), [("llama", 5), ("gemma", 0), ("gpt2", 0)])
@torch.no_grad()
def test_norms_that_are_plain_are_swapped_for_a_while_and_nothing_else(family, count):
    model = families.tiny_model(family).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.rand_like(parameter))
    ids = torch.arange(3, 19)[None]
    own, before = model(input_ids=ids).logits, dict(model.named_modules())
    with FusedNorms(model).swapped():
        assert sum(isinstance(module, FusedNorm) for module in model.modules()) == count
        torch.testing.assert_close(model(input_ids=ids).logits, own, rtol=1e-4, atol=1e-4)
    assert dict(model.named_modules()) == before
