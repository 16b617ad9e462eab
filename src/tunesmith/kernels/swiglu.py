"""silu(gate) * up with the adapters of gate and up added on the way, and its result quantized to fp8 where asked.

The joint product of gate and up is the widest tensor of a layer. Adding its adapter, applying the activation and
finding the row's scale are three passes over it when done one by one; here the first reads it once, and the second
pass (quantizing) reads only what the first wrote. Backward computes the activation again instead of keeping it.

Legend: T tokens, I intermediate, R rank; `y_t2i` is gate and up side by side, without their adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.lowrank import E4M3, E4M3_MAX

ROWS, COLUMNS = 32, 128
"""Tile of one program, which owns its rows for the whole width."""


@torch.library.custom_op("tunesmith::swiglu", mutates_args=())
def swiglu(
    y_t2i: torch.Tensor, low_t2r: torch.Tensor, b_gate_ir: torch.Tensor, b_up_ir: torch.Tensor, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation [T, I], and its fp8 values with the scale of each row (empty when `fp8` is off)."""
    tokens, intermediate = y_t2i.shape[0], b_gate_ir.shape[0]
    act, values, scale = _outputs(y_t2i, tokens, intermediate, fp8)
    rank = b_gate_ir.shape[1]
    _forward[(triton.cdiv(tokens, ROWS),)](
        y_t2i,
        low_t2r,
        b_gate_ir,
        b_up_ir,
        act,
        values,
        scale,
        tokens,
        intermediate,
        R=rank,
        R_PADDED=max(16, triton.next_power_of_2(rank)),
        FP8=fp8,
        LARGEST=E4M3_MAX,
        BT=ROWS,
        BI=COLUMNS,
        num_warps=8,
    )
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
    tokens, intermediate = d_act_ti.shape
    d_y, values, scale = _outputs(y_t2i, tokens, 2 * intermediate, fp8)
    act = torch.empty_like(d_act_ti)
    rank = b_gate_ir.shape[1]
    _backward[(triton.cdiv(tokens, ROWS),)](
        d_act_ti,
        y_t2i,
        low_t2r,
        b_gate_ir,
        b_up_ir,
        scale_2i,
        d_y,
        values,
        scale,
        act,
        tokens,
        intermediate,
        R=rank,
        R_PADDED=max(16, triton.next_power_of_2(rank)),
        FP8=fp8,
        LARGEST=E4M3_MAX,
        BT=ROWS,
        BI=COLUMNS,
        num_warps=8,
    )
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


@triton.jit
def _gate_and_up(y, low_gate, low_up, b_gate, b_up, rows, columns, rank, inside, WIDTH, R: tl.constexpr):
    """A tile of gate and of up, adapters added, in fp32."""
    factor = columns[None, :] * R + rank[:, None]
    known = (rank[:, None] < R) & (columns[None, :] < WIDTH)
    gate = tl.load(y + rows[:, None] * (2 * WIDTH) + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + rows[:, None] * (2 * WIDTH) + WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    gate += tl.dot(low_gate, tl.load(b_gate + factor, mask=known, other=0.0))
    up += tl.dot(low_up, tl.load(b_up + factor, mask=known, other=0.0))
    return gate, up


@triton.jit
def _forward(
    y,
    low,
    b_gate,
    b_up,
    act,
    values,
    scale,
    T,
    WIDTH,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank = tl.arange(0, R_PADDED)
    is_row = rows < T
    has_low = is_row[:, None] & (rank[None, :] < R)
    low_gate = tl.load(low + rows[:, None] * (2 * R) + rank[None, :], mask=has_low, other=0.0)
    low_up = tl.load(low + rows[:, None] * (2 * R) + R + rank[None, :], mask=has_low, other=0.0)
    largest = tl.zeros((BT,), dtype=tl.float32)
    for first in range(0, WIDTH, BI):
        columns = first + tl.arange(0, BI)
        inside = is_row[:, None] & (columns[None, :] < WIDTH)
        gate, up = _gate_and_up(y, low_gate, low_up, b_gate, b_up, rows, columns, rank, inside, WIDTH, R)
        result = (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty)
        tl.store(act + rows[:, None] * WIDTH + columns[None, :], result, mask=inside)
        largest = tl.maximum(largest, tl.max(tl.abs(result.to(tl.float32)), 1))
    if FP8:
        step = tl.maximum(largest, 1e-12) / LARGEST
        tl.store(scale + rows, step, mask=is_row)
        tl.debug_barrier()
        for first in range(0, WIDTH, BI):
            columns = first + tl.arange(0, BI)
            inside = is_row[:, None] & (columns[None, :] < WIDTH)
            place = rows[:, None] * WIDTH + columns[None, :]
            result = tl.load(act + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + place, (result / step[:, None]).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_act,
    y,
    low,
    b_gate,
    b_up,
    scale_in,
    d_y,
    values,
    scale,
    act,
    T,
    WIDTH,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
):
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    rank = tl.arange(0, R_PADDED)
    is_row = rows < T
    has_low = is_row[:, None] & (rank[None, :] < R)
    low_gate = tl.load(low + rows[:, None] * (2 * R) + rank[None, :], mask=has_low, other=0.0)
    low_up = tl.load(low + rows[:, None] * (2 * R) + R + rank[None, :], mask=has_low, other=0.0)
    largest = tl.zeros((BT,), dtype=tl.float32)
    for first in range(0, WIDTH, BI):
        columns = first + tl.arange(0, BI)
        inside = is_row[:, None] & (columns[None, :] < WIDTH)
        gate, up = _gate_and_up(y, low_gate, low_up, b_gate, b_up, rows, columns, rank, inside, WIDTH, R)
        d = tl.load(d_act + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(act + rows[:, None] * WIDTH + columns[None, :], (silu * up).to(act.dtype.element_ty), mask=inside)
        d_gate = (d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(d_y.dtype.element_ty)
        d_up = (d * silu).to(d_y.dtype.element_ty)
        place = rows[:, None] * (2 * WIDTH) + columns[None, :]
        tl.store(d_y + place, d_gate, mask=inside)
        tl.store(d_y + place + WIDTH, d_up, mask=inside)
        if FP8:
            scale_gate = tl.load(scale_in + columns, mask=columns < WIDTH, other=0.0)
            scale_up = tl.load(scale_in + WIDTH + columns, mask=columns < WIDTH, other=0.0)
            scaled_gate = tl.abs(d_gate.to(tl.float32) * scale_gate[None, :])
            scaled_up = tl.abs(d_up.to(tl.float32) * scale_up[None, :])
            largest = tl.maximum(largest, tl.max(tl.maximum(scaled_gate, scaled_up), 1))
    if FP8:
        step = tl.maximum(largest, 1e-30) / LARGEST
        tl.store(scale + rows, step, mask=is_row)
        tl.debug_barrier()
        for first in range(0, 2 * WIDTH, BI):
            columns = first + tl.arange(0, BI)
            inside = is_row[:, None] & (columns[None, :] < 2 * WIDTH)
            place = rows[:, None] * (2 * WIDTH) + columns[None, :]
            scaled = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
            scaled *= tl.load(scale_in + columns, mask=columns < 2 * WIDTH, other=0.0)[None, :]
            tl.store(values + place, (scaled / step[:, None]).to(values.dtype.element_ty), mask=inside)
