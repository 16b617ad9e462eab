"""A decoding step captured as a CUDA graph: a token for each row costs the host one launch instead of a thousand.

A captured step reads and writes the same memory every time, so the rows of a cache are copied into buffers that stay
where they are: as many rows and columns as one of a few sizes has. Attention goes over all columns, and the mask hides
those that are not a row's own. Rows that leave or join are copied once more; the graph of their new number is kept as
well. Steps of few rows are made of kernels of our own where they are for the model (`infer.fused`) and, of two captured
steps, theirs is the faster one. Otherwise, where layers may be compiled, steps are captured of compiled ones, and of
plain ones where that fails. A model whose step cannot be captured, or gives something else then, is called as ever.

A step chooses the likeliest tokens, too, and is ready to go on with them: where those are the ones that are wanted, the
next step is begun before anybody has read them, and the GPU does not wait for the host.

Legend: B rows, C columns, H heads, D head dim, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, StaticLayer

from tunesmith.errors import first_line
from tunesmith.infer.cache import RoomyLayer
from tunesmith.infer.compiled import CompiledLayers, NotCompiledError
from tunesmith.infer.fused import FusedModel, NotFusedError
from tunesmith.kernels.streams import capture_stream

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COLUMNS = 256
"""Buffers have a multiple of so many columns."""
FINE_COLUMNS = 64
"""The same where it is known how many tokens are to come."""
TRIES = 3
"""To capture a step: a kernel that is loaded meanwhile spoils one."""
TIMED = 10
"""Replays of a step whose time is wanted."""
FUSED_ROWS = 1
"""Steps of so many rows are made of our own kernels, which take up to 4; those of more than one have not been timed."""
BOUND = 0.3
"""How far a step's logits may be from those of the model as it is, over their standard deviation: rounding in bf16."""
ROOM = 1 << 30
"""Bytes that a capture needs at most, beside its logits: a weight taken out of few bits, and small tensors."""
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Cache], torch.Tensor]
"""tokens [B, 1], mask [B, C], positions [B, 1], cache -> logits [B, V]."""
log = logging.getLogger("tunesmith.infer")


def is_capturable(model: nn.Module) -> bool:
    """Whether a step may be captured at all: all weights on one GPU, as plain tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return bool(tensors) and all(
        one.device.type == "cuda" and one.device == tensors[0].device and not isinstance(one, DTensor)
        for one in tensors
    )


class FixedLayer(StaticLayer):
    """Keys and values of a captured step: [B, H, C, D], written at the column that a tensor names."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, at
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any):
        at = self.cumulative_length.reshape(1)
        self.keys.index_copy_(2, at, key_states)
        self.values.index_copy_(2, at, value_states)
        return self.keys, self.values


class Step:
    """One decoding step of B rows with C columns."""

    def __init__(
        self,
        forward: Forward,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        rows: int,
        compiled: CompiledLayers | None = None,
        fused: FusedModel | None = None,
    ):
        device = next(pair[0].device for pair in layers if pair is not None)
        columns = next(pair[0].shape[2] for pair in layers if pair is not None)
        self.forward, self.rows, self.columns, self.compiled = forward, rows, columns, compiled
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        places = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.at, self.positions = places[0], places[1:, None]
        self.mask = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.cache = Cache(layer_class_to_replicate=RoomyLayer)
        self.cache.layers = [RoomyLayer() if pair is None else FixedLayer(*pair, self.at) for pair in layers]
        self.fused = fused if fused is not None and None not in layers and rows <= FUSED_ROWS else None
        self.room = self.fused.room(rows, columns) if self.fused is not None else None
        self.chosen = self.room.chosen_b if self.room is not None else torch.zeros_like(self.tokens[:, 0])
        """The likeliest tokens after a step [B]; -1 where the logits are no numbers."""
        self._reads = [_Read(self.chosen) for _ in range(2)]
        self.graph: Any = None
        self.logits: torch.Tensor | None = None
        self.lengths: list[int] = []
        """Of the rows, as the tensors have them."""

    def set(self, lengths: Sequence[int]) -> None:
        """The rows have so many tokens, and end at the same column. Rows that nobody uses look at themselves."""
        self.lengths = list(lengths)
        longest, device = max(lengths), self.mask.device
        filled = [*lengths, *[0] * (self.rows - len(lengths))]
        lengths_b1 = torch.tensor(filled, device=device)[:, None]
        columns_c = torch.arange(self.columns, device=device)[None]
        self.mask.copy_((columns_c >= longest - lengths_b1) & (columns_c < longest))
        self.positions.copy_(lengths_b1)
        self.at.fill_(longest)

    def begin(self, last: Sequence[int], lengths: Sequence[int]) -> None:
        """The rows go on with these tokens."""
        if self.lengths != list(lengths):
            self.set(lengths)
        self.tokens[: len(last), 0].copy_(torch.tensor(last))

    def run(self) -> torch.Tensor:
        if self.fused is not None:
            pairs = [(layer.keys, layer.values) for layer in self.cache.layers]
            return self.fused.run(self.tokens, self.positions, self.at, pairs, self.room)
        self.mask.index_fill_(1, self.at.reshape(1), 1)
        with self.compiled.in_place() if self.compiled is not None else nullcontext():
            logits_bv = self.forward(self.tokens, self.mask, self.positions, self.cache)
        self.at.add_(1)
        self.positions.add_(1)
        chosen_b1 = logits_bv.argmax(-1, keepdim=True)  # NaN counts as the largest
        chosen_b1.masked_fill_(logits_bv.gather(-1, chosen_b1).isnan(), -1)
        self.chosen.copy_(chosen_b1[:, 0])
        self.tokens.copy_(chosen_b1.clamp(min=0))
        return logits_bv

    def capture(self, pool: Any) -> torch.Tensor:
        """Returns what the step gives without being captured; its tensors are as before then. On a CPU there is nothing
        to capture."""
        lengths, tokens = self.lengths, self.tokens.clone()

        def tried() -> torch.Tensor:
            found = self.run().clone()
            self.set(lengths)
            self.tokens.copy_(tokens)
            return found

        if self.tokens.device.type != "cuda":
            return tried()
        stream = capture_stream(self.tokens.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and workspaces made before
                expected = tried()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph, self.logits = captured(self.run, pool, stream, ROOM + 4 * expected.nbytes)
        return expected

    def replay(self) -> torch.Tensor:
        self.lengths = [length + 1 for length in self.lengths]
        if self.graph is None:
            self.logits = self.run()
            return self.logits
        assert self.logits is not None
        self.graph.replay()
        return self.logits

    def seconds(self) -> float:
        """Of a captured step, the least of a few; its tensors are as before then."""
        lengths, tokens, found = self.lengths, self.tokens.clone(), []
        for _ in range(TIMED):
            self.set(lengths)
            self.tokens.copy_(tokens)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self.replay()
            ended.record()
            ended.synchronize()
            found.append(began.elapsed_time(ended) / 1e3)
        self.set(lengths)
        self.tokens.copy_(tokens)
        return min(found)

    def read(self, count: int) -> Callable[[], list[int]]:
        """The tokens that this step chooses, whatever is begun after it; calling it waits for them."""
        self._reads.reverse()
        return self._reads[0].begin(count)


class _Read:
    """Copies what a tensor holds to the host, without waiting for what is begun later."""

    def __init__(self, source: torch.Tensor):
        self.source, self.is_apart = source, source.is_cuda
        self.kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.is_apart)
        self.done = torch.cuda.Event() if self.is_apart else None

    def begin(self, count: int) -> Callable[[], list[int]]:
        self.kept.copy_(self.source, non_blocking=self.is_apart)
        if self.done is None:
            found = self.kept[:count].tolist()
            return lambda: found
        self.done.record()
        return lambda: self._end(count)

    def _end(self, count: int) -> list[int]:
        assert self.done is not None
        self.done.synchronize()
        return self.kept[:count].tolist()


@dataclass(frozen=True)
class Ahead:
    """A step that was begun with tokens that nobody had read yet."""

    step: Step
    lengths: list[int]
    chosen: Callable[[], list[int]]

    def is_of(self, step: Step, last: Sequence[int], lengths: Sequence[int]) -> bool:
        return self.step is step and self.lengths == list(lengths) and self.chosen() == list(last)


def captured(
    run: Callable[[], torch.Tensor], pool: Any, stream: torch.cuda.Stream, needed: int
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """What `run` does, captured on the stream, and the tensor that it gives. A capture takes memory of its own, which
    the allocator must not hold back for others; but it is emptied where less than `needed` bytes are free, and not each
    time as torch's own context does: a run that captures in every step would get all its memory anew in every step."""
    torch.cuda.synchronize(stream.device)
    if torch.cuda.mem_get_info(stream.device)[0] < needed:
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    return graph, result


class Captured:
    """The steps of one model, with the adapter that it has on. Buffers take no more than `limit` bytes. `expected`: how
    many tokens are to come for rows that begin together and only leave; buffers then have just their number, and no
    more columns than those tokens need."""

    def __init__(
        self,
        forward: Forward,
        compiled: CompiledLayers | None = None,
        expected: int | None = None,
        fused: FusedModel | None = None,
    ):
        self.is_off = False
        self.limit: int | None = None
        self.expected = expected
        self._forward = forward
        self._steps: dict[tuple[int, int], Step] = {}
        self._flat: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        """By layer: what the buffers of all steps are views of. None: a layer that uses the keys of another one."""
        self._pool: Any = None
        self._compiled, self._fused = compiled, fused
        self._proved: set[tuple[bool, bool]] = set()
        """Steps that are fused or not, of one row or of several, which are compiled apart."""
        self.likeliest: Callable[[], list[int]] | None = None
        """The tokens that the last step has chosen."""
        self._ahead: Ahead | None = None
        self._tries = TRIES
        self._placed: tuple[weakref.ref[Cache], Step] | None = None

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for pair in self._flat if pair is not None for one in pair)

    def go_on(
        self, cache: Cache, last: Sequence[int], lengths: Sequence[int], *, runs_ahead: bool = False
    ) -> torch.Tensor | None:
        """The logits after one more token for each row [B, V]; None where the model is to be called as ever.
        `runs_ahead`: rows will very likely go on with the likeliest token, so that the next step is begun at once."""
        self.likeliest = None
        if self.is_off:
            return None
        step = self._step_of(cache, max(lengths)) or self._placed_in(cache, last, lengths)
        ahead, self._ahead = self._ahead, None
        if step is None:
            return None
        if ahead is None or not ahead.is_of(step, last, lengths):
            step.begin(last, lengths)
            step.replay()
        assert step.logits is not None
        logits_bv = step.logits[: len(last)].clone()
        self.likeliest = step.read(len(last))
        self._advance(cache)
        if runs_ahead and max(lengths) + 1 < step.columns:
            self._ahead = Ahead(step, [length + 1 for length in lengths], self.likeliest)
            step.replay()
        return logits_bv

    def _placed_in(self, cache: Cache, last: Sequence[int], lengths: Sequence[int]) -> Step | None:
        try:
            return self._place(cache, last, lengths)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            if self._fused is not None and len(lengths) <= FUSED_ROWS:
                return self._placed_unfused(cache, last, lengths, first_line(error))
            self._tries -= 1
            self._pool = self._pool if self._steps else None
            if self._compiled is not None and (isinstance(error, NotCompiledError) or not self._tries):
                return self._placed_uncompiled(cache, last, lengths, first_line(error))
            if not self._tries:
                log.warning("decoding steps could not be captured (%s); they take longer", first_line(error))
                self._give_up()
            return None

    def _placed_unfused(self, cache: Cache, last: Sequence[int], lengths: Sequence[int], why: str) -> Step | None:
        """First without kernels that overlap, which not every driver captures; then without our own."""
        assert self._fused is not None
        if self._fused.way.overlaps:
            log.info("decoding steps are captured of kernels one after the other (%s)", why)
            self._fused.way = self._fused.way._replace(overlaps=False)
        else:
            log.info("decoding steps are not made of our own kernels (%s)", why)
            self._fused = None
        self._proved.clear()
        self._forget()
        return self._placed_in(cache, last, lengths)

    def _placed_uncompiled(
        self, cache: Cache, last: Sequence[int], lengths: Sequence[int], why: str
    ) -> Step | None:  # fmt: skip
        log.info("decoding steps are captured of layers as they are, which could not be compiled (%s)", why)
        self._compiled, self._tries = None, TRIES
        self._proved.clear()
        self._forget()
        return self._placed_in(cache, last, lengths)

    def _step_of(self, cache: Cache, longest: int) -> Step | None:
        """The step whose buffers the cache lies in, with a column left."""
        if self._placed is None or self._placed[0]() is not cache or longest >= self._placed[1].columns:
            return None
        first, own = _first(cache.layers), _first(self._placed[1].cache.layers)
        return self._placed[1] if first.key_buffer.data_ptr() == own.keys.data_ptr() else None

    def _place(self, cache: Cache, last: Sequence[int], lengths: Sequence[int]) -> Step | None:
        """Copy the cache into a step's buffers, where there is room."""
        count, longest = len(lengths), max(lengths)
        rows, columns = self._size(count, longest)
        if rows is None or not self._has_room(cache, rows, columns):
            return None
        self._evict()
        step = self._steps.get((rows, columns))
        is_new = step is None
        if step is None:
            views = [self._views(number, rows, columns) for number in range(len(self._flat))]
            step = Step(self._forward, views, rows, self._compiled, self._fused)
        for layer, own in zip(cache.layers, step.cache.layers, strict=True):
            if layer.is_initialized:
                own.keys[:count, :, :longest] = layer.keys
                own.values[:count, :, :longest] = layer.values
        step.set(lengths)
        if is_new:
            step.tokens[:count, 0].copy_(torch.tensor(last))
            if self._pool is None and torch.cuda.is_available():
                self._pool = torch.cuda.graph_pool_handle()
            found = step.capture(self._pool)
            if _kind(step) not in self._proved and not self._is_right(cache, found[:count], last, lengths, step):
                if step.fused is not None:
                    raise NotFusedError("they give something else")
                if self._compiled is not None:
                    return self._placed_uncompiled(cache, last, lengths, "they give something else then")
                return self._give_up()
            if step.fused is not None and not self._is_faster(step):
                self._fused = None
                self._forget()
                return self._place(cache, last, lengths)
            self._steps[rows, columns] = step
        for layer, own in zip(cache.layers, step.cache.layers, strict=True):
            if layer.is_initialized:
                layer.key_buffer, layer.value_buffer = own.keys[:count], own.values[:count]
                layer.show(longest)
        self._placed = (weakref.ref(cache), step)
        return step

    def _is_faster(self, step: Step) -> bool:
        """Whether a step of our own kernels takes less time than one of compiled layers, which is captured for that and
        not kept."""
        assert step.fused is not None
        if step.fused.is_known_fast:
            return True
        views = [(layer.keys, layer.values) for layer in step.cache.layers]
        other = Step(self._forward, views, step.rows, self._compiled)
        other.set(step.lengths)
        other.tokens.copy_(step.tokens)
        try:
            other.capture(self._pool)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            log.info("a decoding step of compiled layers could not be captured (%s)", first_line(error))
            step.fused.is_known_fast = True
            return True
        own, others = step.seconds(), other.seconds()
        log.info("a decoding step takes %.3f ms by our own kernels, %.3f ms compiled", 1e3 * own, 1e3 * others)
        step.fused.is_known_fast = own < others
        return step.fused.is_known_fast

    def _size(self, count: int, longest: int) -> tuple[int | None, int]:
        """Rows and columns of the buffers for a cache with so many; None: too many rows."""
        if self.expected is None:
            return next((size for size in ROWS if size >= count), None), (longest // COLUMNS + 1) * COLUMNS
        columns = longest + max(1, min(COLUMNS, self.expected))
        return count if count <= ROWS[-1] else None, -(-columns // FINE_COLUMNS) * FINE_COLUMNS

    def _is_right(
        self, cache: Cache, found_bv: torch.Tensor, last: Sequence[int], lengths: Sequence[int], step: Step
    ) -> bool:
        """Whether a step gives, captured and not, what the model gives with the cache as it was."""
        device, longest = found_bv.device, max(lengths)
        lengths_b1 = torch.tensor(lengths, device=device)[:, None]
        mask = (torch.arange(longest + 1, device=device)[None] >= longest - lengths_b1).long()
        expected_bv = self._forward(torch.tensor(last, device=device)[:, None], mask, lengths_b1, cache)
        for layer in cache.layers:
            if layer.is_initialized:
                layer.show(longest)
        replayed_bv = step.replay()[: len(last)].clone()
        step.set(lengths)
        spread = expected_bv.float().std().clamp(min=1e-6)
        worst = max((one.float() - expected_bv.float()).abs().max() / spread for one in (found_bv, replayed_bv))
        if worst <= BOUND:
            self._proved.add(_kind(step))
            return True
        log.warning("a captured decoding step differs by %.2g from the model's own, and is not used", float(worst))
        return False

    def _has_room(self, cache: Cache, rows: int, columns: int) -> bool:
        """Make the buffers larger where they must be, which ends all graphs so far."""
        needed = [
            rows * columns * layer.keys.shape[1] * layer.keys.shape[3] if layer.is_initialized else 0
            for layer in cache.layers
        ]
        values = [
            rows * columns * layer.values.shape[1] * layer.values.shape[3] if layer.is_initialized else 0
            for layer in cache.layers
        ]
        kept = _first(cache.layers).keys
        total = (sum(needed) + sum(values)) * kept.element_size()
        if self.limit is not None and total > self.limit:
            return False
        have = [0 if pair is None else pair[0].numel() for pair in self._flat]
        if len(have) == len(needed) and all(a >= b for a, b in zip(have, needed, strict=True)):
            return True
        self._forget()
        spare = 2 if self.limit is not None and 2 * total <= self.limit else 1  # graphs outlive a batch that grows
        self._flat = [
            (kept.new_zeros(spare * a), kept.new_zeros(spare * b)) if a else None
            for a, b in zip(needed, values, strict=True)
        ]
        self._heads = [layer.keys.shape[1] if layer.is_initialized else 0 for layer in cache.layers]
        self._sizes = [
            (layer.keys.shape[3], layer.values.shape[3]) if layer.is_initialized else (0, 0) for layer in cache.layers
        ]
        return True

    def _views(self, number: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        pair = self._flat[number]
        if pair is None:
            return None
        shapes = [(rows, self._heads[number], columns, size) for size in self._sizes[number]]
        keys, values = (flat[: torch.Size(shape).numel()].view(shape) for flat, shape in zip(pair, shapes, strict=True))
        return keys, values

    def _evict(self) -> None:
        """A cache that lies in the buffers gets its rows back, before others are written there."""
        placed = self._placed[0]() if self._placed is not None else None
        self._placed = self._ahead = None
        for layer in placed.layers if placed is not None else ():
            if layer.is_initialized:
                layer.key_buffer, layer.value_buffer = layer.keys.clone(), layer.values.clone()
                layer.show(layer.columns)

    def _advance(self, cache: Cache) -> None:
        for layer in cache.layers:
            if layer.is_initialized:
                layer.show(layer.columns + 1)

    def release(self) -> None:
        """Free all graphs and buffers. Caches that lie there are not to be used any more."""
        self._placed = self._ahead = self.likeliest = None
        self._forget()

    def _forget(self) -> None:
        """Graphs and their pool, which ends with the last of them, and buffers."""
        self._evict()
        for step in self._steps.values():
            step.graph = step.logits = step.room = None
        self._steps.clear()
        self._flat, self._pool = [], None

    def _give_up(self) -> None:
        self._forget()
        self.is_off = True


def _kind(step: Step) -> tuple[bool, bool]:
    return step.fused is not None, step.rows > 1


def _first(layers: Sequence[Any]) -> Any:
    return next(layer for layer in layers if layer.is_initialized)
