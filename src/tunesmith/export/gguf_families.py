"""The architectures that llama.cpp runs rightly: one entry for each, with what it must be told of such a model besides
sizes, how its tensors are to lie, and why some models of it cannot be exported.

Functions stand by family: `_say_...` writes metadata, `_check_...` gives the reason for a refusal or None, `..._sizes`
has sizes that are not a Llama's, and `..._tensors` what becomes of tensors that lie otherwise in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NO_CAP = 1e6
"""For a Gemma 2 without soft caps: left out, llama.cpp takes the usual ones. So far from it tanh is a straight line."""
LITE_LAYERS = (26, 27)
"""By which llama.cpp tells a DeepSeek whose queries are not compressed (V2-Lite, Moonlight)."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp has the models of one class of transformers."""

    name: str
    """In `gguf.MODEL_ARCH`."""
    activations: tuple[str, ...] = ("silu",)
    """That llama.cpp has for it."""
    permutes: bool = False
    """Its queries and keys are rotated in neighbouring pairs, where transformers rotates halves."""
    norm_offset: bool = False
    """Its norms multiply by 1 + weight; llama.cpp's by the weight."""
    has_layer_norm: bool = False
    """Its norms subtract the mean, too."""
    has_windows: bool = False
    """llama.cpp has its sliding windows."""
    scales_yarn: bool = True
    """llama.cpp multiplies its queries and keys by YaRN's factor, whatever the model does."""
    may_round_yarn: bool = False
    """It is known to stretch a few frequencies a little otherwise: log-probabilities move by about 0.01."""
    says: Callable[[Any, Any], None] = lambda writer, config: None
    """What is to be said besides."""
    check: Callable[[Any], str | None] = lambda config: None
    """Why a model of it cannot be exported."""
    sizes: Callable[[Any], dict[str, Any]] = lambda config: {}
    """What of its sizes is not as a Llama's."""
    tensors: Callable[[str, torch.Tensor, Any], dict[str, torch.Tensor] | None] = lambda name, tensor, config: None
    """What becomes of a tensor that is more, or other, in llama.cpp than one under its own name."""


def block_of(name: str) -> str:
    """What llama.cpp calls the layer that this tensor is in."""
    return f"blk.{name.partition('.layers.')[2].partition('.')[0]}"


def _say_experts(writer: Any, config: Any) -> None:
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    writer.add_expert_count(next(count for count in counts if count))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _say_shared_expert(writer: Any, config: Any) -> None:
    _say_experts(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _check_routers(config: Any) -> str | None:
    """Of routers whose weights llama.cpp takes as they are."""
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    if getattr(config, "clip_qkv", None):
        return "it clips queries, keys and values"
    return "its routers normalise the weights of the experts they choose" if config.norm_topk_prob else None


def _check_groups(config: Any) -> str | None:
    return None if (config.n_group or 1) == 1 else "its routers choose groups of experts first"


def _router_bias(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".e_score_correction_bias"):
        return {f"{block_of(name)}.exp_probs_b.bias": tensor}
    return None


def _say_windows(writer: Any, config: Any) -> None:
    """Which layers see a sliding window, where some do."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    if any(windowed):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(windowed)


def _outputs_first(tensor: torch.Tensor, end: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if end == "weight" else tensor


def _scan_tensor(block: str, leaf: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Of a state space: decays as they are used, a value a head in rows, the convolution without its one channel."""
    if leaf == "A_log":
        return {f"{block}.ssm_a": -tensor.float().exp()[:, None]}
    if leaf == "D":
        return {f"{block}.ssm_d": tensor[:, None]}
    if leaf == "dt_bias":
        return {f"{block}.ssm_dt.bias": tensor}
    if leaf == "conv1d.weight":
        return {f"{block}.ssm_conv1d.weight": tensor.squeeze(1)}
    return None


def _heads_of_keys(config: Any) -> list[int]:
    """By layer: none where a layer has something else than attention."""
    attending = ("attention", "full_attention")
    return [config.num_key_value_heads if kind in attending else 0 for kind in config.layer_types]


def _say_cohere2(writer: Any, config: Any) -> None:
    import gguf

    writer.add_sliding_window(config.sliding_window)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _check_cohere2(config: Any) -> str | None:
    kinds = ["sliding_attention" if (n + 1) % 4 else "full_attention" for n in range(config.num_hidden_layers)]
    return None if list(config.layer_types) == kinds else "its layers attend in another order than every 4th to all"


def _say_deepseek_v2(writer: Any, config: Any) -> None:
    _say_latent_attention(writer, config)
    _say_many_experts(writer, config, gating="SOFTMAX", normalises=False)


def _say_deepseek_v3(writer: Any, config: Any) -> None:
    _say_latent_attention(writer, config)
    _say_many_experts(writer, config, gating="SIGMOID", normalises=config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)


def _say_latent_attention(writer: Any, config: Any) -> None:
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * (config.rope_parameters.get("mscale_all_dim") or 0.0))


def _latent_attention_sizes(config: Any) -> dict[str, Any]:
    """Keys and values are compressed: llama.cpp attends to them as they are, as one head."""
    length = config.kv_lora_rank + config.qk_rope_head_dim
    kept = {"head_count_kv": 1, "key_length": length, "value_length": config.kv_lora_rank}
    return kept | {"rope_dimension_count": config.qk_rope_head_dim}


def _deepseek_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".kv_b_proj.weight"):
        heads, parts = config.num_attention_heads, [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = tensor.reshape(heads, sum(parts), config.kv_lora_rank).split(parts, dim=1)
        return {f"{block_of(name)}.attn_k_b.weight": keys.transpose(1, 2), f"{block_of(name)}.attn_v_b.weight": values}
    return _router_bias(name, tensor, config)


def _check_latent_attention(config: Any) -> str | None:
    if config.q_lora_rank is None and config.num_hidden_layers not in LITE_LAYERS:
        return "its queries are not compressed"
    yarn = config.rope_parameters
    if yarn["rope_type"] == "yarn" and yarn.get("mscale") != yarn.get("mscale_all_dim"):
        return "its YaRN scales positions and attention by different factors"
    return None


def _check_deepseek_v2(config: Any) -> str | None:
    if config.topk_method != "greedy":
        return "its routers choose groups of experts by their best one"
    return _check_latent_attention(config)


def _check_exaone4(config: Any) -> str | None:
    if any(kind == "sliding_attention" for kind in config.layer_types):
        return "some of its layers see a sliding window and others do not"
    return None


def _say_gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping or NO_CAP)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or NO_CAP)
    writer.add_sliding_window(config.sliding_window)


def _say_gemma3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _check_gemma(every: int) -> Callable[[Any], str | None]:
    """Of a Gemma, whose kinds of layers and scale of attention llama.cpp knows by itself."""

    def check(config: Any) -> str | None:
        kinds = [
            "full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in range(len(config.layer_types))
        ]
        if list(config.layer_types) != kinds:
            return f"its layers attend in another order than every {every}th to all tokens"
        usual = config.hidden_size / config.num_attention_heads if len(kinds) in (46, 62) else config.head_dim
        if config.query_pre_attn_scalar != usual:
            return f"its attention is scaled by {config.query_pre_attn_scalar:g}, where llama.cpp takes {usual:g}"
        return None

    return check


def _say_glm4_moe(writer: Any, config: Any) -> None:
    _say_many_experts(writer, config, gating="SIGMOID", normalises=config.norm_topk_prob)


def _say_many_experts(writer: Any, config: Any, *, gating: str, normalises: bool) -> None:
    """Where the first layers are dense, and each token goes to some experts besides those it is sent to."""
    import gguf

    _say_experts(writer, config)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[gating])
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(normalises)


def _say_gpt_oss(writer: Any, config: Any) -> None:
    _say_experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


def _gpt_oss_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """Of its experts gate and up alternate, and inputs come before outputs."""
    block, leaf = block_of(name), name.rpartition(".")[2]
    if leaf in ("gate_up_proj", "gate_up_proj_bias"):
        end = "bias" if leaf.endswith("bias") else "weight"
        parts = {"gate": tensor[..., ::2], "up": tensor[..., 1::2]}
        return {f"{block}.ffn_{part}_exps.{end}": _outputs_first(value, end) for part, value in parts.items()}
    if leaf in ("down_proj", "down_proj_bias"):
        end = "bias" if leaf.endswith("bias") else "weight"
        return {f"{block}.ffn_down_exps.{end}": _outputs_first(tensor, end)}
    if leaf == "sinks":
        return {f"{block}.attn_sinks.weight": tensor}
    return None


def _check_gpt_oss(config: Any) -> str | None:
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(config.num_hidden_layers)]
    if list(config.layer_types) != kinds:
        return "its layers do not see a sliding window and all tokens in turn"
    limit = getattr(config, "swiglu_limit", 7.0)
    return None if limit == 7.0 else f"its MLP is clamped at {limit:g}"


def _say_granite(writer: Any, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _say_granite_moe(writer: Any, config: Any) -> None:
    _say_granite(writer, config)
    _say_experts(writer, config)


def _granite_moe_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".block_sparse_moe.router.weight"):
        return {f"{block_of(name)}.ffn_gate_inp.weight": tensor}
    return None


def _say_granite_hybrid(writer: Any, config: Any) -> None:
    _say_granite(writer, config)
    inner = config.mamba_n_heads * config.mamba_d_head
    for name, size in {
        "conv_kernel": config.mamba_d_conv, "state_size": config.mamba_d_state, "group_count": config.mamba_n_groups,
        "inner_size": inner, "time_step_rank": config.mamba_n_heads,
    }.items():  # fmt: skip
        getattr(writer, f"add_ssm_{name}")(size)
    writer.add_rope_scaling_finetuned(False)
    if config.num_local_experts:
        _say_experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _granite_hybrid_sizes(config: Any) -> dict[str, Any]:
    width = config.intermediate_size if config.num_local_experts else config.shared_intermediate_size
    return {"feed_forward_length": width, "head_count_kv": _heads_of_keys(config)}


def _granite_hybrid_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    block, leaf = block_of(name), name.rpartition(".mamba.")[2]
    end = "_shexp" if config.num_local_experts else ""
    if name.endswith(".shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"{block}.ffn_gate{end}.weight": gate, f"{block}.ffn_up{end}.weight": up}
    if name.endswith(".shared_mlp.output_linear.weight"):
        return {f"{block}.ffn_down{end}.weight": tensor}
    if (found := _scan_tensor(block, leaf, tensor)) is not None:
        return found
    if leaf == "norm.weight":
        return {f"{block}.ssm_norm.weight": tensor.reshape(config.mamba_n_groups, -1)}
    return _granite_moe_tensors(name, tensor, config)


def _check_granite_hybrid(config: Any) -> str | None:
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "nope"):
        return f"its positions are of the kind {kind}"
    return None if config.mamba_n_groups == 1 else "its state spaces have several groups, and a norm over all of them"


def _lfm2_sizes(config: Any) -> dict[str, Any]:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        width = config.block_multiple_of * -(-width // config.block_multiple_of)
    return {"feed_forward_length": width, "head_count_kv": _heads_of_keys(config)}


def _lfm2_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".conv.conv.weight"):
        return {f"{block_of(name)}.shortconv.conv.weight": tensor.squeeze(1)}
    return None


def _say_ministral3(writer: Any, config: Any) -> None:
    if config.rope_parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _check_olmoe(config: Any) -> str | None:
    if config.num_key_value_heads != config.num_attention_heads:
        return "it has fewer heads of keys than of queries"
    return _check_routers(config)


def _say_phi3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)
    parameters = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(
        parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    if parameters["rope_type"] == "longrope":
        factor = parameters.get("attention_factor")
        if factor is None:
            original = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            stretch = config.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def _check_qwen3_moe(config: Any) -> str | None:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    return None if config.norm_topk_prob else "its routers do not normalise the weights of the experts they choose"


def _say_qwen3_5(writer: Any, config: Any) -> None:
    for name, size in {
        "conv_kernel": config.linear_conv_kernel_dim, "state_size": config.linear_key_head_dim,
        "group_count": config.linear_num_key_heads, "time_step_rank": config.linear_num_value_heads,
        "inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }.items():  # fmt: skip
        getattr(writer, f"add_ssm_{name}")(size)
    writer.add_full_attention_interval(_interval(config))
    sections = list(config.rope_parameters.get("mrope_section") or [11, 11, 10])
    writer.add_rope_dimension_sections([*sections, *[0] * (4 - len(sections))])


def _say_qwen3_5_moe(writer: Any, config: Any) -> None:
    _say_qwen3_5(writer, config)
    _say_shared_expert(writer, config)


def _interval(config: Any) -> int:
    return 1 + list(config.layer_types).index("full_attention")


def _qwen3_5_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """Of linear attention: heads of values that share one of keys lie apart in llama.cpp, which goes through the heads
    of keys again and again."""
    if ".linear_attn." not in name:
        return None
    block, leaf = block_of(name), name.rpartition(".linear_attn.")[2]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads

    def apart(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(keys, values // keys, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
        tensor = torch.cat([tensor[:before], apart(tensor[before:])])
        return {f"{block}.attn_qkv.weight": tensor} if leaf[0] == "i" else _scan_tensor(block, leaf, tensor)
    if leaf == "out_proj.weight":
        return {f"{block}.ssm_out.weight": apart(tensor.t()).t()}
    if leaf == "norm.weight":
        return {f"{block}.ssm_norm.weight": tensor}
    if leaf == "A_log":
        return {f"{block}.ssm_a": -apart(tensor).float().exp()}
    if leaf == "dt_bias":
        return {f"{block}.ssm_dt.bias": apart(tensor)}
    places = {"in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta"}
    return {f"{block}.{places[leaf.removesuffix('.weight')]}.weight": apart(tensor)}


def _check_qwen3_5(config: Any) -> str | None:
    if "full_attention" not in config.layer_types:
        return "none of its layers attends to all tokens"
    every = _interval(config)
    kinds = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(config.num_hidden_layers)]
    return None if list(config.layer_types) == kinds else "its layers with attention are not at even distances"


def _check_seed_oss(config: Any) -> str | None:
    has = [name for name in ("attention_out_bias", "mlp_bias") if getattr(config, name, False)]
    return f"it has biases ({', '.join(has)})" if has else None


def _check_smollm3(config: Any) -> str | None:
    rotated = [int((n + 1) % 4 != 0) for n in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == rotated else "its layers without positions are not every fourth"


GELU = ("gelu_pytorch_tanh",)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("LLAMA", permutes=True),
    "MistralForCausalLM": Architecture("LLAMA", permutes=True),
    "MixtralForCausalLM": Architecture("LLAMA", permutes=True, says=_say_experts),
    "Qwen2ForCausalLM": Architecture("QWEN2"),
    "Qwen3ForCausalLM": Architecture("QWEN3"),
    "Qwen3MoeForCausalLM": Architecture("QWEN3MOE", says=_say_experts, check=_check_qwen3_moe),
    "GemmaForCausalLM": Architecture("GEMMA", GELU, norm_offset=True),
    "Gemma2ForCausalLM": Architecture(
        "GEMMA2", GELU, norm_offset=True, has_windows=True, says=_say_gemma2, check=_check_gemma(2)
    ),
    "Gemma3ForCausalLM": Architecture(
        "GEMMA3", GELU, norm_offset=True, has_windows=True, says=_say_gemma3, check=_check_gemma(6)
    ),
    "Phi3ForCausalLM": Architecture("PHI3", says=_say_phi3),
    "Olmo2ForCausalLM": Architecture("OLMO2"),
    "GraniteForCausalLM": Architecture("GRANITE", permutes=True, says=_say_granite),
    "SmolLM3ForCausalLM": Architecture("SMOLLM3", permutes=True, check=_check_smollm3),
    "GlmForCausalLM": Architecture("CHATGLM"),
    "Glm4ForCausalLM": Architecture("GLM4"),
    "Glm4MoeForCausalLM": Architecture("GLM4_MOE", says=_say_glm4_moe, check=_check_groups, tensors=_router_bias),
    "GptOssForCausalLM": Architecture(
        "GPT_OSS",
        has_windows=True,
        may_round_yarn=True,
        says=_say_gpt_oss,
        check=_check_gpt_oss,
        tensors=_gpt_oss_tensors,
    ),
    "Qwen2MoeForCausalLM": Architecture("QWEN2MOE", says=_say_shared_expert, check=_check_routers),
    "OlmoeForCausalLM": Architecture("OLMOE", says=_say_experts, check=_check_olmoe),
    "GraniteMoeForCausalLM": Architecture(
        "GRANITE_MOE", permutes=True, says=_say_granite_moe, tensors=_granite_moe_tensors
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "GRANITE_HYBRID",
        permutes=True,
        says=_say_granite_hybrid,
        check=_check_granite_hybrid,
        sizes=_granite_hybrid_sizes,
        tensors=_granite_hybrid_tensors,
    ),
    "Lfm2ForCausalLM": Architecture(
        "LFM2",
        says=lambda writer, config: writer.add_shortconv_l_cache(config.conv_L_cache),
        sizes=_lfm2_sizes,
        tensors=_lfm2_tensors,
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "QWEN35", norm_offset=True, says=_say_qwen3_5, check=_check_qwen3_5, tensors=_qwen3_5_tensors
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "QWEN35MOE", norm_offset=True, says=_say_qwen3_5_moe, check=_check_qwen3_5, tensors=_qwen3_5_tensors
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "DEEPSEEK2",
        scales_yarn=False,
        check=_check_deepseek_v2,
        says=_say_deepseek_v2,
        sizes=_latent_attention_sizes,
        tensors=_deepseek_tensors,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "DEEPSEEK2",
        scales_yarn=False,
        check=_check_latent_attention,
        says=_say_deepseek_v3,
        sizes=_latent_attention_sizes,
        tensors=_deepseek_tensors,
    ),
    "Ministral3ForCausalLM": Architecture("MISTRAL3", permutes=True, says=_say_ministral3),
    "Olmo3ForCausalLM": Architecture("OLMO2", has_windows=True, says=_say_windows),
    "Cohere2ForCausalLM": Architecture(
        "COHERE2", has_layer_norm=True, has_windows=True, says=_say_cohere2, check=_check_cohere2
    ),
    "SeedOssForCausalLM": Architecture("SEED_OSS", check=_check_seed_oss),
    "Exaone4ForCausalLM": Architecture("EXAONE4", check=_check_exaone4),
    "Ernie4_5ForCausalLM": Architecture("ERNIE4_5"),
    "HunYuanDenseV1ForCausalLM": Architecture("HUNYUAN_DENSE"),
    "ArceeForCausalLM": Architecture("ARCEE", ("relu2",), permutes=True),
    "Starcoder2ForCausalLM": Architecture("STARCODER2", GELU, has_layer_norm=True),
    "GPT2LMHeadModel": Architecture("GPT2", ("gelu_new", *GELU), has_layer_norm=True),
}
