"""A model whose attention was replaced gives the same losses and gradients, under the same names; what would not is
left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from test_forward import HEAD, SMALL, build
from transformers import (
    CohereConfig,
    Gemma2Config,
    Glm4Config,
    GlmConfig,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from tunesmith.config.schema import Lora
from tunesmith.model import attention, lora
from tunesmith.model.forward import token_losses, trial_inputs
from tunesmith.model.fp8 import use_fp8_linears
from tunesmith.model.fuse import fuse
from tunesmith.model.quantized import quantize_linears
from tunesmith.model.rotary import RotaryAttention, fuse_rope
from tunesmith.plan.plan import ForwardSpec

CPU = torch.device("cpu")
PART = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
REPLACED = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, attention_bias=True),
    MistralConfig(**SMALL, sliding_window=4),
    Gemma2Config(**SMALL, **HEAD, sliding_window=4, query_pre_attn_scalar=5),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, **HEAD),
    Olmo2Config(**SMALL),
    CohereConfig(**SMALL),
    CohereConfig(**SMALL, use_qk_norm=True),
    GlmConfig(**SMALL, **HEAD),
    Glm4Config(**SMALL, **HEAD, partial_rotary_factor=0.5),
    Phi3Config(**SMALL),
    Phi3Config(**SMALL, rope_parameters=PART),
]
LEFT = [
    LlamaConfig(**SMALL, attention_dropout=0.1),
    PhiConfig(**SMALL, partial_rotary_factor=0.5),
    GPTNeoXConfig(**{**SMALL, "num_key_value_heads": 4}),
]


def results(model):
    total, losses = token_losses(model, trial_inputs(100, CPU), ForwardSpec("packed"))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return losses, dict(zip(trained, torch.autograd.grad(total, trained.values()), strict=True))


def made(config, method: str, storage: str = "plain", fp8: bool = False):
    model = build(config)
    model.set_attn_implementation(attention.NAME)
    if storage != "plain":
        quantize_linears(model, dtype=torch.float32, device=CPU, storage=storage)
    if method == "full":
        if fp8:
            use_fp8_linears(model)
        return model
    lora.attach(model, Lora(rank=4), seed=0)
    for at, adapter in enumerate(lora.adapters(model).values()):
        torch.nn.init.normal_(adapter.lora_b, std=0.1, generator=torch.Generator().manual_seed(at))
    fuse(model, fp8=fp8)
    return model


@pytest.mark.parametrize("config", REPLACED, ids=lambda config: config.model_type)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_losses_gradients_and_names_stay(config, method):
    model = made(config, method)
    losses, gradients = results(model)
    assert fuse_rope(model, torch.float32) == 2
    again, found = results(model)
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_without_positions_stays_without_them(method):
    """Its attention would rotate by positions, and is given none."""
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64}
    kinds = {"layer_types": ["attention", "mamba"], "position_embedding_type": "nope"}
    model = made(GraniteMoeHybridConfig(**SMALL, **sizes, **experts, **kinds), method)
    losses, gradients = results(model)
    fuse_rope(model, torch.float32)
    again, found = results(model)
    assert torch.equal(again, losses)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in found.items())


@pytest.mark.parametrize(
    ("method", "storage", "fp8"), [("lora", "plain", True), ("qlora", "nf4", False), ("full", "plain", True)], ids=str
)
def test_over_every_storage(method, storage, fp8):
    model = made(LlamaConfig(**{**SMALL, "hidden_size": 64}), method, storage, fp8)
    losses, gradients = results(model)
    assert fuse_rope(model, torch.float32) == 2
    again, found = results(model)
    torch.testing.assert_close(again, losses, rtol=1e-3, atol=1e-3)
    for name, gradient in found.items():
        assert (gradient - gradients[name]).norm() <= 0.05 * gradients[name].norm(), name


@pytest.mark.parametrize("config", LEFT, ids=lambda config: config.model_type)
def test_other_attention_is_left_alone(config):
    model = build(config)
    before = model.config._attn_implementation
    assert fuse_rope(model, torch.float32) == 0
    assert model.config._attn_implementation == before


class Unseen(torch.nn.Module):
    """The parts of an attention with one linear for queries, keys and values; what it does with them is its own."""

    def __init__(self, mixer: torch.nn.Module):
        super().__init__()
        self.mixer, self.o_proj = mixer, torch.nn.Linear(32, 32)
        self.config, self.head_dim = LlamaConfig(**SMALL), 8

    def forward(self, hidden_states, position_embeddings, attention_mask):
        raise KeyError("not called like this")


@pytest.mark.parametrize("mixer", [torch.nn.Linear(32, 64), torch.nn.Conv1d(32, 64, 1)], ids=["linear", "convolution"])
def test_unseen_code_that_cannot_be_tried_is_left_alone(mixer):
    model = torch.nn.ModuleList([Unseen(mixer)])
    before = model[0].config._attn_implementation
    assert fuse_rope(model, torch.float32) == 0
    assert model[0].config._attn_implementation == before


def test_with_a_cache_the_models_own_module_answers():
    model = build(LlamaConfig(**SMALL))
    tokens = torch.arange(3, 9)[None]
    expected = model.generate(tokens, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(tokens))
    fuse_rope(model, torch.float32)
    assert any(isinstance(module, RotaryAttention) for module in model.modules())
    found = model.generate(tokens, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(tokens))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("config", [*REPLACED, *LEFT], ids=lambda config: type(config).__name__)
def test_weights_need_not_be_there_yet(config):
    model = build(config)
    model.set_attn_implementation(attention.NAME)
    expected = fuse_rope(copy.deepcopy(model), torch.float32)
    assert (expected > 0) == (config in REPLACED)
    model.to("meta")
    assert fuse_rope(copy.deepcopy(model), torch.float32) == 0
    before = torch.get_rng_state()
    assert fuse_rope(model, torch.float32, CPU) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.is_meta for weight in model.parameters())
    assert model.config._attn_implementation == attention.NAME
