"""Matrices to fp8 in own kernels, where the compiler would read them more often than needed.

`quantize_rows` holds a row in registers: one read, one write. `quantize_turned` quantizes along the other dimension and
writes the transposed matrix, as fp8 products want it.

Legend: T rows, K columns; `8` marks fp8 values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0
SMALLEST_SCALE = 1e-12 / LARGEST
TURNED = {"BT": 128, "BK": 128, "num_warps": 4}
"""Tile of a program that transposes."""
MAXIMA = {"PART": 1024, "BT": 32, "BK": 128, "num_warps": 4}
"""Of one that looks for the largest values of some columns, over so many rows."""


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
        num_warps=min(32, max(4, block // 1024)),
        num_stages=1,
    )


def quantize_turned_into(x_tk: torch.Tensor, values_kt: torch.Tensor, scale_k1: torch.Tensor) -> None:
    """fp8 values [K, T] of the transposed matrix, with the scale of each of its rows; T may be longer, then zeros fill
    the rest."""
    rows, columns = x_tk.shape
    longest = values_kt.shape[1]
    largest = x_tk.new_zeros(columns, dtype=torch.float32)
    _column_maxima[(triton.cdiv(columns, MAXIMA["BK"]), triton.cdiv(rows, MAXIMA["PART"]))](
        x_tk, largest, x_tk.stride(0), rows, columns, **MAXIMA
    )
    _turn[(triton.cdiv(columns, TURNED["BK"]), triton.cdiv(longest, TURNED["BT"]))](
        x_tk,
        largest,
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
    tl.store(values + row * K + columns, (value / step).to(values.dtype.element_ty), mask=inside)
    tl.store(scale + row, step)


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
    tl.atomic_max(largest + columns, tl.max(found, 0), mask=is_column)


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
    value8 = tl.trans(value / step[None, :]).to(values.dtype.element_ty)
    is_place = is_column[:, None] & (rows < LONGEST)[None, :]
    tl.store(values + columns[:, None] * LONGEST + rows[None, :], value8, mask=is_place)
    if tl.program_id(1) == 0:
        tl.store(scale + columns, step, mask=is_column)
