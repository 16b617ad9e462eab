"""silu(gate) * up with the adapters of gate and up added on the way, and its result quantized to fp8 where asked.

The joint product of gate and up is the widest tensor of a layer. Adding its adapter, applying the activation and
finding each row's largest value are three passes over it when done one by one; here they are one, and quantizing reads
only what that one wrote. Backward computes the activation again instead of keeping it.

Legend: T tokens, I intermediate, R rank; `y_t2i` is gate and up side by side, without their adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.lowrank import E4M3, E4M3_MAX

ROWS, COLUMNS, WARPS = 32, 128, 4
"""Tile of one program of the first pass."""
QUANTIZED = 4096
"""Columns of one row that a program of the second pass takes."""


@torch.library.custom_op("tunesmith::swiglu", mutates_args=())
def swiglu(
    y_t2i: torch.Tensor, low_t2r: torch.Tensor, b_gate_ir: torch.Tensor, b_up_ir: torch.Tensor, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation [T, I], and its fp8 values with the scale of each row (empty when `fp8` is off)."""
    tokens, (intermediate, rank) = y_t2i.shape[0], b_gate_ir.shape
    act, values, scale = _outputs(y_t2i, tokens, intermediate, fp8)
    largest = _largest(y_t2i, tokens, fp8)
    _forward[(triton.cdiv(intermediate, COLUMNS), triton.cdiv(tokens, ROWS))](
        y_t2i, low_t2r, b_gate_ir, b_up_ir, act, largest, tokens, intermediate, **_sizes(rank, fp8)
    )
    if fp8:
        _quantize_rows(act, largest, None, values, scale)
    return act, values, scale


@swiglu.register_fake
def _(y_t2i, low_t2r, b_gate_ir, b_up_ir, fp8):
    return _outputs(y_t2i, y_t2i.shape[0], b_gate_ir.shape[0], fp8)


@torch.library.custom_op("tunesmith::swiglu_backward", mutates_args=())
def swiglu_backward(
    d_act_ti: torch.Tensor,
    y_t2i: torch.Tensor,
    low_t2r: torch.Tensor,
    b_gate_ir: torch.Tensor,
    b_up_ir: torch.Tensor,
    scale_2i: torch.Tensor,
    fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of gate and up [T, 2I], its fp8 values and scales after multiplying by `scale_2i`, and the
    activation again [T, I]."""
    (tokens, intermediate), rank = d_act_ti.shape, b_gate_ir.shape[1]
    d_y, values, scale = _outputs(y_t2i, tokens, 2 * intermediate, fp8)
    act = torch.empty_like(d_act_ti)
    largest = _largest(y_t2i, tokens, fp8)
    _backward[(triton.cdiv(intermediate, COLUMNS), triton.cdiv(tokens, ROWS))](
        d_act_ti,
        y_t2i,
        low_t2r,
        b_gate_ir,
        b_up_ir,
        scale_2i,
        d_y,
        act,
        largest,
        tokens,
        intermediate,
        **_sizes(rank, fp8),
    )
    if fp8:
        _quantize_rows(d_y, largest, scale_2i, values, scale)
    return d_y, values, scale, act


@swiglu_backward.register_fake
def _(d_act_ti, y_t2i, low_t2r, b_gate_ir, b_up_ir, scale_2i, fp8):
    return *_outputs(y_t2i, d_act_ti.shape[0], 2 * d_act_ti.shape[1], fp8), torch.empty_like(d_act_ti)


def _outputs(like: torch.Tensor, tokens: int, width: int, fp8: bool):
    shape = (tokens, width) if fp8 else (0, width)
    return (
        like.new_empty(tokens, width),
        like.new_empty(shape, dtype=E4M3),
        like.new_empty(shape[0], 1, dtype=torch.float32),
    )


def _largest(like: torch.Tensor, tokens: int, fp8: bool) -> torch.Tensor:
    return like.new_zeros(tokens if fp8 else 0, dtype=torch.float32)


def _sizes(rank: int, fp8: bool) -> dict:
    padded = max(16, triton.next_power_of_2(rank))
    return {"R": rank, "R_PADDED": padded, "FP8": fp8, "BT": ROWS, "BI": COLUMNS, "num_warps": WARPS}


def _quantize_rows(x, largest, factor, values, scale) -> None:
    rows, width = x.shape
    _quantize[(rows, triton.cdiv(width, QUANTIZED))](  # the second size of a grid may not exceed 65,535
        x,
        largest,
        x if factor is None else factor,
        values,
        scale,
        width,
        HAS_FACTOR=factor is not None,
        LARGEST=E4M3_MAX,
        BLOCK=QUANTIZED,
        num_warps=8,
    )


@triton.jit
def _gate_and_up(
    y, low, b_gate, b_up, rows, columns, is_row, is_column, WIDTH, R: tl.constexpr, R_PADDED: tl.constexpr
):
    """A tile of gate and of up, adapters added, in fp32."""
    inside = is_row[:, None] & is_column[None, :]
    place = y + rows[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    rank = tl.arange(0, R_PADDED)
    low_place = low + rows[:, None] * (2 * R) + rank[None, :]
    has_low = is_row[:, None] & (rank[None, :] < R)
    factor = columns[None, :] * R + rank[:, None]
    known = (rank[:, None] < R) & is_column[None, :]
    low_gate = tl.load(low_place, mask=has_low, other=0.0)
    low_up = tl.load(low_place + R, mask=has_low, other=0.0)
    gate += tl.dot(low_gate, tl.load(b_gate + factor, mask=known, other=0.0), input_precision="ieee")
    up += tl.dot(low_up, tl.load(b_up + factor, mask=known, other=0.0), input_precision="ieee")
    return gate, up


@triton.jit
def _forward(
    y,
    low,
    b_gate,
    b_up,
    act,
    largest,
    T,
    WIDTH,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    rows = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    columns = tl.program_id(0) * BI + tl.arange(0, BI)
    is_row, is_column = rows < T, columns < WIDTH
    gate, up = _gate_and_up(y, low, b_gate, b_up, rows, columns, is_row, is_column, WIDTH, R, R_PADDED)
    result = (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty)
    inside = is_row[:, None] & is_column[None, :]
    tl.store(act + rows[:, None] * WIDTH + columns[None, :], result, mask=inside)
    if FP8:
        tl.atomic_max(largest + rows, tl.max(tl.abs(result.to(tl.float32)), 1), mask=is_row)


@triton.jit
def _backward(
    d_act,
    y,
    low,
    b_gate,
    b_up,
    factor,
    d_y,
    act,
    largest,
    T,
    WIDTH,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    rows = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    columns = tl.program_id(0) * BI + tl.arange(0, BI)
    is_row, is_column = rows < T, columns < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    gate, up = _gate_and_up(y, low, b_gate, b_up, rows, columns, is_row, is_column, WIDTH, R, R_PADDED)
    narrow = rows[:, None] * WIDTH + columns[None, :]
    d = tl.load(d_act + narrow, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(act + narrow, (silu * up).to(act.dtype.element_ty), mask=inside)
    d_gate = (d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(d_y.dtype.element_ty)
    d_up = (d * silu).to(d_y.dtype.element_ty)
    wide = rows[:, None] * (2 * WIDTH) + columns[None, :]
    tl.store(d_y + wide, d_gate, mask=inside)
    tl.store(d_y + wide + WIDTH, d_up, mask=inside)
    if FP8:
        of_gate = tl.load(factor + columns, mask=is_column, other=0.0)
        of_up = tl.load(factor + WIDTH + columns, mask=is_column, other=0.0)
        scaled = tl.maximum(
            tl.abs(d_gate.to(tl.float32) * of_gate[None, :]), tl.abs(d_up.to(tl.float32) * of_up[None, :])
        )
        tl.atomic_max(largest + rows, tl.max(scaled, 1), mask=is_row)


@triton.jit
def _quantize(
    x, largest, factor, values, scale, WIDTH, HAS_FACTOR: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    step = tl.maximum(tl.load(largest + row), 1e-30) / LARGEST
    value = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        value *= tl.load(factor + columns, mask=inside, other=0.0)
    tl.store(values + row * WIDTH + columns, (value / step).to(values.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(scale + row, step)
