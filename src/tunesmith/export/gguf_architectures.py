"""What llama.cpp must be told of a model, and how its tensors are to lie: one entry for each architecture.

An architecture that is not here is refused; so is a model of one that is, where it computes something that llama.cpp
would compute otherwise.

Legend: E experts, I the experts' width, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.errors import UserError, listed
from tunesmith.model.structure import is_transposed

NO_CAP = 1e6
"""For a Gemma 2 without soft caps: left out, llama.cpp takes the usual ones. So far from it tanh is a straight line."""


@dataclass(frozen=True)
class Architecture:
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


def _experts(writer: Any, config: Any) -> None:
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    writer.add_expert_count(next(count for count in counts if count))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _shared_expert(writer: Any, config: Any) -> None:
    _experts(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _cohere2(writer: Any, config: Any) -> None:
    import gguf

    writer.add_sliding_window(config.sliding_window)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _windows(writer: Any, config: Any) -> None:
    """Which layers see a sliding window, where some do."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    if any(windowed):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(windowed)


def _ministral3(writer: Any, config: Any) -> None:
    if config.rope_parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _gpt_oss(writer: Any, config: Any) -> None:
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)


def _gpt_oss_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """Of its experts gate and up alternate, and inputs come before outputs."""
    block, leaf = _block(name), name.rpartition(".")[2]
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


def _block(name: str) -> str:
    """What llama.cpp calls the layer that this tensor is in."""
    return f"blk.{name.partition('.layers.')[2].partition('.')[0]}"


def _outputs_first(tensor: torch.Tensor, end: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if end == "weight" else tensor


def _granite_moe(writer: Any, config: Any) -> None:
    _granite(writer, config)
    _experts(writer, config)


def _granite_moe_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".block_sparse_moe.router.weight"):
        return {f"{_block(name)}.ffn_gate_inp.weight": tensor}
    return None


def _glm4_moe(writer: Any, config: Any) -> None:
    import gguf

    _experts(writer, config)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _balanced_routers(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".e_score_correction_bias"):
        return {f"{_block(name)}.exp_probs_b.bias": tensor}
    return None


def _attending_only(config: Any, attending: tuple[str, ...] = ("attention", "full_attention")) -> list[int]:
    """Heads of keys by layer: none where a layer has something else than attention."""
    return [config.num_key_value_heads if kind in attending else 0 for kind in config.layer_types]


def _granite_hybrid(writer: Any, config: Any) -> None:
    _granite(writer, config)
    inner = config.mamba_n_heads * config.mamba_d_head
    for name, size in {
        "conv_kernel": config.mamba_d_conv, "state_size": config.mamba_d_state, "group_count": config.mamba_n_groups,
        "inner_size": inner, "time_step_rank": config.mamba_n_heads,
    }.items():  # fmt: skip
        getattr(writer, f"add_ssm_{name}")(size)
    writer.add_rope_scaling_finetuned(False)
    if config.num_local_experts:
        _experts(writer, config)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _granite_hybrid_sizes(config: Any) -> dict[str, Any]:
    width = config.intermediate_size if config.num_local_experts else config.shared_intermediate_size
    return {"feed_forward_length": width, "head_count_kv": _attending_only(config)}


def _granite_hybrid_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    block, leaf = _block(name), name.rpartition(".mamba.")[2]
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


def _granite_hybrid_check(config: Any) -> str | None:
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "nope"):
        return f"its positions are of the kind {kind}"
    return None if config.mamba_n_groups == 1 else "its state spaces have several groups, and a norm over all of them"


def _olmoe(config: Any) -> str | None:
    if config.num_key_value_heads != config.num_attention_heads:
        return "it has fewer heads of keys than of queries"
    return _chooses_plainly(config)


def _lfm2_sizes(config: Any) -> dict[str, Any]:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        width = config.block_multiple_of * -(-width // config.block_multiple_of)
    return {"feed_forward_length": width, "head_count_kv": _attending_only(config)}


def _lfm2_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".conv.conv.weight"):
        return {f"{_block(name)}.shortconv.conv.weight": tensor.squeeze(1)}
    return None


def _qwen3_5(writer: Any, config: Any) -> None:
    for name, size in {
        "conv_kernel": config.linear_conv_kernel_dim, "state_size": config.linear_key_head_dim,
        "group_count": config.linear_num_key_heads, "time_step_rank": config.linear_num_value_heads,
        "inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }.items():  # fmt: skip
        getattr(writer, f"add_ssm_{name}")(size)
    writer.add_full_attention_interval(_interval(config))
    sections = list(config.rope_parameters.get("mrope_section") or [11, 11, 10])
    writer.add_rope_dimension_sections([*sections, *[0] * (4 - len(sections))])


def _interval(config: Any) -> int:
    return 1 + list(config.layer_types).index("full_attention")


def _qwen3_5_check(config: Any) -> str | None:
    if "full_attention" not in config.layer_types:
        return "none of its layers attends to all tokens"
    every = _interval(config)
    kinds = ["linear_attention" if (n + 1) % every else "full_attention" for n in range(config.num_hidden_layers)]
    return None if list(config.layer_types) == kinds else "its layers with attention are not at even distances"


def _qwen3_5_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """Of linear attention: heads of values that share one of keys lie apart in llama.cpp, which goes through the heads
    of keys again and again."""
    if ".linear_attn." not in name:
        return None
    block, leaf = _block(name), name.rpartition(".linear_attn.")[2]
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


def _deepseek_v3(writer: Any, config: Any) -> None:
    _glm4_moe(writer, config)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * (config.rope_parameters.get("mscale_all_dim") or 0.0))


def _deepseek_v3_sizes(config: Any) -> dict[str, Any]:
    """Keys and values are compressed: llama.cpp attends to them as they are, as one head."""
    length = config.kv_lora_rank + config.qk_rope_head_dim
    kept = {"head_count_kv": 1, "key_length": length, "value_length": config.kv_lora_rank}
    return kept | {"rope_dimension_count": config.qk_rope_head_dim}


def _deepseek_v3_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    if name.endswith(".kv_b_proj.weight"):
        heads, parts = config.num_attention_heads, [config.qk_nope_head_dim, config.v_head_dim]
        keys, values = tensor.reshape(heads, sum(parts), config.kv_lora_rank).split(parts, dim=1)
        return {f"{_block(name)}.attn_k_b.weight": keys.transpose(1, 2), f"{_block(name)}.attn_v_b.weight": values}
    return _balanced_routers(name, tensor, config)


def _deepseek_v3_check(config: Any) -> str | None:
    yarn = config.rope_parameters
    if yarn["rope_type"] == "yarn" and yarn.get("mscale") != yarn.get("mscale_all_dim"):
        return "its YaRN scales positions and attention by different factors"
    return None


def _has_one_group(config: Any) -> str | None:
    return None if (config.n_group or 1) == 1 else "its routers choose groups of experts first"


def _chooses_plainly(config: Any) -> str | None:
    """Of routers whose weights llama.cpp takes as they are."""
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    if getattr(config, "clip_qkv", None):
        return "it clips queries, keys and values"
    return "its routers normalise the weights of the experts they choose" if config.norm_topk_prob else None


def _exaone4(config: Any) -> str | None:
    if any(kind == "sliding_attention" for kind in config.layer_types):
        return "some of its layers see a sliding window and others do not"
    return None


def _gpt_oss_check(config: Any) -> str | None:
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(config.num_hidden_layers)]
    if list(config.layer_types) != kinds:
        return "its layers do not see a sliding window and all tokens in turn"
    limit = getattr(config, "swiglu_limit", 7.0)
    return None if limit == 7.0 else f"its MLP is clamped at {limit:g}"


def _every_fourth_is_full(config: Any) -> str | None:
    kinds = ["sliding_attention" if (n + 1) % 4 else "full_attention" for n in range(config.num_hidden_layers)]
    return None if list(config.layer_types) == kinds else "its layers attend in another order than every 4th to all"


def _seed_oss(config: Any) -> str | None:
    has = [name for name in ("attention_out_bias", "mlp_bias") if getattr(config, name, False)]
    return f"it has biases ({', '.join(has)})" if has else None


def _gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping or NO_CAP)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or NO_CAP)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _phi3(writer: Any, config: Any) -> None:
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


def _granite(writer: Any, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _smollm3(config: Any) -> str | None:
    rotated = [int((n + 1) % 4 != 0) for n in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == rotated else "its layers without positions are not every fourth"


def _qwen3_moe(config: Any) -> str | None:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    return None if config.norm_topk_prob else "its routers do not normalise the weights of the experts they choose"


def _alternating(every: int) -> Callable[[Any], str | None]:
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


GELU = ("gelu_pytorch_tanh",)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("LLAMA", permutes=True),
    "MistralForCausalLM": Architecture("LLAMA", permutes=True),
    "MixtralForCausalLM": Architecture("LLAMA", permutes=True, says=_experts),
    "Qwen2ForCausalLM": Architecture("QWEN2"),
    "Qwen3ForCausalLM": Architecture("QWEN3"),
    "Qwen3MoeForCausalLM": Architecture("QWEN3MOE", says=_experts, check=_qwen3_moe),
    "GemmaForCausalLM": Architecture("GEMMA", GELU, norm_offset=True),
    "Gemma2ForCausalLM": Architecture(
        "GEMMA2", GELU, norm_offset=True, has_windows=True, says=_gemma2, check=_alternating(2)
    ),
    "Gemma3ForCausalLM": Architecture(
        "GEMMA3", GELU, norm_offset=True, has_windows=True, says=_gemma3, check=_alternating(6)
    ),
    "Phi3ForCausalLM": Architecture("PHI3", says=_phi3),
    "Olmo2ForCausalLM": Architecture("OLMO2"),
    "GraniteForCausalLM": Architecture("GRANITE", permutes=True, says=_granite),
    "SmolLM3ForCausalLM": Architecture("SMOLLM3", permutes=True, check=_smollm3),
    "Glm4ForCausalLM": Architecture("GLM4"),
    "Glm4MoeForCausalLM": Architecture("GLM4_MOE", says=_glm4_moe, check=_has_one_group, tensors=_balanced_routers),
    "GptOssForCausalLM": Architecture(
        "GPT_OSS", has_windows=True, may_round_yarn=True, says=_gpt_oss, check=_gpt_oss_check, tensors=_gpt_oss_tensors
    ),
    "Qwen2MoeForCausalLM": Architecture("QWEN2MOE", says=_shared_expert, check=_chooses_plainly),
    "OlmoeForCausalLM": Architecture("OLMOE", says=_experts, check=_olmoe),
    "GraniteMoeForCausalLM": Architecture(
        "GRANITE_MOE", permutes=True, says=_granite_moe, tensors=_granite_moe_tensors
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "GRANITE_HYBRID",
        permutes=True,
        says=_granite_hybrid,
        check=_granite_hybrid_check,
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
        "QWEN35", norm_offset=True, says=_qwen3_5, check=_qwen3_5_check, tensors=_qwen3_5_tensors
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "DEEPSEEK2",
        scales_yarn=False,
        check=_deepseek_v3_check,
        says=_deepseek_v3,
        sizes=_deepseek_v3_sizes,
        tensors=_deepseek_v3_tensors,
    ),
    "Ministral3ForCausalLM": Architecture("MISTRAL3", permutes=True, says=_ministral3),
    "Olmo3ForCausalLM": Architecture("OLMO2", has_windows=True, says=_windows),
    "Cohere2ForCausalLM": Architecture(
        "COHERE2", has_layer_norm=True, has_windows=True, says=_cohere2, check=_every_fourth_is_full
    ),
    "SeedOssForCausalLM": Architecture("SEED_OSS", check=_seed_oss),
    "Exaone4ForCausalLM": Architecture("EXAONE4", check=_exaone4),
    "Ernie4_5ForCausalLM": Architecture("ERNIE4_5"),
    "HunYuanDenseV1ForCausalLM": Architecture("HUNYUAN_DENSE"),
    "ArceeForCausalLM": Architecture("ARCEE", ("relu2",), permutes=True),
    "Starcoder2ForCausalLM": Architecture("STARCODER2", GELU, has_layer_norm=True),
    "GPT2LMHeadModel": Architecture("GPT2", ("gelu_new", *GELU), has_layer_norm=True),
}
ROPE_TYPES = {"default", "llama3", "linear", "yarn"}


def architecture_of(model: nn.Module) -> Architecture:
    """UserError where this model cannot be a GGUF file that llama.cpp runs rightly."""
    name, config = type(model).__name__, model.config.get_text_config()
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UserError(
            f"{name} cannot be exported to GGUF here, only {listed(ARCHITECTURES, most=20)}; export it with --to "
            "safetensors and use llama.cpp's own converter."
        )
    why = found.check(config)
    said = (getattr(config, one, None) for one in ("hidden_activation", "hidden_act", "activation_function"))
    activation = next((one for one in said if one), None)
    if why is None and activation is not None and activation not in found.activations:
        why = f"its activation is {activation}"
    for parameters in _rope_parameters(config):
        kind = parameters["rope_type"]
        if why is None and kind not in ROPE_TYPES and not (kind == "longrope" and found.name == "PHI3"):
            why = f"its rotary positions are scaled by {kind}"
        if why is None and kind == "yarn" and (odd := _odd_yarn(parameters, may_round=found.may_round_yarn)):
            why = f"its YaRN has {odd}"
    if why is None and found.name in ("LLAMA", "QWEN2", "QWEN3") and _mixes_windows(config):
        why = "some of its layers see a sliding window and others do not"
    if why is not None:
        raise UserError(f"This {name} cannot be exported to GGUF: {why}, which llama.cpp computes otherwise.")
    return found


def describe(writer: Any, model: nn.Module, architecture: Architecture) -> None:
    """The sizes of the model, as llama.cpp wants them."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": _context(config, has_windows=architecture.has_windows),
        "embedding_length": config.hidden_size,
        "feed_forward_length": _width(config),
        "head_count": config.num_attention_heads,
        "head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "vocab_size": config.vocab_size,
    }
    for parameters in _rope_parameters(config)[-1:]:
        sizes["rope_freq_base"] = parameters["rope_theta"]
        sizes["rope_dimension_count"] = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        _say_scaling(writer, config, parameters, scales_yarn=architecture.scales_yarn)
    for name, size in (sizes | architecture.sizes(config)).items():
        getattr(writer, f"add_{name}")(size)
    (writer.add_layer_norm_eps if architecture.has_layer_norm else writer.add_layer_norm_rms_eps)(_epsilon(config))
    architecture.says(writer, config)


def _width(config: Any) -> int:
    """Of the MLP; GPT-2's configs leave it out where it is four times the hidden size."""
    found = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return found or 4 * config.hidden_size


def _epsilon(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)


def rope_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Factors by which the frequencies of rotary positions are divided, where they are no closed formula there."""
    config = model.config.get_text_config()
    parameters = next(iter(_rope_parameters(config)[-1:]), {"rope_type": "default"})
    if parameters["rope_type"] == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(parameters[f"{kind}_factor"], dtype=torch.float32)
            for kind in ("long", "short")
        }
    if parameters["rope_type"] != "llama3":
        return {}
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    frequencies = rotary.inv_freq.double()
    plain = parameters["rope_theta"] ** -(torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies))
    return {"rope_freqs.weight": (plain / frequencies).float()}


def converted(
    name: str, tensor: torch.Tensor, model: nn.Module, architecture: Architecture, names: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the model as llama.cpp has it: under its names, permuted, offset, experts apart; also a meta one."""
    config = model.config.get_text_config()
    owner, _, leaf = name.rpartition(".")
    if (own := architecture.tensors(name, tensor, config)) is not None:
        yield from own.items()
        return
    if leaf == "gate_up_proj" and tensor.ndim == 3:  # of all experts: [E, 2I, H]
        gate, up = tensor.chunk(2, dim=1)
        yield f"{_block(name)}.ffn_gate_exps.weight", gate
        yield f"{_block(name)}.ffn_up_exps.weight", up
        return
    if leaf == "down_proj" and tensor.ndim == 3:
        yield f"{_block(name)}.ffn_down_exps.weight", tensor
        return
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UserError(f"The tensor {name} of this model has no place in a GGUF file of its architecture.")
    if leaf == "weight" and is_transposed(model.get_submodule(owner)):
        tensor = tensor.t()
    yield found, arranged(name, tensor, config, architecture)


def arranged(name: str, tensor: torch.Tensor, config: Any, architecture: Architecture) -> torch.Tensor:
    """Rows permuted and norms offset, as llama.cpp wants them; also of an adapter's second factor."""
    owner = name.rpartition(".")[0].rpartition(".")[2]
    if architecture.permutes and owner in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if owner == "q_proj" else config.num_key_value_heads
        pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)
    if architecture.norm_offset and owner.endswith("norm"):
        return tensor.float() + 1
    return tensor


def _say_scaling(writer: Any, config: Any, parameters: dict[str, Any], *, scales_yarn: bool) -> None:
    import gguf

    kind = parameters["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    elif kind == "yarn":
        original = parameters["original_max_position_embeddings"]
        factor = parameters.get("factor") or config.max_position_embeddings / original
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
        own = 1 + 0.1 * math.log(factor) if factor > 1 and scales_yarn else 1.0  # llama.cpp's
        writer.add_rope_scaling_attn_factors(_attention_scale(config) / own)


def _odd_yarn(parameters: dict[str, Any], *, may_round: bool) -> str | None:
    """What llama.cpp has one value for: it reads others from no file of these architectures."""
    usual = {"beta_fast": 32, "beta_slow": 1} | ({} if may_round else {"truncate": True})
    found = ((name, parameters.get(name)) for name in usual)
    return next((f"{name} {value}" for name, value in found if value is not None and value != usual[name]), None)


def _attention_scale(config: Any) -> float:
    """By which YaRN scales queries and keys, as transformers finds it in the many ways in which configs say it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    layers = None if "rope_type" in config.rope_parameters else "full_attention"
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"), layer_type=layers)[1]


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of each kind of layers; of layers that see all tokens last."""
    found = getattr(config, "rope_parameters", None)
    if not found:
        return []
    if "rope_type" in found:
        return [found]
    return [found[kind] for kind in sorted(found, key=lambda kind: kind == "full_attention")]


def _context(config: Any, *, has_windows: bool) -> int:
    """Models whose sliding windows llama.cpp does not have (it reads a Phi-3's and lets it be) are exported for
    contexts that fit into theirs."""
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) and not has_windows
    return min(config.max_position_embeddings, window) if window and is_used else config.max_position_embeddings


def _mixes_windows(config: Any) -> bool:
    return len(set(getattr(config, "layer_types", None) or ["full_attention"])) > 1
