"""Facts from config.json alone are those of the model itself, built on the meta device; nothing is off by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Lora
from tunesmith.errors import UserError
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.families import FAMILIES, from_config

VARIANTS: dict[str, list[dict]] = {
    "llama": [{}, {"num_key_value_heads": 2, "head_dim": 24}, {"attention_bias": True, "mlp_bias": True}],
    "mistral": [{}, {"sliding_window": None}],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}],
    "qwen3": [{}, {"tie_word_embeddings": True, "attention_bias": True}],
    "smollm3": [{"pad_token_id": 0}],
    "granite": [{}],
    "glm": [{"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "pad_token_id": 0}],
    "olmo2": [{"num_key_value_heads": 2}],
    "cohere2": [{"num_key_value_heads": 2}],
    "starcoder2": [{"num_key_value_heads": 2}],
    "gemma": [{}],
    "gemma2": [{}],
    "gemma3_text": [{}],
    "phi": [{}, {"qk_layernorm": True}],
    "phi3": [{"pad_token_id": 0}, {"pad_token_id": 0, "num_key_value_heads": 2}],
    "gpt2": [{}, {"n_inner": 96}],
    "gpt_neox": [{}, {"attention_bias": False}],
    "falcon": [
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "parallel_attn": False, "bias": True},
    ],
    "mixtral": [{}, {"num_local_experts": 4}],
    "qwen2_moe": [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0], "num_experts": 6}],
    "qwen3_moe": [{}, {"mlp_only_layers": [1]}],
    "t5": [{}, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}],
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
SMALL_NAMED = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 128},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_heads": 4, "vocab_size": 131},
    "falcon": {name: value for name, value in SMALL.items() if "intermediate" not in name},
}


def meta(config: dict):
    """The model of this config without weights, and the config as it would be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = AutoConfig.for_model(**config)
    kind = AutoModelForSeq2SeqLM if config["model_type"] == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(made)
    return model, made.to_dict()


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, changes) for family in FAMILIES for changes in VARIANTS[family]],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "default",
)
def test_parameters_and_adapters_are_exactly_those_of_the_built_model(family, changes):
    from tunesmith.model.lora import attach

    config = {"model_type": family, **SMALL_NAMED.get(family, SMALL), **changes}
    model, saved = meta(config)
    facts = from_config(saved)
    assert facts.note is None
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(facts.by_kind.values()) == facts.parameters
    assert facts.layers == (6 if family == "t5" else 3) - (family == "t5" and "num_decoder_layers" in changes)
    if family == "t5":
        return
    for chosen in (Lora(rank=2), Lora(rank=3, layers="top 2")):
        fresh, _ = meta(config)
        attach(fresh, chosen, seed=0)
        trained = sum(parameter.numel() for parameter in fresh.parameters() if parameter.requires_grad)
        assert facts.adapted(chosen)[0] == trained


def test_adapter_patterns_count_as_the_trainer_takes_them():
    from tunesmith.model.lora import attach

    for targets in (["q_proj"], ["q_proj", "down_proj"], ["layers.1.mlp.*"], ["model.layers.0.self_attn.o_proj"]):
        model, saved = meta({"model_type": "llama", **SMALL})
        settings = Lora(rank=4, targets=targets)
        attach(model, settings, seed=0)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert from_config(saved).adapted(settings)[0] == trained


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # config.json as published, parameters as published.
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
          "tie_word_embeddings": False}, 8_030_261_248),
        ({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
          "tie_word_embeddings": True}, 134_515_008),
        ({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096},
         7_241_732_096),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
          "vocab_size": 50257}, 124_439_808),
        ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
          "num_experts_per_tok": 2}, 46_702_792_704),
        ({"model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232,
          "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024}, 178_557_088_768),
    ],
)  # fmt: skip
def test_published_models_have_their_published_sizes(config, parameters):
    assert from_config(config).parameters == parameters


def test_mixtures_count_what_a_token_passes_through():
    facts = from_config({"model_type": "mixtral", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2})
    dense = from_config({"model_type": "llama", **SMALL})
    router = 3 * 64 * 8
    assert facts.active - router == dense.active + 3 * (3 * 64 * 160)
    assert facts.matrices - router == dense.matrices + 3 * 7 * (3 * 64 * 160)


def test_attention_costs_what_the_documents_and_windows_make_it_cost():
    wide = from_config({"model_type": "llama", **SMALL})
    sliding = from_config({"model_type": "mistral", **SMALL, "sliding_window": 16})
    assert wide.attention_flops(100) == 3 * 4 * 64 * sum(range(1, 101)) / 100
    seen = sum(min(i, 16) for i in range(1, 101)) / 100
    assert sliding.attention_flops(100) == pytest.approx(3 * 4 * 64 * seen)
    assert sliding.attention_flops(10) == wide.attention_flops(10)


def test_an_unknown_architecture_is_taken_for_a_decoder_and_says_so():
    facts = from_config({"architectures": ["MysteryForCausalLM"], "model_type": "mystery", **SMALL})
    assert "MysteryForCausalLM has no formula" in (facts.note or "")
    assert facts.parameters == from_config({"model_type": "llama", **SMALL}).parameters


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Mystery"]}, "hidden_size"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": 10**12}, "damaged"),
        ({"model_type": "llama", **SMALL, "hidden_size": "big"}, "hidden_size.*no size"),
        ({"model_type": "llama", **SMALL, "vocab_size": -1}, "vocab_size.*no size"),
        ({"model_type": "llama", **SMALL, "hidden_size": 10**9}, "damaged"),
    ],
)
def test_absurd_configs_are_one_sentence(config, words):
    with pytest.raises(UserError, match=words):
        from_config(config)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(set(FAMILIES) - {"gpt2", "t5"})),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 12),
)
def test_facts_survive_json_and_add_up(family, heads, layers, width):
    config = {"model_type": family, **SMALL, "hidden_size": 16 * heads, "num_attention_heads": heads}
    facts = from_config(config | {"num_hidden_layers": layers, "intermediate_size": 8 * width})
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts
    assert facts.matrices >= facts.active > 0
    assert facts.parameters >= facts.matrices
