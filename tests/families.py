"""Every causal family that the installed transformers has, each made tiny from its own config class.

Sizes go by the names that configs give them; what a family wants besides is in `CHANGES`. A model here is a second's
work: two layers (or as few as show each kind of layer), a hidden size of 32, a hundred tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from typing import Any

VOCABULARY = 100
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, POSITIONS = 32, 4, 2, 8, 64, 128
SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "emb_dim", "dim"], HIDDEN),
    **dict.fromkeys(["word_embed_proj_dim", "token_embedding_size", "decoder_hidden_size", "lru_width"], HIDDEN),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"], HEADS),
    **dict.fromkeys(["encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"], HEADS),
    **dict.fromkeys(["num_key_value_heads"], KV_HEADS),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff"], WIDE),
    **dict.fromkeys(["n_inner", "ffn_hidden_size", "encoder_ffn_dim", "feed_forward_size", "d_inner"], WIDE),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16),
    **dict.fromkeys(["shared_intermediate_size", "moe_shared_expert_intermediate_size", "mlp_bias_size"], 16),
    **dict.fromkeys(["vocab_size", "tgt_vocab_size"], VOCABULARY),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"], POSITIONS),
    **dict.fromkeys(["max_length_positions", "context_length", "max_sequence_length"], POSITIONS),
    **dict.fromkeys(["head_dim", "attention_head_dim", "global_head_dim"], HEAD_DIM),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "v_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["qk_rope_head_dim"], 4),
    **dict.fromkeys(["bos_token_id", "bos_token"], 1),
    **dict.fromkeys(["eos_token_id"], 2),
    **dict.fromkeys(["pad_token_id"], 0),
    **dict.fromkeys(["decoder_start_token_id"], 2),
    **dict.fromkeys(["sliding_window", "attention_window_size"], 6),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 8),
    **dict.fromkeys(["vocab_size_per_layer_input"], VOCABULARY),
    **dict.fromkeys(["hidden_size_per_layer_input"], 8),
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
BOTH_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
BESIDE_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": {"first_k_dense_replace": 1},
    "axk2": {"first_k_dense_replace": 1},
    "bailing_hybrid": BESIDE_LINEAR,
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 10000.0}}
    | {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 0, "intermediate_size": [64] * 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma3_text": BOTH_KINDS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention"]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
    | {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "blt": {"encoder_hash_byte_group_vocab": 100, "patch_in_forward": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "phi3": {"original_max_position_embeddings": 64},
    "qwen3_5_moe_text": BESIDE_LINEAR,
    "qwen3_5_text": BESIDE_LINEAR,
    "qwen3_next": BESIDE_LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 100, "pronunciation_vocab_size": 100}
    | {"shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single families want besides."""
NAMED = (
    "llama", "llama4_text", "llama4", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "phi3", "mistral", "ministral", "ministral3", "mixtral",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "smollm3", "olmo2", "olmo3", "granite",
    "granitemoe", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "cohere2", "starcoder2", "exaone4", "seed_oss",
    "gpt2", "gpt_neox", "opt", "bloom", "mpt", "falcon",
)  # fmt: skip
"""Those that people tune most: a refusal of one of these is a fault."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16} | {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "wide heads, one of keys, biases": ("llama", {"head_dim": 24, "num_key_value_heads": 1, "vocab_size": 113}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "q and k norms, tied": ("qwen3", {"head_dim": 20, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "windows around a full layer": ("gemma3_text", {"head_dim": 12, "num_key_value_heads": 1, "vocab_size": 131}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 4, "query_pre_attn_scalar": 5}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 64}
        | {"original_max_position_embeddings": 16}),
    "MLA, shared experts in groups": ("deepseek_v3", {"n_shared_experts": 2, "n_group": 2, "q_lora_rank": None}
        | {"num_hidden_layers": 3, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "multipliers": ("granite", {"embedding_multiplier": 7.0, "logits_scaling": 3.0, "residual_multiplier": 0.3}
        | {"attention_multiplier": 0.2, "tie_word_embeddings": True, "vocab_size": 103}),
    "half rotary": ("gpt_neox", {"rotary_pct": 0.5, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "dense first layer": ("glm4_moe", {"n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3}
        | {"use_qk_norm": True, "attention_bias": True}),
    "some layers dense": ("qwen2_moe", {"mlp_only_layers": [0], "num_hidden_layers": 3, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "scaled logits": ("cohere2", {"logit_scale": 0.31, "num_hidden_layers": 4, "sliding_window": 5, "head_dim": 6}),
    "narrow window": ("mistral", {"sliding_window": 4, "head_dim": 10, "num_key_value_heads": 1}),
    "sinks, five experts": ("gpt_oss", {"num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "yarn and windows": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 5}
        | {"rope_parameters": {**YARN, "attention_factor": 1.2}}),
}  # fmt: skip
"""Configs that nobody has published, by what is odd about them."""
LARGEST = 2_000_000
"""Parameters of a model that is still tiny."""
DROPOUTS = ("dropout", "drop", "pdrop")


def causal_families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **changes: Any):
    """A config of this family, small; raises what its class raises."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[family]
    return made(**{**_sizes_of(made), **CHANGES.get(family, {}), **changes})


def _sizes_of(made: type) -> dict[str, Any]:
    known = {name for one in made.__mro__ for name in getattr(one, "__annotations__", {})}
    known |= set(inspect.signature(made.__init__).parameters)
    given = {name: value for name, value in SIZES.items() if name in known}
    usual = made()
    if "per_layer_config" in vars(usual) or hasattr(made, "per_layer_config"):
        given.pop("global_head_dim", None)
    for name in known:
        if any(word in name for word in DROPOUTS) and isinstance(getattr(usual, name, None), float):
            given[name] = 0.0
    if hasattr(usual, "initializer_range") and "initializer_range" in known:
        given["initializer_range"] = 0.2
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = HEADS
    for name, part in made.sub_configs.items():
        if hasattr(part, "model_type") and part.model_type:
            given[name] = {**_sizes_of(part), **CHANGES.get(part.model_type, {})}
    return given


def tiny_model(family: str, **changes: Any):
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    with quiet():
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"it has {size:,} parameters however small its text model is")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


@contextlib.contextmanager
def quiet():
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
