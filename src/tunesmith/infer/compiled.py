"""Decoder layers compiled for a decoding step: its many small kernels, which each wait for the one before, become few.

Layers are the same code with other weights, and are compiled once for one row and once for several: each is handed its
own part of the cache, so that no layer's number is a constant of what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn
from transformers.cache_utils import Cache

from tunesmith.errors import first_line
from tunesmith.model.structure import decoder_layers
from tunesmith.parallel import compile

OPTIONS = {"coordinate_descent_tuning": True}
"""A product with one row becomes a kernel that reads the weight at memory bandwidth."""


class NotCompiledError(RuntimeError):
    """A layer is none that the compiler can take."""


class OneLayer:
    """The cache as one layer sees it."""

    def __init__(self, layer: Any):
        self.layer = layer

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        return self.layer.update(key_states, value_states)


class CompiledLayer(nn.Module):
    """Stands in a layer's place during a step. What else is asked of it, the layer answers."""

    def __init__(self, layer: nn.Module, number: int):
        super().__init__()
        self.layer, self.number = layer, number
        self.run = torch.compile(layer.forward, fullgraph=True, options=OPTIONS)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*map(self._own, args), **{name: self._own(value) for name, value in kwargs.items()})

    def _own(self, value: Any) -> Any:
        if isinstance(value, Cache):
            layer = value.layers[self.number]
            _vary(layer.keys, 0, 2)
            _vary(layer.values, 0, 2)
            return OneLayer(layer)
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                _vary(tensor, 0, *[3] * (tensor.ndim == 4))
        return value


def _vary(tensor: torch.Tensor, *dimensions: int) -> None:
    """Rows and columns of other steps are other numbers of the same variant; one row is a variant of its own."""
    for dimension in dimensions:
        if tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


class CompiledLayers:
    """The decoder layers of a model, which is itself again outside of `in_place`."""

    def __init__(self, model: nn.Module):
        compile.prepare()
        self._places = _places(model)
        self._made = [CompiledLayer(layer, number) for number, layer in enumerate(decoder_layers(model))]

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Whether its layers are called as they are: what hooks do around them would be left out."""
        layers = decoder_layers(model)
        hooks = [one for layer in layers for one in (layer._forward_hooks, layer._forward_pre_hooks)]
        return bool(layers) and len(_places(model)) == len(layers) and not any(hooks)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        for (parent, name, _), made in zip(self._places, self._made, strict=True):
            setattr(parent, name, made)
        try:
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        except torch._dynamo.exc.TorchDynamoException as error:
            raise NotCompiledError(first_line(error)) from error
        finally:
            for parent, name, layer in self._places:
                setattr(parent, name, layer)


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Of each decoder layer: who holds it, and under what name."""
    held = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    return [(*held[layer], layer) for layer in decoder_layers(model) if layer in held]
