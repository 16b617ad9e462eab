"""act(gate) * up with the adapters of gate and up added on the way, and its result quantized to fp8 where asked. `act`
is SiLU (SwiGLU) or what else `kernels.gating` has.

The joint matmul of gate and up is the widest tensor of a layer. Adding its adapter and applying the activation are one
pass over it here, and quantizing a second one, over the result. (Looking for each row's largest value in the first pass
already, so that the second need not hold a whole row, made the first half again as slow.) Backward computes the
activation again instead of keeping it, adds the adapter of down to the gradient that comes in, and sums the gradients
of the adapters' factors while the tiles are at hand.

A program takes some columns and goes down the rows, so that the factors stay in registers.

Legend: T tokens, I intermediate, R rank; `y_t2i` is gate and up side by side, without their adapters.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.gating_fused import activation, constants, with_derivatives
from tunesmith.kernels.lowrank import E4M3
from tunesmith.kernels.operator import operator
from tunesmith.kernels.quantize import quantize_rows_into

FORWARD = {"BT": 16, "BI": 128, "AHEAD": 3, "num_warps": 4, "num_stages": 3}
BACKWARD = {"BT": 16, "BI": 64, "AHEAD": 3, "num_warps": 4, "num_stages": 2}
"""Tile and warps of a program. `num_stages` loads the small factors of later tiles ahead; `AHEAD`, a number of tiles in
its place, the wide tensors too."""
PARTS, SHORTEST = 16, 256
"""Into how many parts the rows are cut, and how many rows a part has at least."""


@operator("swiglu")
def swiglu(
    y_t2i: torch.Tensor, low_t2r: torch.Tensor, b_gate_ir: torch.Tensor, b_up_ir: torch.Tensor, fp8: bool, gating: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation [T, I], and its fp8 values with the scale of each row (empty when `fp8` is off)."""
    tokens, (intermediate, rank) = y_t2i.shape[0], b_gate_ir.shape
    act, values, scale = _outputs(y_t2i, tokens, intermediate, fp8)
    rows, parts = _cut(tokens)
    _forward[(triton.cdiv(intermediate, FORWARD["BI"]), parts)](
        y_t2i,
        low_t2r,
        b_gate_ir,
        b_up_ir,
        act,
        tokens,
        intermediate,
        rows,
        R=rank,
        R_PADDED=_padded(rank),
        **constants(gating),
        **FORWARD,
    )
    if fp8:
        quantize_rows_into(act, None, values, scale)
    return act, values, scale


@torch.library.register_fake(swiglu)
def _(y_t2i, low_t2r, b_gate_ir, b_up_ir, fp8, gating):
    return _outputs(y_t2i, y_t2i.shape[0], b_gate_ir.shape[0], fp8)


@operator("swiglu_backward")
def swiglu_backward(
    d_act_ti: torch.Tensor,
    g_tr: torch.Tensor,
    y_t2i: torch.Tensor,
    low_t2r: torch.Tensor,
    b_gate_ir: torch.Tensor,
    b_up_ir: torch.Tensor,
    a_down_ri: torch.Tensor,
    scale_2i: torch.Tensor,
    fp8: bool,
    gating: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the gradient `d_act + g @ a_down` of the activation: that of gate and up [T, 2I], and those of b_gate, b_up
    and a_down transposed [3, I, R]. With `fp8` the first is multiplied by `scale_2i`, and its fp8 values and scales are
    there too."""
    (tokens, intermediate), rank = d_act_ti.shape, b_gate_ir.shape[1]
    d_y, values, scale = _outputs(y_t2i, tokens, 2 * intermediate, fp8)
    rows, parts = _cut(tokens)
    sums = y_t2i.new_empty(parts, 3, intermediate, rank, dtype=torch.float32)
    _backward[(triton.cdiv(intermediate, BACKWARD["BI"]), parts)](
        d_act_ti,
        g_tr,
        y_t2i,
        low_t2r,
        b_gate_ir,
        b_up_ir,
        a_down_ri,
        scale_2i,
        d_y,
        sums,
        tokens,
        intermediate,
        rows,
        R=rank,
        R_PADDED=_padded(rank),
        SCALED=fp8,
        **constants(gating),
        **BACKWARD,
    )
    if fp8:
        quantize_rows_into(d_y, None, values, scale)
    return d_y, values, scale, sums.sum(0).to(y_t2i.dtype)


@torch.library.register_fake(swiglu_backward)
def _(d_act_ti, g_tr, y_t2i, low_t2r, b_gate_ir, b_up_ir, a_down_ri, scale_2i, fp8, gating):
    tokens, intermediate = d_act_ti.shape
    sums = y_t2i.new_empty(3, intermediate, b_gate_ir.shape[1])
    return *_outputs(y_t2i, tokens, 2 * intermediate, fp8), sums


def _outputs(like: torch.Tensor, tokens: int, width: int, fp8: bool):
    shape = (tokens, width) if fp8 else (0, width)
    return (
        like.new_empty(tokens, width),
        like.new_empty(shape, dtype=E4M3),
        like.new_empty(shape[0], 1, dtype=torch.float32),
    )


def _cut(tokens: int) -> tuple[int, int]:
    """Rows of a part, and how many parts that makes."""
    rows = max(SHORTEST, triton.cdiv(triton.cdiv(tokens, PARTS), SHORTEST) * SHORTEST)
    return rows, triton.cdiv(tokens, rows)


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


@triton.jit
def _rank_by_column(factor_ir, columns, is_column, R: tl.constexpr, R_PADDED: tl.constexpr):
    """A tile [R, BI] of a factor held as [I, R]."""
    rank = tl.arange(0, R_PADDED)
    known = (rank[:, None] < R) & is_column[None, :]
    return tl.load(factor_ir + columns[None, :] * R + rank[:, None], mask=known, other=0.0)


@triton.jit
def _row_by_rank(low, rows, is_row, STRIDE, R: tl.constexpr, R_PADDED: tl.constexpr):
    """A tile [BT, R] of what the first factor made."""
    rank = tl.arange(0, R_PADDED)
    known = is_row[:, None] & (rank[None, :] < R)
    return tl.load(low + rows[:, None] * STRIDE + rank[None, :], mask=known, other=0.0)


@triton.jit
def _forward(
    y,
    low,
    b_gate,
    b_up,
    act,
    T,
    WIDTH,
    ROWS,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
    AHEAD: tl.constexpr,
):
    columns = tl.program_id(0) * BI + tl.arange(0, BI)
    is_column = columns < WIDTH
    of_gate = _rank_by_column(b_gate, columns, is_column, R, R_PADDED)
    of_up = _rank_by_column(b_up, columns, is_column, R, R_PADDED)
    first = tl.program_id(1) * ROWS
    for start in tl.range(first, tl.minimum(first + ROWS, T), BT, num_stages=AHEAD):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        is_row = rows < T
        inside = is_row[:, None] & is_column[None, :]
        place = y + rows[:, None] * (2 * WIDTH) + columns[None, :]
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
        gate += tl.dot(_row_by_rank(low, rows, is_row, 2 * R, R, R_PADDED), of_gate, input_precision="ieee")
        up += tl.dot(_row_by_rank(low + R, rows, is_row, 2 * R, R, R_PADDED), of_up, input_precision="ieee")
        result = activation(gate, up, CURVE, SLOPE, LIMIT, SHIFT).to(act.dtype.element_ty)
        tl.store(act + rows[:, None] * WIDTH + columns[None, :], result, mask=inside)


@triton.jit
def _backward(
    d_act,
    g,
    y,
    low,
    b_gate,
    b_up,
    a_down,
    scale,
    d_y,
    sums,
    T,
    WIDTH,
    ROWS,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    SCALED: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    BT: tl.constexpr,
    BI: tl.constexpr,
    AHEAD: tl.constexpr,
):
    columns = tl.program_id(0) * BI + tl.arange(0, BI)
    is_column = columns < WIDTH
    rank = tl.arange(0, R_PADDED)
    known = (rank[:, None] < R) & is_column[None, :]
    of_gate = _rank_by_column(b_gate, columns, is_column, R, R_PADDED)
    of_up = _rank_by_column(b_up, columns, is_column, R, R_PADDED)
    of_down = tl.load(a_down + rank[:, None] * WIDTH + columns[None, :], mask=known, other=0.0)
    if SCALED:
        scale_gate = tl.load(scale + columns, mask=is_column, other=0.0)[None, :]
        scale_up = tl.load(scale + WIDTH + columns, mask=is_column, other=0.0)[None, :]
    sum_gate = tl.zeros((BI, R_PADDED), dtype=tl.float32)
    sum_up = tl.zeros((BI, R_PADDED), dtype=tl.float32)
    sum_down = tl.zeros((BI, R_PADDED), dtype=tl.float32)
    first = tl.program_id(1) * ROWS
    for start in tl.range(first, tl.minimum(first + ROWS, T), BT, num_stages=AHEAD):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        is_row = rows < T
        inside = is_row[:, None] & is_column[None, :]
        wide = rows[:, None] * (2 * WIDTH) + columns[None, :]
        low_gate = _row_by_rank(low, rows, is_row, 2 * R, R, R_PADDED)
        low_up = _row_by_rank(low + R, rows, is_row, 2 * R, R, R_PADDED)
        low_down = _row_by_rank(g, rows, is_row, R, R, R_PADDED)
        gate = tl.load(y + wide, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y + wide + WIDTH, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_act + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        gate += tl.dot(low_gate, of_gate, input_precision="ieee")
        up += tl.dot(low_up, of_up, input_precision="ieee")
        d += tl.dot(low_down, of_down, input_precision="ieee")
        made, by_gate, by_up = with_derivatives(gate, up, CURVE, SLOPE, LIMIT, SHIFT)
        act = made.to(d_y.dtype.element_ty)
        d_gate = d * by_gate
        d_up = d * by_up
        if SCALED:
            d_gate *= scale_gate
            d_up *= scale_up
        d_gate = d_gate.to(d_y.dtype.element_ty)
        d_up = d_up.to(d_y.dtype.element_ty)
        tl.store(d_y + wide, d_gate, mask=inside)
        tl.store(d_y + wide + WIDTH, d_up, mask=inside)
        sum_gate += tl.dot(tl.trans(d_gate), low_gate, input_precision="ieee")
        sum_up += tl.dot(tl.trans(d_up), low_up, input_precision="ieee")
        sum_down += tl.dot(tl.trans(act), low_down, input_precision="ieee")
    target = sums + tl.program_id(1).to(tl.int64) * 3 * WIDTH * R + columns[:, None] * R + rank[None, :]
    is_sum = is_column[:, None] & (rank[None, :] < R)
    if SCALED:
        sum_gate /= tl.load(scale + columns, mask=is_column, other=1.0)[:, None]
        sum_up /= tl.load(scale + WIDTH + columns, mask=is_column, other=1.0)[:, None]
    tl.store(target, sum_gate, mask=is_sum)
    tl.store(target + WIDTH * R, sum_up, mask=is_sum)
    tl.store(target + 2 * WIDTH * R, sum_down, mask=is_sum)
