"""Matrices to fp8 in own kernels, where the compiler would read them more often than needed.

`quantize_rows` holds a row in registers: one read, one write. `quantize_transposed` quantizes along the other dimension
and writes the transposed matrix, as fp8 matmuls want it; the largest values of the columns, which it needs, may come
from `quantize_with_maxima`. `transpose_into` transposes what is in fp8 already.

Legend: T rows, K columns; `8` marks fp8 values.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0
SMALLEST_SCALE = 1e-12 / LARGEST
PER_WARP = 2048
"""Values of a row that a warp holds, where it has enough of them."""
TURNED = {"BT": 128, "BK": 128, "num_warps": 4}
"""Tile of a program that transposes."""
BYTES = {"BN": 128, "BK": 128, "num_warps": 8}
"""Of one that transposes what is in fp8 already."""
MAXIMA = {"PART": 1024, "BT": 32, "BK": 128, "num_warps": 4}
"""Of one that looks for the largest values of some columns, over so many rows."""
WITH_MAXIMA = {"STAGES": 3, "PER_WARP": 512, "AT_WORK": 16384}
"""Of one that also finds the largest values of the columns: how far ahead it loads rows, values a warp holds of a row,
and values that the programs of a multiprocessor hold together."""
WIDEST_WITH_MAXIMA = 16384
"""Wider rows and as many largest values do not fit into registers."""
MULTIPROCESSORS = 132
"""Of an H100 or H200; programs that go on from row to row are as many as these can hold."""


def quantize_rows_into(
    x_tk: torch.Tensor, factor_k: torch.Tensor | None, values: torch.Tensor, scale_t1: torch.Tensor
) -> None:
    """fp8 `values` and the scale of each row of `x * factor`."""
    rows, columns = x_tk.shape
    block = triton.next_power_of_2(columns)
    _rows[(rows,)](
        x_tk,
        x_tk if factor_k is None else factor_k,
        values,
        scale_t1,
        x_tk.stride(0),
        columns,
        HAS_FACTOR=factor_k is not None,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=block,
        num_warps=min(32, max(4, block // PER_WARP)),
        num_stages=1,
    )


def quantize_with_maxima_into(
    x_tk: torch.Tensor, values: torch.Tensor, scale_t1: torch.Tensor, largest_k: torch.Tensor
) -> None:
    """`quantize_rows_into`, and the largest absolute value of each column."""
    rows, columns = x_tk.shape
    if columns > WIDEST_WITH_MAXIMA:
        quantize_rows_into(x_tk, None, values, scale_t1)
        _find_maxima(x_tk, largest_k)
        return
    largest_k.zero_()
    block = 1 << (columns.bit_length() - 1)
    rest = max(16, triton.next_power_of_2(columns - block)) if columns > block else 0
    programs = MULTIPROCESSORS * max(2, WITH_MAXIMA["AT_WORK"] // columns)
    _rows_and_maxima[(min(rows, programs),)](
        x_tk,
        values,
        scale_t1,
        largest_k.view(torch.int32),
        x_tk.stride(0),
        rows,
        columns,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=block,
        REST=rest,
        STAGES=WITH_MAXIMA["STAGES"],
        num_warps=min(16, max(4, block // WITH_MAXIMA["PER_WARP"])),
    )


def quantize_transposed_into(
    x_tk: torch.Tensor, values_kt: torch.Tensor, scale_k1: torch.Tensor, largest_k: torch.Tensor | None = None
) -> None:
    """fp8 values [K, T] of the transposed matrix, with the scale of each of its rows; T may be longer, then zeros fill
    the rest. `largest_k`: the largest absolute values of the columns, where they are known."""
    rows, columns = x_tk.shape
    longest = values_kt.shape[1]
    if largest_k is None:
        largest_k = x_tk.new_empty(columns, dtype=torch.float32)
        _find_maxima(x_tk, largest_k)
    _turn[(triton.cdiv(columns, TURNED["BK"]), triton.cdiv(longest, TURNED["BT"]))](
        x_tk,
        largest_k,
        values_kt,
        scale_k1,
        x_tk.stride(0),
        rows,
        columns,
        longest,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        **TURNED,
    )


def transpose_into(values8_nk: torch.Tensor, transposed8_kn: torch.Tensor) -> None:
    """The transposed matrix."""
    rows, columns = values8_nk.shape
    _turn_bytes[(triton.cdiv(columns, BYTES["BK"]), triton.cdiv(rows, BYTES["BN"]))](
        values8_nk.view(torch.uint8), transposed8_kn.view(torch.uint8), rows, columns, **BYTES
    )


def _find_maxima(x_tk: torch.Tensor, largest_k: torch.Tensor) -> None:
    rows, columns = x_tk.shape
    largest_k.zero_()
    _column_maxima[(triton.cdiv(columns, MAXIMA["BK"]), triton.cdiv(rows, MAXIMA["PART"]))](
        x_tk, largest_k.view(torch.int32), x_tk.stride(0), rows, columns, **MAXIMA
    )


@triton.jit
def _rows(
    x,
    factor,
    values,
    scale,
    stride,
    K,
    HAS_FACTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        value *= tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, SMALLEST)
    tl.store(values + row * K + columns, (value * (1.0 / step)).to(values.dtype.element_ty), mask=inside)
    tl.store(scale + row, step)


@triton.jit
def _rows_and_maxima(
    x,
    values,
    scale,
    largest,
    stride,
    T,
    K,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes some rows, one after the other. The width is a power of two and a rest, so that fewer lanes are
    idle than with the next power of two."""
    columns = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    if REST > 0:
        others = BLOCK + tl.arange(0, REST)
        is_other = others < K
        found_others = tl.zeros((REST,), dtype=tl.float32)
    for row in tl.range(tl.program_id(0).to(tl.int64), T, tl.num_programs(0), num_stages=STAGES):
        value = tl.load(x + row * stride + columns).to(tl.float32)
        found = tl.maximum(found, tl.abs(value))
        most = tl.max(tl.abs(value), 0)
        if REST > 0:
            other = tl.load(x + row * stride + others, mask=is_other, other=0.0).to(tl.float32)
            found_others = tl.maximum(found_others, tl.abs(other))
            most = tl.maximum(most, tl.max(tl.abs(other), 0))
        step = tl.maximum(most / LARGEST, SMALLEST)
        inverse = 1.0 / step
        tl.store(scale + row, step)
        tl.store(values + row * K + columns, (value * inverse).to(values.dtype.element_ty))
        if REST > 0:
            tl.store(values + row * K + others, (other * inverse).to(values.dtype.element_ty), mask=is_other)
    _keep_largest(largest + columns, found, columns < K)
    if REST > 0:
        _keep_largest(largest + others, found_others, is_other)


@triton.jit
def _column_maxima(x, largest, stride, T, K, PART: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    columns = tl.program_id(0) * BK + tl.arange(0, BK)
    is_column = columns < K
    found = tl.zeros((BT, BK), dtype=tl.float32)
    first = tl.program_id(1) * PART
    for start in range(first, tl.minimum(first + PART, T), BT):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        inside = (rows < T)[:, None] & is_column[None, :]
        value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(value))
    _keep_largest(largest + columns, tl.max(found, 0), is_column)


@triton.jit
def _keep_largest(place, found, mask):
    """Of numbers that are not negative, whose bits are in the same order; relaxed, since only later kernels read it."""
    tl.atomic_max(place, found.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _turn(
    x,
    largest,
    values,
    scale,
    stride,
    T,
    K,
    LONGEST,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    columns = (tl.program_id(0) * BK + tl.arange(0, BK)).to(tl.int64)
    rows = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    is_column = columns < K
    inside = (rows < T)[:, None] & is_column[None, :]
    value = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    step = tl.maximum(tl.load(largest + columns, mask=is_column, other=1.0) / LARGEST, SMALLEST)
    value8 = tl.trans(value * (1.0 / step)[None, :]).to(values.dtype.element_ty)
    is_place = is_column[:, None] & (rows < LONGEST)[None, :]
    tl.store(values + columns[:, None] * LONGEST + rows[None, :], value8, mask=is_place)
    if tl.program_id(1) == 0:
        tl.store(scale + columns, step, mask=is_column)


@triton.jit
def _turn_bytes(x, transposed, N, K, BN: tl.constexpr, BK: tl.constexpr):
    rows = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    columns = (tl.program_id(0) * BK + tl.arange(0, BK)).to(tl.int64)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    value = tl.trans(tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0))
    tl.store(
        transposed + columns[:, None] * N + rows[None, :], value, mask=(columns < K)[:, None] & (rows < N)[None, :]
    )
