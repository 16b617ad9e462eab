"""Kernels tried beside those in use; `kernels.py` times them. What wins moves over, what does not is in docs/lab.md.

Legend: T rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.quantize import LARGEST, SMALLEST_SCALE


def rows_down(x_tk, factor_k, values, scale_t1, *, programs: int, stages: int, num_warps: int) -> None:
    """Each of some programs takes a row after the other, and loads the next ones while it is at work on one."""
    rows, columns = x_tk.shape
    _rows_down[(min(rows, programs),)](
        *_arguments(x_tk, factor_k, values, scale_t1),
        rows,
        columns,
        HAS_FACTOR=factor_k is not None,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=triton.next_power_of_2(columns),
        STAGES=stages,
        num_warps=num_warps,
    )


def rows_twice(x_tk, factor_k, values, scale_t1, *, block: int, stages: int, num_warps: int) -> None:
    """Each row is read twice, block by block, the second time from a cache: few registers, many programs at once."""
    rows, columns = x_tk.shape
    _rows_twice[(rows,)](
        *_arguments(x_tk, factor_k, values, scale_t1),
        columns,
        HAS_FACTOR=factor_k is not None,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=block,
        STAGES=stages,
        num_warps=num_warps,
    )


def _arguments(x_tk: torch.Tensor, factor_k: torch.Tensor | None, values: torch.Tensor, scale_t1: torch.Tensor):
    return x_tk, x_tk if factor_k is None else factor_k, values, scale_t1, x_tk.stride(0)


@triton.jit
def _rows_down(
    x,
    factor,
    values,
    scale,
    stride,
    T,
    K,
    HAS_FACTOR: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    for row in tl.range(tl.program_id(0).to(tl.int64), T, tl.num_programs(0), num_stages=STAGES):
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            value *= tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
        step = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, SMALLEST)
        tl.store(values + row * K + columns, (value * (1.0 / step)).to(values.dtype.element_ty), mask=inside)
        tl.store(scale + row, step)


@triton.jit
def _rows_twice(
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
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < K
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            value *= tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(value))
    step = tl.maximum(tl.max(found, 0) / LARGEST, SMALLEST)
    tl.store(scale + row, step)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < K
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            value *= tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(values + row * K + columns, (value * (1.0 / step)).to(values.dtype.element_ty), mask=inside)
