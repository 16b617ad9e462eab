from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tunesmith.kernels.gating import Gating
from tunesmith.model.gated import GatedMlp, find_gated, use_memory_efficient_gates

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}


def model(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, **settings))


FAMILIES = {
    "llama": ({}, "swiglu"),
    "llama with biases": ({"mlp_bias": True}, "swiglu"),
    "llama with quick gelu": ({"hidden_act": "quick_gelu"}, "geglu"),
    "gemma2": ({}, "geglu"),
    "gemma3_text": ({"hidden_activation": "gelu"}, "geglu"),
    "phi3": ({}, "swiglu"),
    "glm4": ({}, "swiglu"),
    "lfm2": ({"layer_types": ["full_attention"] * 2}, "swiglu"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_under_the_same_names(family):
    settings, gate = FAMILIES[family]
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    given = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.split(" ")[0], **SIZES, **heads, **settings))
    tokens = torch.arange(20)[None]

    def results():
        logits = given(tokens).logits
        named = dict(given.named_parameters())
        return logits, dict(zip(named, torch.autograd.grad(logits.square().mean(), named.values()), strict=True))

    before, expected = results()
    names = list(given.state_dict())
    assert use_memory_efficient_gates(given) == [gate] * 2
    after, found = results()
    assert list(given.state_dict()) == names
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Clamped(nn.Module):
    """Gate and up from one linear, and clamped, as MiniMax's dense MLP has them."""

    def __init__(self, is_interleaved: bool = False):
        super().__init__()
        self.alpha, self.limit, self.is_interleaved = 1.702, 7.0, is_interleaved
        self.gate_up, self.out = nn.Linear(8, 40), nn.Linear(20, 8)

    def forward(self, hidden):
        y = self.gate_up(hidden)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.is_interleaved else y.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return self.out((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


def test_a_clamped_gate_is_found_with_its_numbers():
    torch.manual_seed(0)
    given, x = nn.Sequential(Clamped()), 20 * torch.randn(1, 30, 8)
    expected = given(x)
    assert find_gated(given[0]).gating == Gating("sigmoid", 1.702, 7.0, 1.0)
    assert use_memory_efficient_gates(given) == ["clamped_swiglu"]
    torch.testing.assert_close(given(x), expected)


def test_a_gate_between_the_lines_of_up_stays():
    assert use_memory_efficient_gates(nn.Sequential(Clamped(is_interleaved=True))) == []


def test_gates_that_were_not_asked_for_stay():
    assert use_memory_efficient_gates(model(), ["geglu"]) == []


@pytest.mark.slow
def test_a_compiled_layer_has_it_in_one_graph():
    """Eagerly run graphs; the kernels' own compilation is tested on a GPU."""
    given = model(hidden_act="gelu_pytorch_tanh").model.layers[0].mlp
    held = nn.Sequential(given)
    use_memory_efficient_gates(held)
    x = torch.randn(1, 6, 32)
    torch.testing.assert_close(torch.compile(held, backend="aot_eager", fullgraph=True)(x), given(x))


def test_looking_for_them_draws_no_random_number():
    given = model()
    before = torch.get_rng_state()
    use_memory_efficient_gates(given)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_not_there_yet_are_no_hindrance():
    with torch.device("meta"):
        given = model()
    assert use_memory_efficient_gates(given) == ["swiglu"] * 2


class Doubled(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class WithNorm(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)


class WithDropout(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(super().forward(x))


@pytest.mark.parametrize("kind", [Doubled, WithNorm, WithDropout])
def test_what_computes_something_else_stays(kind):
    assert use_memory_efficient_gates(nn.Sequential(kind(LlamaConfig(**SIZES))).eval()) == []


def test_another_activation_stays():
    assert use_memory_efficient_gates(model(hidden_act="relu")) == []


def test_linears_that_are_no_plain_ones_stay():
    given = model()
    for module in given.modules():
        if isinstance(module, LlamaMLP):
            module.down_proj = type("Other", (nn.Linear,), {})(48, 32)
    assert use_memory_efficient_gates(given) == []
    assert not any(isinstance(module, GatedMlp) for module in given.modules())
