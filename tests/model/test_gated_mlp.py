from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tunesmith.model.gated import GatedMlp, use_memory_efficient_swiglu

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}


def model(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, **settings))


@pytest.mark.parametrize("settings", [{}, {"mlp_bias": True}], ids=["plain", "with biases"])
def test_a_model_computes_the_same_under_the_same_names(settings):
    given = model(**settings)
    tokens = torch.arange(20)[None]

    def results():
        logits = given(tokens).logits
        named = dict(given.named_parameters())
        return logits, dict(zip(named, torch.autograd.grad(logits.square().mean(), named.values()), strict=True))

    before, expected = results()
    names = list(given.state_dict())
    assert use_memory_efficient_swiglu(given) == 2
    after, found = results()
    assert list(given.state_dict()) == names
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(found, expected)


def test_looking_for_them_draws_no_random_number():
    given = model()
    before = torch.get_rng_state()
    use_memory_efficient_swiglu(given)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_not_there_yet_are_no_hindrance():
    with torch.device("meta"):
        given = model()
    assert use_memory_efficient_swiglu(given) == 2


class Doubled(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class WithNorm(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)


@pytest.mark.parametrize("kind", [Doubled, WithNorm])
def test_what_computes_something_else_stays(kind):
    assert use_memory_efficient_swiglu(nn.Sequential(kind(LlamaConfig(**SIZES)))) == 0


def test_another_activation_stays():
    assert use_memory_efficient_swiglu(model(hidden_act="gelu")) == 0


def test_linears_that_are_no_plain_ones_stay():
    given = model()
    for module in given.modules():
        if isinstance(module, LlamaMLP):
            module.down_proj = type("Other", (nn.Linear,), {})(48, 32)
    assert use_memory_efficient_swiglu(given) == 0
    assert not any(isinstance(module, GatedMlp) for module in given.modules())
