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
from typing import Any

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
        self.show(self.columns + key_states.shape[-2])
        return self.keys, self.values

    def show(self, columns: int) -> None:
        """So many columns are in use."""
        self.columns = columns
        self.keys, self.values = self.key_buffer[:, :, :columns], self.value_buffer[:, :, :columns]

    def cut(self, count: int) -> None:
        """Without the last `count` columns, which the next ones are written over."""
        self.show(self.columns - count)


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
    sources = _sources(rows)
    for number, first in enumerate(rows[0].cache.layers):
        layer = RoomyLayer()
        made.layers.append(layer)
        if not first.is_initialized:  # a layer that uses the keys of another one
            continue
        layer.lazy_initialization(first.keys, first.values)
        parts = [(cache.layers[number], *at) for cache, *at in sources]
        layer.key_buffer = _gathered([(one.keys, *at) for one, *at in parts], len(rows), length)
        layer.value_buffer = _gathered([(one.values, *at) for one, *at in parts], len(rows), length)
        layer.show(length)
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


def _sources(rows: Sequence[Row]) -> list[tuple[Cache, int, torch.Tensor, torch.Tensor]]:
    """Each cache and a number of columns at its end that are left out, the places of rows there, and their places among
    `rows`."""
    device = next((layer.keys.device for layer in rows[0].cache.layers if layer.is_initialized), None)
    if device is None:
        raise ValueError("its layers keep nothing in the cache that they are given")
    kinds = {(id(row.cache), row.beyond): row for row in rows}
    found = []
    for kind, one in kinds.items():
        pairs = [(row.index, place) for place, row in enumerate(rows) if (id(row.cache), row.beyond) == kind]
        taken, places = torch.tensor(pairs, device=device).unbind(1)
        found.append((one.cache, one.beyond, taken, places))
    return found


def _gathered(parts: Sequence[Any], count: int, length: int) -> torch.Tensor:
    """All rows end at the same column. What comes before a shorter row's beginning is hidden by the mask."""
    first = parts[0][0]
    _, heads, _, size = first.shape
    buffer = first.new_zeros(count, heads, length + ROOM, size)
    for part, beyond, taken, places in parts:
        end = part.shape[2] - beyond
        kept = min(length, end)
        rows = part[:, :, end - kept : end].index_select(0, taken)
        buffer[:, :, length - kept : length].index_copy_(0, places, rows)
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
