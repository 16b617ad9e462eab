"""Experts of MoE models as ours compute them: by early weights, and frozen in 4 or 8 bits."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels import int8, nf4
from tunesmith.model import quantized, source, structure
from tunesmith.model.experts import STACKS, QuantizedExperts, experts_of_layers, use_early_weights
from tunesmith.model.probe import probe_run
from tunesmith.parallel.prepare import load_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MANY = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
MIXTURES = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen2": Qwen2MoeConfig(**SMALL, **MANY, shared_expert_intermediate_size=32),
    "qwen3": Qwen3MoeConfig(**SMALL, **MANY),
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
PLAIN = {
    **MIXTURES,
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),  # biases, and the other way round
    "deepseek": DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4}, **LATENT, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "nemotron_h": NemotronHConfig(
        **SMALL, layers_block_type=["moe", "attention"], n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, mamba_num_heads=4, mamba_head_dim=8,
    ),  # no gate
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_early_weights_change_nothing(name):
    """Neither what a model computes nor any gradient, those of routers and biases included."""
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(PLAIN[name]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        for of_both in zip(*(model.named_parameters() for model in models), strict=True):
            drawn = 0.2 * torch.randn_like(of_both[0][1]) if of_both[0][0].endswith("bias") else None
            for _, weight in of_both if drawn is not None else ():
                weight.copy_(drawn)
    assert use_early_weights(models[1])
    assert all("forward" in vars(one) for one in experts_of_layers(models[1]).values())
    ids = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(1))
    theirs, ours = (model(input_ids=ids).logits for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = []
    for logits, model in zip((theirs, ours), models, strict=True):
        logits.square().mean().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for one in gradients[0]:
        largest = gradients[0][one].abs().max()
        assert (gradients[0][one] - gradients[1][one]).abs().max() <= 1e-5 * largest + 1e-9, one


@pytest.fixture(params=MIXTURES)
def mixture(request, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MIXTURES[request.param]).save_pretrained(tmp_path)
    return Run(model=str(tmp_path), data="none.jsonl")


def round_as(model: torch.nn.Module, storage: str) -> None:
    """Give a plain model the values that one in few bits has."""
    names = {f"{name}.weight" for name in structure.linears_of_layers(model)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in names or name.endswith(STACKS):
                matrix = weight.reshape(-1, weight.shape[-1])
                if storage == "nf4":
                    rounded = nf4.dequantize(nf4.quantize(matrix), [matrix.shape[0]], matrix.shape[1], torch.float32)
                else:
                    rounded = int8.dequantize(*int8.quantize(matrix), torch.float32)
                weight.copy_(rounded.view_as(weight))


@pytest.mark.parametrize("storage", ["nf4", "int8"])
@pytest.mark.parametrize("is_translated", [False, True])
def test_it_computes_what_the_rounded_experts_do(mixture, storage, is_translated, monkeypatch):
    if is_translated:  # files of another layout are read by transformers, and quantized then
        monkeypatch.setattr(source, "files_of", lambda *_: None)
    found = load_model(mixture, dtype="fp32", device="cpu", storage=storage)
    held = [module for module in found.modules() if isinstance(module, QuantizedExperts)]
    assert len(held) == 2
    assert not any(weight.requires_grad and weight.ndim == 3 for weight in found.parameters())
    expected = load_model(mixture, dtype="fp32", device="cpu")
    whole = sum(weight.nbytes for name, weight in expected.named_parameters() if name.endswith(STACKS))
    assert sum(buffer.nbytes for one in held for buffer in one.buffers()) < (0.2 if storage == "nf4" else 0.4) * whole
    round_as(expected, storage)
    ids = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(1))
    ours, theirs = (model(input_ids=ids).logits for model in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    gradients = []
    for model in (found, expected):
        model.get_input_embeddings().weight.requires_grad_()
        model(input_ids=ids).logits.square().mean().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_a_base_that_is_rounded_computes_what_one_in_few_bits_does(mixture, storage):
    held = load_model(mixture, dtype="fp32", device="cpu", storage=storage)
    plain = load_model(mixture, dtype="fp32", device="cpu")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, before = held(input_ids=tokens).logits, plain(input_ids=tokens).logits
        quantized.round_weights(plain, storage)
        found = plain(input_ids=tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 1e-3 * expected.abs().max()


def test_each_rank_keeps_the_values_of_its_experts(mixture):
    storages = {}
    for storage in ("nf4", "int8"):
        model = load_model(mixture, dtype="fp32", device="cpu", storage=storage)
        whole = next(module for module in model.modules() if isinstance(module, QuantizedExperts))
        count = whole.num_experts
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
        every = torch.full((6, 1), count - 1), torch.ones(6, 1)
        expected = whole(x, *every)
        whole.keep(1, 2)
        assert whole.num_experts == count // 2
        storages[storage] = whole(x, every[0] - count // 2, every[1])
        torch.testing.assert_close(storages[storage], expected)
    assert not torch.equal(storages["nf4"], storages["int8"])


def test_experts_of_another_make_are_refused_in_a_sentence(tmp_path):
    config = GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused = "GptOssExperts cannot be held in 4 or 8 bits; use method: lora, with"
    with pytest.raises(UserError, match=refused):  # before anything is loaded
        probe_run(Run(model=str(tmp_path), data="none.jsonl", method="qlora"))
    with pytest.raises(UserError, match=refused):
        load_model(Run(model=str(tmp_path), data="none.jsonl"), dtype="fp32", device="cpu", storage="nf4")
