"""Published shapes of models, each once, and which of them each benchmark takes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "GLM-Edge-1.5B": {
        "model_type": "glm", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 59264,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Phi-3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512,
    },
    "OLMo-2-1B": {
        "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 100352,
    },
    "Granite-3-2B": {
        "model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155, "tie_word_embeddings": True,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "StarCoder2-3B": {
        "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
    },
    "Pythia-1.4B": {
        "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 16, "vocab_size": 50304,
    },
    "EXAONE-4-1.2B": {
        "model_type": "exaone4", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 102400,
        "tie_word_embeddings": True,
    },
    "Qwen3-MoE-4B-A0.6B": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    },
    "Cohere2-2B": {
        "model_type": "cohere2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128000,
    },
    "Llama-3-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "GLM-4-9B": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
        "attention_bias": True,
    },
    "Phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    },
    "Gemma-3-4B": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
    },
    "Granite-4-H-Micro": {
        "model_type": "granitemoehybrid", "hidden_size": 2048, "intermediate_size": 8192,
        "shared_intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 100352,
        "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "position_embedding_type": "nope", "tie_word_embeddings": True,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
    },
}  # fmt: skip
FORECAST = (
    "Llama-3.2-1B", "GLM-Edge-1.5B", "Qwen3-1.7B", "Phi-3-mini", "Gemma-2-2B", "Gemma-3-1B", "OLMo-2-1B",
    "Granite-3-2B", "SmolLM3-3B", "StarCoder2-3B", "Pythia-1.4B", "EXAONE-4-1.2B", "Qwen3-MoE-4B-A0.6B",
    "Cohere2-2B",
)  # fmt: skip
"""In the order in which configurations are drawn of them: another order is another draw."""
FAMILIES = (
    "Llama-3-8B", "Qwen3-8B", "GLM-4-9B", "Phi-4", "Gemma-2-9B", "Gemma-3-4B", "gpt-oss-20b", "Qwen3-30B-A3B",
    "Granite-4-H-Micro",
)  # fmt: skip
"""Of the families that are timed beside other systems."""


def shapes_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Copies, to be changed at will."""
    return {name: copy.deepcopy(SHAPES[name]) for name in names}
