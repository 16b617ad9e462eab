"""What a GGUF file says of a model, and the model's tensors as llama.cpp has them: under its names, and in its order.

A model of an architecture that is not in `gguf_families` is refused; so is one that computes something which llama.cpp
would compute otherwise.

Legend: E experts, I the experts' width, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.export.gguf_families import ARCHITECTURES, Architecture, block_of
from tunesmith.model.structure import is_transposed

ROPE_TYPES = {"default", "llama3", "linear", "yarn"}


def architecture_of(model: nn.Module) -> Architecture:
    """UserError where this model cannot be a GGUF file that llama.cpp runs rightly."""
    name, config = type(model).__name__, model.config.get_text_config()
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UserError(
            f"{name} cannot be exported to GGUF here; export it with --to safetensors and use llama.cpp's own "
            "converter."
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
        yield f"{block_of(name)}.ffn_gate_exps.weight", gate
        yield f"{block_of(name)}.ffn_up_exps.weight", up
        return
    if leaf == "down_proj" and tensor.ndim == 3:
        yield f"{block_of(name)}.ffn_down_exps.weight", tensor
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
