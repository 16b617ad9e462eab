"""Kernels of a decoding step with one or a few rows: five a layer, each of which reads its weights once, at the rate of
memory. A norm is part of the product after it, rotary positions and the write to the cache are part of attention, and
residuals are added where they are made.

A program takes a few rows of a weight, whole or in chunks, and holds a tile of them in registers. Weights do not depend
on the kernel before, so where kernels may overlap (programmatic dependent launch: Hopper and later) a program loads its
first tile before it waits for that kernel: memory is read on while one kernel ends and the next begins. Sums are made
in the same order every time.

Legend: B rows of the batch, K inputs and N outputs of a product, R rows of a weight, H query heads, G key heads,
D head dim, C columns of the cache, S splits of them, P programs of the head.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunesmith.kernels.gating import Gating
from tunesmith.kernels.gating_fused import activation, constants

LARGEST = 8192
"""Columns of a weight that a program takes at once, at most."""
SPLITS = 16
"""Of a cache, at most."""


class Norm(Protocol):
    """An RMS norm: `x / sqrt(mean(x^2) + eps) * (weight + offset)`."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def eps(self) -> float: ...
    @property
    def offset(self) -> float: ...


class Tile(NamedTuple):
    """What a program holds at once (weights, or columns of the cache), and its warps."""

    elements: int
    warps: int


class Way(NamedTuple):
    """How kernels are launched: the fastest of those tried on an H200 with the shape of a Llama of 1.2 billion
    (benchmarks/decode.py --ways)."""

    overlaps: bool = False
    """A kernel may begin before the one before it has ended."""
    qkv: Tile = Tile(16384, 4)
    attention: Tile = Tile(64, 4)
    out: Tile = Tile(16384, 8)
    gated: Tile = Tile(16384, 8)
    down: Tile = Tile(32768, 8)
    head: Tile = Tile(16384, 4)
    columns: int = 64
    """Of the cache, for each program of attention, where there are no more than `SPLITS` of these."""

    @property
    def options(self) -> dict[str, bool]:
        return {"OVERLAPS": self.overlaps, **({"launch_pdl": True} if self.overlaps else {})}


def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def norm_products(
    x_bk: torch.Tensor,
    norm: Norm,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias_n: torch.Tensor | None,
    out_bn: torch.Tensor,
    way: Way,
) -> None:
    """Queries, keys and values of normed inputs, side by side."""
    (batch, size), sizes = x_bk.shape, [one.shape[0] for one in weights]
    rows, chunk = tile_of(sum(sizes), size, way.qkv)
    _norm_products[(triton.cdiv(sum(sizes), rows),)](
        x_bk, norm.weight, *weights, bias_n if bias_n is not None else out_bn, out_bn, norm.eps,
        N0=sizes[0], N1=sizes[1], N2=sizes[2], HAS_BIAS=bias_n is not None, OFFSET=norm.offset,
        K=size, BATCH=batch, ROWS=rows, CHUNK=chunk, num_warps=way.qkv.warps, **way.options,
    )  # fmt: skip


def products_added(
    y_bk: torch.Tensor, weight_nk: torch.Tensor, bias_n: torch.Tensor | None, x_bn: torch.Tensor, tile: Tile, way: Way
) -> None:
    """Adds a product to the residual stream, in place."""
    (batch, size), count = y_bk.shape, weight_nk.shape[0]
    rows, chunk = tile_of(count, size, tile)
    _products_added[(triton.cdiv(count, rows),)](
        y_bk, weight_nk, bias_n if bias_n is not None else x_bn, x_bn,
        N=count, HAS_BIAS=bias_n is not None, K=size, BATCH=batch, ROWS=rows, CHUNK=chunk,
        num_warps=tile.warps, **way.options,
    )  # fmt: skip


def norm_gated(
    x_bk: torch.Tensor,
    norm: Norm,
    gate_nk: torch.Tensor,
    up_nk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    gating: Gating,
    out_bn: torch.Tensor,
    way: Way,
) -> None:
    """The activation of a gated MLP of normed inputs."""
    (batch, size), count = x_bk.shape, gate_nk.shape[0]
    rows, chunk = tile_of(2 * count, size, way.gated)
    rows = max(rows, 2)
    _norm_gated[(triton.cdiv(2 * count, rows),)](
        x_bk, norm.weight, gate_nk, up_nk, *(biases or (out_bn, out_bn)), out_bn, norm.eps,
        N=count, HAS_BIAS=biases is not None, OFFSET=norm.offset, K=size, BATCH=batch, ROWS=rows, CHUNK=chunk,
        num_warps=way.gated.warps, **constants(gating.text), **way.options,
    )  # fmt: skip


def norm_head(
    x_bk: torch.Tensor,
    norm: Norm,
    weight_vk: torch.Tensor,
    bias_v: torch.Tensor | None,
    logits_bv: torch.Tensor,
    largest_bp: torch.Tensor,
    places_bp: torch.Tensor,
    way: Way,
) -> None:
    """Logits of normed inputs; of each program's the largest and its place."""
    (batch, size), count = x_bk.shape, weight_vk.shape[0]
    rows, chunk = tile_of(count, size, way.head)
    _norm_head[(largest_bp.shape[1],)](
        x_bk, norm.weight, weight_vk, bias_v if bias_v is not None else x_bk, logits_bv, largest_bp, places_bp,
        norm.eps, N=count, HAS_BIAS=bias_v is not None, OFFSET=norm.offset, K=size, BATCH=batch, ROWS=rows,
        CHUNK=chunk, num_warps=way.head.warps, **way.options,
    )  # fmt: skip


def head_programs(count: int, size: int, way: Way) -> int:
    return triton.cdiv(count, tile_of(count, size, way.head)[0])


def take_largest(
    largest_bp: torch.Tensor,
    places_bp: torch.Tensor,
    chosen_b: torch.Tensor,
    tokens_b: torch.Tensor,
    positions_b: torch.Tensor,
    at: torch.Tensor,
    way: Way,
) -> None:
    """The token with the largest logit goes on, a column and a position further; -1 where logits are no numbers."""
    _take_largest[(len(chosen_b),)](
        largest_bp, places_bp, chosen_b, tokens_b, positions_b, at,
        COUNT=largest_bp.shape[1], WIDTH=triton.next_power_of_2(largest_bp.shape[1]), num_warps=8, **way.options,
    )  # fmt: skip


class Scratch(NamedTuple):
    """Of attention with several splits; what programs count is 0 between two launches."""

    sums: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor
    counts: torch.Tensor
    splits: int
    columns: int

    @classmethod
    def make(cls, batch: int, query_heads: int, size: int, columns: int, device: torch.device, way: Way) -> Scratch:
        block = way.attention.elements
        each = triton.cdiv(max(way.columns, triton.cdiv(columns, SPLITS)), block) * block
        splits = triton.cdiv(columns, each)
        room = torch.zeros(splits, batch, query_heads, size + 2, dtype=torch.float32, device=device)
        counts = torch.zeros(batch, query_heads, dtype=torch.int32, device=device)
        sums, maxima, totals = (
            part.contiguous() for part in room.split([size, 1, 1], dim=-1)
        )  # fmt: skip
        return cls(sums, maxima, totals, counts, splits, each)


def attend(
    qkv_bn: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    turns: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[Norm, Norm] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_bn: torch.Tensor,
    scratch: Scratch,
    scaling: float,
    window: int | None,
    way: Way,
) -> None:
    """Keys and values are written into the cache [B, G, C, D] at the column, and queries look at all up to there.
    `places`: each row's position [B] and the column. `turns`: cosines and sines of all positions [C, D]."""
    batch, key_heads, columns, size = keys.shape
    query_heads = out_bn.shape[1] // size
    query_norm, key_norm = norms or (None, None)
    _attend[(batch * key_heads, scratch.splits)](
        qkv_bn, *places, *turns,
        query_norm.weight if query_norm else qkv_bn, key_norm.weight if key_norm else qkv_bn,
        keys, values, out_bn, scratch.sums, scratch.maxima, scratch.totals, scratch.counts,
        columns, scaling, query_norm.eps if query_norm else 0.0,
        HAS_NORMS=norms is not None, OFFSET=query_norm.offset if query_norm else 0.0, WINDOW=window or 0,
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, SIZE=size, GROUP=max(16, _power(query_heads // key_heads)),
        HALF=max(16, _power(size // 2)), WHOLE=max(16, _power(size)), BLOCK=way.attention.elements,
        EACH=scratch.columns, SPLITS=scratch.splits, BATCH=batch, num_warps=way.attention.warps, num_stages=1,
        **way.options,
    )  # fmt: skip


def tile_of(count: int, size: int, tile: Tile) -> tuple[int, int]:
    """Rows of a weight [count, size] that a program takes, and columns that it takes at once."""
    chunk = next((one for one in (LARGEST, 4096, 2048, 1024, 512) if size % one == 0 and one <= tile.elements), None)
    chunk = chunk or min(max(16, _power(size)), 2048)
    held = tile.elements // 2 if size > chunk else tile.elements  # besides sums, and the chunk that comes next
    return max(1, min(held // chunk, _power(count))), chunk


def _power(count: int) -> int:
    return triton.next_power_of_2(count)


@triton.jit
def _tile(lines, is_line, start, K: tl.constexpr, CHUNK: tl.constexpr):
    """Of rows that begin at `lines`, the columns from `start` on; nobody reads them again in this step."""
    column = start + tl.arange(0, CHUNK)
    if K % CHUNK == 0:
        mask = is_line[:, None]
    else:
        mask = is_line[:, None] & (column < K)[None, :]
    return tl.load(lines[:, None] + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(x, norm, start, K: tl.constexpr, CHUNK: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr):
    """Inputs as they are, and times the norm's weight."""
    column = start + tl.arange(0, CHUNK)
    plain = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    weighted = plain
    if HAS_NORM:
        weighted = plain * (tl.load(norm + column, mask=column < K, other=0.0).to(tl.float32) + OFFSET)
    return plain, weighted


@triton.jit
def _products(
    lines, is_line, x, norm, eps,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """[BATCH, ROWS]: rows of weights that begin at `lines`, times each normed input. The norm's own factor comes last,
    so that both sums are made at once."""
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    if OVERLAPS:
        gdc_launch_dependents()
    tile = _tile(lines, is_line, 0, K, CHUNK)
    if OVERLAPS:
        gdc_wait()
    row = tl.arange(0, BATCH)
    if BATCH == 1:
        sums = tl.zeros([ROWS, CHUNK], tl.float32)
        squares = tl.zeros([CHUNK], tl.float32)
        for number in tl.static_range(CHUNKS):
            here = tile
            if number + 1 < CHUNKS:
                tile = _tile(lines, is_line, (number + 1) * CHUNK, K, CHUNK)
            plain, weighted = _inputs(x, norm, number * CHUNK, K, CHUNK, HAS_NORM, OFFSET)
            sums += here.to(tl.float32) * weighted[None, :]
            squares += plain * plain
        total = tl.sum(sums, 1)[None, :]
        square = tl.sum(squares, 0) + tl.zeros([BATCH], tl.float32)
    else:
        total = tl.zeros([BATCH, ROWS], tl.float32)
        square = tl.zeros([BATCH], tl.float32)
        for number in tl.static_range(CHUNKS):
            here = tile.to(tl.float32)
            if number + 1 < CHUNKS:
                tile = _tile(lines, is_line, (number + 1) * CHUNK, K, CHUNK)
            for one in tl.static_range(BATCH):
                plain, weighted = _inputs(x + one * K, norm, number * CHUNK, K, CHUNK, HAS_NORM, OFFSET)
                total += tl.where(row[:, None] == one, tl.sum(here * weighted[None, :], 1)[None, :], 0.0)
                square += tl.where(row == one, tl.sum(plain * plain, 0), 0.0)
    if HAS_NORM:
        total *= tl.rsqrt(square / K + eps)[:, None]
    return total


@triton.jit
def _norm_products(
    x, norm, w0, w1, w2, bias, out, eps,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = N0 + N1 + N2
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    far = line.to(tl.int64)
    lines = tl.where(line < N0, w0 + far * K, tl.where(line < N0 + N1, w1 + (far - N0) * K, w2 + (far - N0 - N1) * K))
    total = _products(lines, line < N, x, norm, eps, K, BATCH, ROWS, CHUNK, True, OFFSET, OVERLAPS)
    if HAS_BIAS:
        total += tl.load(bias + line, mask=line < N, other=0.0).to(tl.float32)[None, :]
    to = out + tl.arange(0, BATCH)[:, None] * N + line[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(line < N)[None, :])


@triton.jit
def _products_added(
    y, weight, bias, x,
    N: tl.constexpr, HAS_BIAS: tl.constexpr,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lines = weight + line.to(tl.int64) * K
    total = _products(lines, line < N, y, y, 0.0, K, BATCH, ROWS, CHUNK, False, 0.0, OVERLAPS)
    if HAS_BIAS:
        total += tl.load(bias + line, mask=line < N, other=0.0).to(tl.float32)[None, :]
    to = x + tl.arange(0, BATCH)[:, None] * N + line[None, :]
    dtype = x.dtype.element_ty
    before = tl.load(to, mask=(line < N)[None, :], other=0.0).to(tl.float32)
    tl.store(to, (before + total.to(dtype).to(tl.float32)).to(dtype), mask=(line < N)[None, :])


@triton.jit
def _norm_gated(
    x, norm, gate, up, gate_bias, up_bias, out, eps,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    CURVE: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rows of gate and up take turns."""
    HALF: tl.constexpr = ROWS // 2
    both = tl.arange(0, ROWS)
    line = tl.program_id(0) * HALF + both // 2
    far = line.to(tl.int64) * K
    lines = tl.where(both % 2 == 0, gate + far, up + far)
    total = _products(lines, line < N, x, norm, eps, K, BATCH, ROWS, CHUNK, True, OFFSET, OVERLAPS)
    if HAS_BIAS:
        biases = tl.where(both % 2 == 0, gate_bias + line, up_bias + line)
        total += tl.load(biases, mask=line < N, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gate_part, up_part = tl.split(tl.reshape(total.to(dtype).to(tl.float32), (BATCH, HALF, 2)))
    made = activation(gate_part, up_part, CURVE, SLOPE, LIMIT, SHIFT)
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    to = out + tl.arange(0, BATCH)[:, None] * N + own[None, :]
    tl.store(to, made.to(dtype), mask=(own < N)[None, :])


@triton.jit
def _norm_head(
    x, norm, weight, bias, logits, largest, places, eps,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, OFFSET: tl.constexpr,
    K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    line = program * ROWS + tl.arange(0, ROWS)
    lines = weight + line.to(tl.int64) * K
    total = _products(lines, line < N, x, norm, eps, K, BATCH, ROWS, CHUNK, True, OFFSET, OVERLAPS)
    if HAS_BIAS:
        total += tl.load(bias + line, mask=line < N, other=0.0).to(tl.float32)[None, :]
    rounded = total.to(logits.dtype.element_ty)
    row = tl.arange(0, BATCH)
    tl.store(logits + row[:, None] * N + line[None, :], rounded, mask=(line < N)[None, :])
    seen = tl.where((line < N)[None, :], rounded.to(tl.float32), float("-inf"))
    most = tl.max(tl.where(seen == seen, seen, float("-inf")), 1)
    first = tl.min(tl.where(seen == most[:, None], line[None, :], N), 1)
    is_broken = tl.max((seen != seen).to(tl.int32), 1) > 0
    to = row * tl.num_programs(0) + program
    tl.store(largest + to, tl.where(is_broken, float("nan"), most))
    tl.store(places + to, first)


@triton.jit
def _take_largest(
    largest, places, chosen, tokens, positions, at,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    number = tl.arange(0, WIDTH)
    seen = tl.load(largest + row * COUNT + number, mask=number < COUNT, other=float("-inf"))
    place = tl.load(places + row * COUNT + number, mask=number < COUNT, other=2147483647)
    is_broken = tl.max((seen != seen).to(tl.int32), 0) > 0
    most = tl.max(tl.where(seen == seen, seen, float("-inf")), 0)
    found = tl.min(tl.where(seen == most, place, 2147483647), 0)
    tl.store(chosen + row, tl.where(is_broken, -1, found).to(tl.int64))
    tl.store(tokens + row, tl.where(is_broken, 0, found).to(tl.int64))
    tl.store(positions + row, tl.load(positions + row) + 1)
    if row == 0:
        tl.store(at, tl.load(at) + 1)


@triton.jit
def _normed(first, second, weight, eps, half, is_half, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    """Heads, each a line of two halves, by their RMS norm."""
    factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps)[:, None]
    weight_1 = tl.load(weight + half, mask=is_half, other=0.0).to(tl.float32) + OFFSET
    weight_2 = tl.load(weight + half + SIZE // 2, mask=is_half, other=0.0).to(tl.float32) + OFFSET
    return first * factor * weight_1[None, :], second * factor * weight_2[None, :]


@triton.jit
def _written(keys, values, column, end, half, whole, SIZE: tl.constexpr):
    """Keys, in two halves, and values of these columns before `end`."""
    is_old = (column < end)[:, None]
    is_key = is_old & (half < SIZE // 2)[None, :]
    first = keys + column[:, None] * SIZE + half[None, :]
    value = tl.load(values + column[:, None] * SIZE + whole[None, :], mask=is_old & (whole < SIZE)[None, :], other=0.0)
    return tl.load(first, mask=is_key, other=0.0), tl.load(first + SIZE // 2, mask=is_key, other=0.0), value


@triton.jit
def _added_up(
    sums, maxima, totals, query, to, is_query, is_out, HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """What all programs have left for these queries: values in sum, and what they are divided by."""
    most = tl.zeros_like(query).to(tl.float32) + float("-inf")
    for one in tl.static_range(SPLITS):
        left = tl.load(maxima + one * HEADS + query, mask=is_query, other=0.0, cache_modifier=".cg")
        most = tl.maximum(most, left)
    total = tl.zeros_like(most)
    attended = tl.zeros_like(to).to(tl.float32)
    for one in tl.static_range(SPLITS):
        left = tl.load(maxima + one * HEADS + query, mask=is_query, other=0.0, cache_modifier=".cg")
        fade = tl.exp(left - most)
        total += fade * tl.load(totals + one * HEADS + query, mask=is_query, other=1.0, cache_modifier=".cg")
        part = tl.load(sums + one * HEADS * SIZE + to, mask=is_out, other=0.0, cache_modifier=".cg")
        attended += fade[:, None] * part
    return attended, total


@triton.jit
def _attend(
    qkv, positions, at, cos, sin, query_norm, key_norm, keys, values, out, sums, maxima, totals, counts,
    columns, scaling, eps,
    HAS_NORMS: tl.constexpr, OFFSET: tl.constexpr, WINDOW: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
    SPLITS: tl.constexpr, BATCH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program takes the query heads of one key head and some columns. Of several, the last to be done adds up what
    all of them have left, in the order of columns."""
    if OVERLAPS:
        gdc_launch_dependents()
    QUERIES: tl.constexpr = QUERY_HEADS // KEY_HEADS
    MIDDLE: tl.constexpr = SIZE // 2
    TOTAL: tl.constexpr = (QUERY_HEADS + 2 * KEY_HEADS) * SIZE
    row, head, split = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS, tl.program_id(1)
    dtype = out.dtype.element_ty
    half, whole, group = tl.arange(0, HALF), tl.arange(0, WHOLE), tl.arange(0, GROUP)
    is_half, is_whole, is_query = half < MIDDLE, whole < SIZE, group < QUERIES
    now = tl.load(at)
    place = tl.load(positions + row)
    cos_1 = tl.load(cos + place * SIZE + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + place * SIZE + half + MIDDLE, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + place * SIZE + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + place * SIZE + half + MIDDLE, mask=is_half, other=0.0).to(tl.float32)[None, :]
    oldest = now - place
    if WINDOW > 0:
        oldest = tl.maximum(oldest, now - WINDOW + 1)
    begin = tl.maximum(split * EACH, oldest // BLOCK * BLOCK)
    end = tl.minimum((split + 1) * EACH, now + 1)
    base = tl.program_id(0).to(tl.int64) * columns * SIZE
    # What earlier steps have written may be read before the kernel before this one has ended.
    column = begin + tl.arange(0, BLOCK)
    key_1, key_2, value = _written(keys + base, values + base, column, tl.minimum(now, end), half, whole, SIZE)
    if OVERLAPS:
        gdc_wait()
    own = qkv + row * TOTAL + (head * QUERIES + group[:, None]) * SIZE + half[None, :]
    is_own = is_query[:, None] & is_half[None, :]
    query_1 = tl.load(own, mask=is_own, other=0.0).to(tl.float32)
    query_2 = tl.load(own + MIDDLE, mask=is_own, other=0.0).to(tl.float32)
    new = qkv + row * TOTAL + (QUERY_HEADS + head) * SIZE
    new_1 = tl.load(new + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    new_2 = tl.load(new + half + MIDDLE, mask=is_half, other=0.0).to(tl.float32)[None, :]
    new_value = tl.load(new + KEY_HEADS * SIZE + whole, mask=is_whole, other=0.0)[None, :]
    if HAS_NORMS:
        query_1, query_2 = _normed(query_1, query_2, query_norm, eps, half, is_half, SIZE, OFFSET)
        new_1, new_2 = _normed(new_1, new_2, key_norm, eps, half, is_half, SIZE, OFFSET)
    turned_1 = (query_1 * cos_1 - query_2 * sin_1).to(dtype)
    turned_2 = (query_2 * cos_2 + query_1 * sin_2).to(dtype)
    key_new_1 = (new_1 * cos_1 - new_2 * sin_1).to(dtype)
    key_new_2 = (new_2 * cos_2 + new_1 * sin_2).to(dtype)
    if (now >= split * EACH) & (now < (split + 1) * EACH):
        to = base + now * SIZE
        tl.store(keys + to + half[None, :], key_new_1, mask=is_half[None, :])
        tl.store(keys + to + half[None, :] + MIDDLE, key_new_2, mask=is_half[None, :])
        tl.store(values + to + whole[None, :], new_value, mask=is_whole[None, :])
    most = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    attended = tl.zeros([GROUP, WHOLE], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_new = (column == now)[:, None]
        here_1 = tl.where(is_new, key_new_1, key_1)
        here_2 = tl.where(is_new, key_new_2, key_2)
        here = tl.where(is_new, new_value, value)
        later = column + BLOCK
        key_1, key_2, value = _written(keys + base, values + base, later, tl.minimum(now, end), half, whole, SIZE)
        scores = tl.dot(turned_1, tl.trans(here_1), input_precision="ieee")
        scores = tl.dot(turned_2, tl.trans(here_2), scores, input_precision="ieee") * scaling
        is_seen = (column >= oldest) & (column < end)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp(scores - larger[:, None])
        fade = tl.exp(most - larger)
        total = total * fade + tl.sum(shares, 1)
        attended = tl.dot(shares.to(dtype), here, attended * fade[:, None], input_precision="ieee")
        most = larger
    query = row * QUERY_HEADS + head * QUERIES + group
    to = query[:, None] * SIZE + whole[None, :]
    is_out = is_query[:, None] & is_whole[None, :]
    if SPLITS == 1:
        tl.store(out + to, (attended / total[:, None]).to(dtype), mask=is_out)
    else:
        HEADS: tl.constexpr = BATCH * QUERY_HEADS
        tl.store(sums + split * HEADS * SIZE + to, attended, mask=is_out)
        tl.store(maxima + split * HEADS + query, most, mask=is_query)
        tl.store(totals + split * HEADS + query, total, mask=is_query)
        tl.debug_barrier()
        if tl.atomic_add(counts + tl.program_id(0), 1) == SPLITS - 1:
            attended, total = _added_up(sums, maxima, totals, query, to, is_query, is_out, HEADS, SIZE, SPLITS)
            tl.store(out + to, (attended / total[:, None]).to(dtype), mask=is_out)
            tl.store(counts + tl.program_id(0), 0)
