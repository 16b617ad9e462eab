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
    says: Callable[[Any, Any], None] = lambda writer, config: None
    """What is to be said besides."""
    check: Callable[[Any], str | None] = lambda config: None
    """Why a model of it cannot be exported."""


def _experts(writer: Any, config: Any) -> None:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


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
    "Gemma2ForCausalLM": Architecture("GEMMA2", GELU, norm_offset=True, says=_gemma2, check=_alternating(2)),
    "Gemma3ForCausalLM": Architecture("GEMMA3", GELU, norm_offset=True, says=_gemma3, check=_alternating(6)),
    "Phi3ForCausalLM": Architecture("PHI3", says=_phi3),
    "Olmo2ForCausalLM": Architecture("OLMO2"),
    "GraniteForCausalLM": Architecture("GRANITE", permutes=True, says=_granite),
    "SmolLM3ForCausalLM": Architecture("SMOLLM3", permutes=True, check=_smollm3),
    "Glm4ForCausalLM": Architecture("GLM4"),
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
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if why is None and activation not in found.activations:
        why = f"its activation is {activation}"
    for parameters in _rope_parameters(config):
        kind = parameters["rope_type"]
        if why is None and kind not in ROPE_TYPES and not (kind == "longrope" and found.name == "PHI3"):
            why = f"its rotary positions are scaled by {kind}"
        if why is None and kind == "yarn" and (odd := _odd_yarn(parameters)):
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
    parameters = _rope_parameters(config)[-1]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (parameters.get("partial_rotary_factor") or 1.0)))
    _say_scaling(writer, config, parameters)
    architecture.says(writer, config)


def rope_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Factors by which the frequencies of rotary positions are divided, where they are no closed formula there."""
    config = model.config.get_text_config()
    parameters = _rope_parameters(config)[-1]
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
    if leaf == "gate_up_proj" and tensor.ndim == 3:  # of all experts: [E, 2I, H]
        layer = owner.split(".layers.")[1].split(".")[0]
        gate, up = tensor.chunk(2, dim=1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        return
    if leaf == "down_proj" and tensor.ndim == 3:
        yield f"blk.{owner.split('.layers.')[1].split('.')[0]}.ffn_down_exps.weight", tensor
        return
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UserError(f"The tensor {name} of this model has no place in a GGUF file of its architecture.")
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


def _say_scaling(writer: Any, config: Any, parameters: dict[str, Any]) -> None:
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
        own = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0  # llama.cpp's scale of queries and keys
        writer.add_rope_scaling_attn_factors(_attention_scale(config) / own)


def _odd_yarn(parameters: dict[str, Any]) -> str | None:
    """What llama.cpp has one value for: it reads others from no file of these architectures."""
    usual = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
    found = ((name, parameters.get(name)) for name in usual)
    return next((f"{name} {value}" for name, value in found if value is not None and value != usual[name]), None)


def _attention_scale(config: Any) -> float:
    """By which YaRN scales queries and keys, as transformers finds it in the many ways in which configs say it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    layers = None if "rope_type" in config.rope_parameters else "full_attention"
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"), layer_type=layers)[1]


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of each kind of layers; of layers that see all tokens last."""
    found = config.rope_parameters
    if "rope_type" in found:
        return [found]
    return [found[kind] for kind in sorted(found, key=lambda kind: kind == "full_attention")]


def _context(config: Any) -> int:
    """llama.cpp has sliding windows for Gemmas alone (it reads a Phi-3's and lets it be): others are exported for
    contexts that fit into theirs."""
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True) and "gemma" not in config.model_type
    return min(config.max_position_embeddings, window) if window and is_used else config.max_position_embeddings


def _mixes_windows(config: Any) -> bool:
    return len(set(getattr(config, "layer_types", None) or ["full_attention"])) > 1
