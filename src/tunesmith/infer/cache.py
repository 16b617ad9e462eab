"""The key-value cache of requests that are decoded together: rows that join and leave between two steps.

All rows end at the same column, so that one causal mask, sliding or not, is right for all of them; what a shorter row
lacks at its beginning is padding, which the attention mask hides. Layers have room for columns to come, so that a step
writes its own keys and values and copies nothing. Layers with a sliding window keep all
keys, too: the mask cuts them.

Legend: B rows, H heads, L columns, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64
"""Columns that are allocated beyond those in use."""


class RoomyLayer(DynamicLayer):
    """`keys` and `values` are views [B, H, L, D] of buffers with room for more columns."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.key_buffer = self.value_buffer = None
            self.columns = 0
        self.key_buffer = _written(self.key_buffer, self.columns, key_states)
        self.value_buffer = _written(self.value_buffer, self.columns, value_states)
        self.columns += key_states.shape[-2]
        self.keys = self.key_buffer[:, :, : self.columns]
        self.values = self.value_buffer[:, :, : self.columns]
        return self.keys, self.values

    def cut(self, count: int) -> None:
        """Without the last `count` columns, which the next ones are written over."""
        self.columns -= count
        self.keys, self.values = self.keys[:, :, : self.columns], self.values[:, :, : self.columns]


@dataclass(frozen=True)
class Row:
    """One request's share of a cache: `length` columns of row `index`, before the last `beyond` ones."""

    cache: Cache
    index: int
    length: int
    beyond: int = 0


def is_shareable(config) -> bool:
    """Whether every layer of such a model keeps keys and values alone, which rows of a batch can share; others (state
    spaces, linear attention) keep states of kinds of their own."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def new_cache(config, *, is_shared: bool) -> Cache:
    """For one request's prompt."""
    return Cache(layer_class_to_replicate=RoomyLayer) if is_shared else DynamicCache(config=config)


def regroup(rows: Sequence[Row]) -> Cache:
    """A cache of these rows, taken out of the caches that they lie in."""
    length = max(row.length for row in rows)
    made = Cache(layer_class_to_replicate=RoomyLayer)
    for number, first in enumerate(rows[0].cache.layers):
        layer = RoomyLayer()
        made.layers.append(layer)
        if not first.is_initialized:  # a layer that uses the keys of another one
            continue
        layers = [row.cache.layers[number] for row in rows]
        layer.lazy_initialization(first.keys, first.values)
        layer.columns = length
        layer.key_buffer = _gathered([one.keys for one in layers], rows, length)
        layer.value_buffer = _gathered([one.values for one in layers], rows, length)
        layer.keys, layer.values = layer.key_buffer[:, :, :length], layer.value_buffer[:, :, :length]
    return made


def cut(cache: Cache, count: int) -> None:
    """Without the last `count` columns of every row."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.cut(count)


def bytes_of(cache: Cache) -> int:
    """Of keys and values, without the room."""
    layers = [layer for layer in cache.layers if layer.is_initialized]
    return sum(part.numel() * part.element_size() for one in layers for part in (one.keys, one.values))


def _gathered(parts: Sequence[torch.Tensor], rows: Sequence[Row], length: int) -> torch.Tensor:
    _, heads, _, size = parts[0].shape
    buffer = parts[0].new_zeros(len(rows), heads, length + ROOM, size)
    for place, (part, row) in enumerate(zip(parts, rows, strict=True)):
        end = part.shape[2] - row.beyond
        buffer[place, :, length - row.length : length] = part[row.index, :, end - row.length : end]
    return buffer


def _written(buffer: torch.Tensor | None, columns: int, new: torch.Tensor) -> torch.Tensor:
    batch, heads, count, size = new.shape
    if buffer is None or columns + count > buffer.shape[2]:
        larger = new.new_zeros(batch, heads, columns + count + ROOM, size)
        if buffer is not None:
            larger[:, :, :columns] = buffer[:, :, :columns]
        buffer = larger
    buffer[:, :, columns : columns + count] = new
    return buffer
