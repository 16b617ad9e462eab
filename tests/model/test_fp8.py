"""Trained linears in fp8: within what the format rounds, under their old names, and only where sizes allow it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tunesmith.config.schema import Run
from tunesmith.measure.bench import Workload, plan_for
from tunesmith.model import attention
from tunesmith.model.forward import token_losses, trial_inputs
from tunesmith.model.fp8 import Fp8Linear, use_fp8_head_gradient, use_fp8_linears
from tunesmith.parallel.prepare import make_trainable
from tunesmith.plan.plan import ForwardSpec


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
    swapped = use_fp8_linears(model)
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
    assert use_fp8_linears(model) == 1
    assert isinstance(model.even, Fp8Linear)


@pytest.mark.parametrize(
    ("method", "matmul_dtype", "in_fp8"),
    [("lora", "fp8", True), ("lora", "plain", False), ("full", "fp8", False), ("full", "plain", False)],
)
def test_the_heads_gradient_is_in_fp8_where_the_head_is_frozen_and_products_are(
    tiny_model, method, matmul_dtype, in_fp8
):
    """With an embedding that is the head too; what is saved does not change."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names = model.state_dict().keys()
    plan = plan_for(
        Workload("tiny", method, 1, 64), device="cpu", matmul_dtype=matmul_dtype, checkpointed_layers=0, compiled=False
    )
    make_trainable(model, Run(model="m", data="d", method=method), plan)
    head = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight
    assert hasattr(head, "values8_hw") == in_fp8
    assert {name for name in names if "proj" not in name} <= model.state_dict().keys()
    assert not any("8_hw" in name or "scale_h1" in name for name in model.state_dict())


def test_the_frozen_heads_copy_is_what_the_gradient_goes_by(tiny_model):
    attention.register()
    losses, found = [], []
    for in_fp8 in (False, True, None):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        model.set_attn_implementation(attention.NAME)
        model.get_output_embeddings().weight.requires_grad_(False)
        if in_fp8 is not False:
            assert use_fp8_head_gradient(model)
        if in_fp8 is None:  # not what the weight is
            model.get_output_embeddings().scale_h1.zero_()
        total, _ = token_losses(model, trial_inputs(259, torch.device("cpu")), ForwardSpec("packed"))
        losses.append(total.item())
        found.append(torch.autograd.grad(total, model.base_model.norm.weight)[0])
    assert losses[0] == losses[1] == losses[2]
    assert 0 < ((found[1] - found[0]).norm() / found[0].norm()).item() < 0.04
    assert ((found[2] - found[0]).norm() / found[0].norm()).item() > 0.04


def test_a_head_that_is_trained_or_does_not_fit_keeps_its_precision(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert not use_fp8_head_gradient(model)
    model.set_output_embeddings(nn.Linear(24, 64))
    model.get_output_embeddings().requires_grad_(False)
    assert not use_fp8_head_gradient(model)
    assert not hasattr(model.get_output_embeddings(), "values8_hw")
