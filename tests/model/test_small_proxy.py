"""Twins of models: as small as their code allows, able to compute, and the same every time."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tunesmith.config.schema import Run
from tunesmith.model import load

LARGE = {
    "hidden_size": 64,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50_000,
    "pad_token_id": 49_999,
}
HEAD = {"head_dim": 16}
CONFIGS = {
    "llama": LlamaConfig(**LARGE),
    "qwen3": Qwen3Config(**LARGE, **HEAD),
    "gemma2": Gemma2Config(**LARGE, **HEAD, sliding_window=4),  # layers of two kinds
    "mixtral": MixtralConfig(**LARGE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**LARGE, **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4096),
    "gpt2": GPT2Config(n_embd=64, n_layer=12, n_head=4, vocab_size=50_000),
    "bloom": BloomConfig(hidden_size=64, n_layer=12, n_head=4, vocab_size=50_000),
}


def twin(folder, dtype: str = "fp32"):
    run = Run(model=str(folder), data="none.jsonl")
    return load.build_small_proxy(run, dtype=dtype, device=torch.device("cpu"), layers=3, width=64)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_twin_is_small_and_computes_and_is_the_same_every_time(tmp_path, name):
    CONFIGS[name].save_pretrained(tmp_path)
    one, other = twin(tmp_path), twin(tmp_path)
    assert one.config.get_text_config().num_hidden_layers == 3
    assert load.parameter_count(one) < 1_000_000
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        found, expected = one(tokens).logits, other(tokens).logits
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    assert 0.01 < found.std() < 100


def test_a_model_that_cannot_be_made_smaller_has_a_twin_of_its_size(tmp_path, monkeypatch):
    """One whose code wants its MLPs as wide as they are, say."""
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_config

    def stubborn(config, **options):
        if config.intermediate_size != LARGE["intermediate_size"]:
            raise ValueError("another width")
        return real(config, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", stubborn)
    CONFIGS["llama"].save_pretrained(tmp_path)
    assert twin(tmp_path).config.num_hidden_layers == LARGE["num_hidden_layers"]
