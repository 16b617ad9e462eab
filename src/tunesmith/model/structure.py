"""What a decoder is made of: its layers, and what surrounds them."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the longest list of modules that lies in no other list. Empty where it has
    none. Of an encoder-decoder those of its encoder, then those of its decoder."""
    if is_encoder_decoder(model):
        return list(dict.fromkeys(layer for stack in stacks_of(model) for layer in layers_of(stack)))
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    lists = [*_outermost_lists(decoder or model)] or [*_outermost_lists(model)]
    return list(dict.fromkeys(max(lists, key=len, default=nn.ModuleList())))


def layers_of(stack: nn.Module) -> nn.ModuleList:
    """Of an encoder-decoder's encoder or decoder."""
    return max(_outermost_lists(stack), key=len, default=nn.ModuleList())


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether it is called with what is read and what is written apart."""
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    return is_pair and not type(model).__name__.endswith(("ForCausalLM", "Decoder"))


def stacks_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder."""
    return model.get_encoder(), model.get_decoder()


def body(model: Any) -> nn.Module:
    """All of a model but its head. Some have it under another name than they say."""
    found = model.base_model
    if found is not model or (found := model.get_decoder()) is not model:
        return found
    layers = set(decoder_layers(model))
    return next((one for one in model.children() if not layers.isdisjoint(one.modules())), model)


def plain_call(model: nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
    """Arguments with which a model is given these tokens, [B, T]; an encoder-decoder on both sides."""
    both = {"decoder_input_ids": tokens} if is_encoder_decoder(model) else {}
    return {"input_ids": tokens, **both, "use_cache": False}


def set_attention(model: Any, name: str) -> None:
    """Tell a model how to attend: its text part, since encoders of images and sounds beside it may not know that."""
    text = model.config.get_text_config()
    parts = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    if _looks_attention_up(type(model)):
        text._attn_implementation = name
    else:
        model.set_attn_implementation({"": name, **dict.fromkeys(parts, name)} if parts else name)
    for module in model.modules():
        if (kind := kind_of_layer(module)) is not None:
            module.kind_of_layer = kind


@functools.cache
def _looks_attention_up(kind: type[nn.Module]) -> bool:
    """Whether a model's code takes its attention from transformers' table by the name in its config, in the way of
    earlier versions, which the installed one does not know for that and leaves as it is."""
    try:
        return "ALL_ATTENTION_FUNCTIONS[" in inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return False


def kind_of_layer(module: nn.Module) -> str | None:
    """Of the layer that this attention is in, as the model's config names it (`sliding_attention`); None where the
    config names none. It stands at the module once `set_attention` has seen it: a compiled layer that looked it up by
    its number would be compiled for that number alone."""
    known = getattr(module, "kind_of_layer", None)
    if known is not None:
        return known
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds is None:
        return None
    number = getattr(module, "layer_idx", None)
    return kinds[number] if isinstance(number, int) and number < len(kinds) else None


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the one that has this name."""
    parent, _, leaf = name.rpartition(".")
    if hasattr(module, "shows_weight"):
        module.shows_weight = is_encoder_decoder(model)
    setattr(model.get_submodule(parent), leaf, module.train(model.training))


def train_all(model: nn.Module) -> None:
    """As transformers loads it: also what the model's own code has frozen, but no integers."""
    for weight in model.parameters():
        weight.requires_grad_(weight.is_floating_point())


def put_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give the model this tensor as its parameter or buffer of this name, frozen."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if any(leaf == one for one, _ in module.named_parameters(recurse=False)):
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


def kind_of(name: str) -> str:
    """A module's name without the number of its layer, expert or the like."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear whose weight is stored [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


FEWEST = 64
"""Weights of a linear, up to which it stays as it is: a block of nf4, whose scale alone is half of what is saved."""


def linears_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linears that are held in few bits, by name: those of the decoder layers, but for the smallest (such as the
    coefficients of Gemma 3n, which also reads them itself)."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (computes_as_linear(type(module)) or is_transposed(module))
        and module is not head
        and module.weight.numel() > FEWEST
        and any(part.isdigit() for part in name.split("."))
    }


def linears_for_text(model: nn.Module) -> dict[str, nn.Module]:
    """The linears that are rounded. Those that no text passes through, as in a vision tower, are left as they are:
    nothing here could tell what rounding costs them, and their rows are of other sizes."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    return {name: module for name, module in linears_of_layers(model).items() if module in inside}


@functools.cache
def computes_as_linear(kind: type[nn.Module]) -> bool:
    """Whether this is nn.Linear, or a class of a model's own that computes the same (Falcon's)."""
    if kind is nn.Linear or not issubclass(kind, nn.Linear):
        return kind is nn.Linear
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=generator, device="cpu") for shape in ((3, 2), (3,), (4, 2)))
    tried = kind.__new__(kind)
    nn.Module.__init__(tried)
    tried.weight, tried.bias = nn.Parameter(weight), nn.Parameter(bias)
    try:
        found = tried(x)
    except Exception:  # the model's own code, which wants to know more than its weight and bias
        return False
    expected = F.linear(x, weight, bias)
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def holds_most_elsewhere(model: nn.Module, held: Iterable[torch.Tensor]) -> str | None:
    """The class of module that holds most, where more than half of the weights of the layers are not among `held`."""
    known = {id(weight) for weight in held}
    inside, elsewhere = 0, Counter()
    for layer in decoder_layers(model):
        for module in layer.modules():
            for weight in module.parameters(recurse=False):
                if id(weight) in known:
                    inside += weight.numel()
                else:
                    elsewhere[type(module).__name__] += weight.numel()
    return elsewhere.most_common(1)[0][0] if elsewhere.total() > inside else None
