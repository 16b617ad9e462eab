"""The proxy: a small model of the same code, on which the probe tries what does not depend on weights.

Its config is the model's with a few narrow layers, each kind of layer among them, a small vocabulary, and every length
at which the code switches (windows, chunks, the length from which RoPE is scaled otherwise) made so small that short
documents cross it.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.model import load, lora
from tunesmith.model.structure import kind_of, plain_call
from tunesmith.plan.models import is_encoder_decoder as is_encoder_decoder_config
from tunesmith.plan.models import language_model_class

TOKENS = 500
"""The proxy's vocabulary."""
WIDTH = 64
"""Of the proxy's MLPs and experts."""
LARGEST = 60_000_000
"""Parameters of a proxy; a model that cannot be made smaller is tried once it is loaded, in its own precision."""
SMALL = 3_000_000
"""A model of so few parameters is its own proxy, but for the lengths at which it switches."""
WINDOW, SWITCH, POSITIONS = 5, 16, 64
"""Tokens, in the proxy: a window or chunk, where RoPE changes, and the longest sequence."""
CHUNK = 8
"""Tokens that a state space takes at once, in the proxy."""
MOST_LAYERS = 12
STATE_SPACE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
)
"""What configs call how many there are and how wide each is."""
LINEAR_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")


@dataclass(frozen=True)
class Proxy:
    model: nn.Module
    vocabulary: int
    long: int | None
    """Documents above this many tokens are computed by other rules than shorter ones, perhaps."""
    switch: int | None
    """The same length in the model itself."""


def build_proxy(config: Any, *, device: torch.device, trust_remote_code: bool = False) -> Proxy | None:
    """The smallest model of this code that can be built and called; None where none can."""
    skeleton = _skeleton(config, trust_remote_code)
    if skeleton is None:
        return None
    size = load.parameter_count(skeleton)
    depth = layers_of_every_kind(skeleton, config)
    shrinkings: list[Callable[[Any], None]] = [lambda small: None] if size <= SMALL else []
    shrinkings += [
        lambda small: _shrink(small, depth),
        lambda small: _shrink(small, depth, is_harder=True),
        lambda small: _shrink(small, depth, heads=4, is_harder=True),
    ]
    for shrink, lowers in itertools.product(shrinkings, (True, False)):
        small = copy.deepcopy(config)
        _set_dropouts(small)
        shrink(small)
        long, switch = _lower_switches(small) if lowers else (None, None)
        made = _skeleton(small, trust_remote_code)
        if made is None or load.parameter_count(made) > LARGEST:
            continue
        vocabulary = load.usable_tokens(small)
        model = _drawn(small, device, trust_remote_code, vocabulary)
        if model is not None:
            return Proxy(model, vocabulary, long, switch)
    return None


def build_wider_proxy(model: nn.Module, config: Any, device: torch.device, trust_remote_code: bool) -> nn.Module | None:
    """One of twice the heads, and hidden states as much wider; None where there is no such."""
    small = model.config.get_text_config()
    heads = getattr(small, "num_attention_heads", None)
    if not _is_size(heads):
        return None
    wider = copy.deepcopy(config)
    _set_dropouts(wider)
    _shrink(wider, getattr(small, "num_hidden_layers", 2), heads=2 * heads, is_harder=True)
    text = wider.get_text_config()
    if getattr(text, "hidden_size", None) == getattr(small, "hidden_size", None):
        return None
    made = _skeleton(wider, trust_remote_code)
    if made is None or load.parameter_count(made) > LARGEST:
        return None
    return _drawn(wider, device, trust_remote_code, load.usable_tokens(wider))


def _skeleton(config: Any, trust_remote_code: bool) -> nn.Module | None:
    with load.quiet(), torch.device("meta"):
        try:
            return language_model_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        except Exception:  # the model's own code: whatever it raises, this is no way to build it
            return None


def _drawn(config: Any, device: torch.device, trust_remote_code: bool, vocabulary: int) -> nn.Module | None:
    """The model with random weights, the same every time, in evaluation mode; None where it does not compute."""
    tokens = torch.arange(24, device=device)[None] % vocabulary
    for draws in (True, False):
        with load.quiet(), torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                model = language_model_class(config).from_config(
                    copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
                )
            except Exception:  # the model's own code: it cannot be built like this
                return None
            if draws:
                load.draw_weights(model, torch.device("cpu"))
            for bias in model.buffers():
                if bias.is_floating_point() and bias.numel() == vocabulary:  # so that leaving it out would show
                    bias.normal_()
            try:
                model = model.to(device).eval()
                with torch.no_grad():
                    logits = model(**plain_call(model, tokens)).logits
            except Exception:  # the model's own code: it cannot be called like this
                continue
        if logits.isfinite().all() and logits.std() > 1e-3:
            return model
    return None


def layers_of_every_kind(skeleton: nn.Module, config: Any) -> int:
    """How many layers, from the first, show every kind of module and every kind of layer that there is."""
    kinds: dict[str, int] = {}
    for name, module in skeleton.named_modules():
        layer = lora.layer_of(name)
        if layer is not None:
            kinds.setdefault(f"{kind_of(name)} {type(module).__name__}", layer)
    depth = 1 + max(kinds.values(), default=1)
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    for value in vars(text).values():
        if isinstance(value, list) and len(value) == layers:
            firsts = {str(one): index for index, one in reversed(list(enumerate(value)))}
            depth = max(depth, 1 + max(firsts.values()))
    return min(max(2, depth), MOST_LAYERS)


def configs_within(config: Any) -> Iterator[Any]:
    """The config, and those within it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            yield from configs_within(inner)


def _put(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property, or a value that the config's own checks do not allow
        return


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _set_dropouts(config: Any) -> None:
    for one in configs_within(config):
        for name, value in list(vars(one).items()):
            if "drop" in name and isinstance(value, float):
                _put(one, name, 0.0)


def _shrink(config: Any, depth: int, heads: int = 2, *, is_harder: bool = False) -> None:
    """Fewer layers, narrow MLPs and experts, few tokens; no fewer than so many heads, of the same size."""
    _shrink_stacks(config)
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if _is_size(layers) and layers > depth:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == layers:
                _put(text, name, value[:depth])
        _put(text, "num_hidden_layers", depth)
    for one in configs_within(config):
        for name, value in list(vars(one).items()):
            if re.search(r"intermediate_size|ffn_dim|n_inner|ffn_hidden_size|^d_ff$", name):
                _put_at_most(one, name, value, WIDTH)
            if re.search(r"^(mamba_)?chunk_size$", name):  # of a state space's computation
                _put_at_most(one, name, value, CHUNK)
    if is_harder:
        _shrink_harder(text)
    _shrink_vocabulary(config)
    _shrink_width(text, heads)


def _put_at_most(config: Any, name: str, value: Any, most: int) -> None:
    """A size, or those of the layers."""
    if _is_size(value):
        _put(config, name, min(value, most))
    elif isinstance(value, list) and value and all(map(_is_size, value)):
        _put(config, name, [min(one, most) for one in value])


def _shrink_vocabulary(config: Any) -> None:
    text = config.get_text_config()
    if not _is_size(getattr(text, "vocab_size", None)):
        return
    for name, value in list(vars(text).items()):
        if name.startswith("vocab_size"):
            _put_at_most(text, name, value, TOKENS)
    for one in configs_within(config):
        for name, value in list(vars(one).items()):
            if name in ("pad_token_id", "decoder_start_token_id") and _is_size(value) and value >= text.vocab_size:
                _put(one, name, None)
                if getattr(one, name) is not None:  # it must be there
                    _put(one, name, text.vocab_size - 1)


def _shrink_width(text: Any, least: int) -> None:
    """Fewer heads, and hidden states that are narrower by as much."""
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not (_is_size(heads) and _is_size(hidden) and _is_size(kv_heads)):
        return
    factor = math.gcd(heads, math.gcd(hidden, kv_heads))
    while factor > 1 and (heads // factor < least or hidden // factor < 64):
        factor = max((d for d in range(1, factor) if factor % d == 0), default=1)
    if factor == 1 and least > 2 and kv_heads == heads and hidden % heads == 0 and heads > least:  # a prime number
        _put(text, "hidden_size", hidden // heads * least)
        _put(text, "num_attention_heads", least)
    if factor == 1:
        return
    for name in ("hidden_size", "attention_hidden_size", "num_attention_heads", "num_key_value_heads"):
        if _is_size(value := getattr(text, name, None)) and value % factor == 0:
            _put(text, name, value // factor)
    _shrink_mixers(text, hidden, factor)


def _shrink_harder(text: Any) -> None:
    """Twice as many experts as a token is given to, in as many groups; low ranks of latent attention, and few heads of
    linear attention."""
    sizes = {name: value for name, value in vars(text).items() if _is_size(value)}
    chosen = max(
        (sizes[name] for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk") if name in sizes),
        default=2,
    )
    groups = max(sizes.get("n_group", 1), sizes.get("num_expert_group", 1))
    each = max(2, -(-2 * chosen // sizes.get("topk_group", 1)))
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if name in sizes:
            _put(text, name, min(sizes[name], groups * each))
    for name in ("q_lora_rank", "kv_lora_rank", "o_lora_rank"):
        if name in sizes:
            _put(text, name, min(sizes[name], WIDTH))
    linear = {name: sizes[name] for name in LINEAR_HEADS if name in sizes}
    for name, count in linear.items():
        _put(text, name, 2 * count // math.gcd(*linear.values()))


def _shrink_mixers(text: Any, hidden: int, factor: int) -> None:
    """The heads of a state space, whose inner width is a multiple of the model's: that is narrower now."""
    for heads, width in STATE_SPACE_HEADS:
        count, size = getattr(text, heads, None), getattr(text, width, None)
        if not _is_size(count) or not _is_size(size) or count * size % hidden:
            continue
        if count % factor == 0:
            _put(text, heads, count // factor)
        elif size % factor == 0:
            _put(text, width, size // factor)
        for name, value in list(vars(text).items()):
            if name.endswith("d_ssm") and value == count * size:
                _put(text, name, value // factor)
            if name.endswith(("n_groups", "ngroups")) and _is_size(value):
                _put(text, name, math.gcd(value, getattr(text, heads)))


def _shrink_stacks(config: Any) -> None:
    """What of an encoder-decoder has names of its own: two counts of layers and of heads."""
    if not is_encoder_decoder_config(config.to_dict()):
        return
    stacks = [one for side in ("encoder", "decoder") if hasattr(one := getattr(config, side, None), "to_dict")]
    for stack in stacks:
        _shrink(stack, 2)
    if len(stacks) == 2 and hasattr(stacks[1], "cross_attention_hidden_size"):
        _put(stacks[1], "cross_attention_hidden_size", stacks[0].hidden_size)
    if stacks and _is_size(getattr(config, "vocab_size", None)):
        _put(config, "vocab_size", min(config.vocab_size, TOKENS))
    for name in ("encoder_layers", "decoder_layers", "num_layers", "num_encoder_layers", "num_decoder_layers"):
        if _is_size(value := getattr(config, name, None)):
            _put(config, name, min(value, 2))
    heads = {getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")}
    if _is_size(getattr(config, "d_kv", None)) and _is_size(getattr(config, "num_heads", None)):
        _put(config, "num_heads", min(2, config.num_heads))
        return
    many, hidden = heads.pop() if len(heads) == 1 else None, getattr(config, "d_model", None)
    if _is_size(many) and _is_size(hidden) and many > 2 and hidden % many == 0:
        size = hidden // many
        fewer = max(2, -(-64 // size))
        _put(config, "d_model", fewer * size)
        for side in ("encoder", "decoder"):
            _put(config, f"{side}_attention_heads", fewer)


def _lower_switches(config: Any) -> tuple[int | None, int | None]:
    """Windows and chunks of a few tokens, RoPE that changes early. Returns where, in this config and as it was."""
    real: list[int] = []
    for one in configs_within(config):
        for name, value in list(vars(one).items()):
            if _is_size(value) and value > WINDOW and re.search(r"window(_size)?$|attention_chunk|index_topk", name):
                _put(one, name, WINDOW)
        ropes = [getattr(one, name, None) for name in ("rope_parameters", "rope_scaling")]
        ropes = [rope for rope in ropes if isinstance(rope, dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
        is_dynamic = any("dynamic" in str(rope.get("rope_type", rope.get("type"))) for rope in ropes)
        longest = getattr(one, "max_position_embeddings", None)
        found = [rope.get("original_max_position_embeddings") for rope in ropes]
        found += [getattr(one, "original_max_position_embeddings", None), longest if is_dynamic else None]
        real += [value for value in found if _is_size(value)]
        for rope in ropes:
            if _is_size(rope.get("original_max_position_embeddings")):
                rope["original_max_position_embeddings"] = SWITCH
        if _is_size(getattr(one, "original_max_position_embeddings", None)):
            _put(one, "original_max_position_embeddings", SWITCH)
        if _is_size(longest) and ropes:
            _put(one, "max_position_embeddings", min(longest, SWITCH if is_dynamic else POSITIONS))
    return (SWITCH, min(real)) if real and min(real) >= SWITCH else (None, None)
