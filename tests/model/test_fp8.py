"""Trained linears in fp8: within what the format rounds, under their old names, and only where sizes allow it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tunesmith.model.fp8 import Fp8Linear, use_fp8_products


@pytest.mark.parametrize("tokens", [48, 50])
@pytest.mark.parametrize("has_bias", [True, False])
def test_output_and_gradients_stay_within_the_rounding_of_fp8(tokens, has_bias):
    torch.manual_seed(0)
    plain = nn.Linear(64, 32, bias=has_bias)
    x = torch.randn(tokens, 64, requires_grad=True)
    for exact, rounded in zip(*(_results(linear, x) for linear in (plain, Fp8Linear(plain))), strict=True):
        assert exact.shape == rounded.shape
        assert 0 < ((rounded - exact).norm() / exact.norm()).item() < 0.06


def _results(linear, x):
    y = linear(x)
    return y, *torch.autograd.grad(y.square().sum(), (x, *linear.parameters()))


def test_the_head_is_left_alone_and_names_stay(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = dict(model.named_parameters())
    swapped = use_fp8_products(model)
    assert swapped == sum(isinstance(module, Fp8Linear) for module in model.modules()) > 0
    assert type(model.get_output_embeddings()) is nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_sizes_that_fp8_products_cannot_have_are_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.even = nn.Linear(24, 32), nn.Linear(32, 32)

        def get_output_embeddings(self):
            return None

    model = Model()
    assert use_fp8_products(model) == 1
    assert isinstance(model.even, Fp8Linear)
