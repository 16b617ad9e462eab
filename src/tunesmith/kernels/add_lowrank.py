"""`y += low @ up` for a small inner size: one pass over y at the speed of memory.

The library's matmuls are made for large inner sizes; at 16 to 64 they reach about half the memory's bandwidth.

Legend: T rows, N columns, R inner size.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 128


def add_lowrank_(y_tn: torch.Tensor, low_tr: torch.Tensor, up_rn: torch.Tensor) -> torch.Tensor:
    rows, columns = y_tn.shape
    rank = low_tr.shape[1]
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    _add[grid](
        y_tn,
        low_tr,
        up_rn,
        rows,
        columns,
        *y_tn.stride(),
        *low_tr.stride(),
        *up_rn.stride(),
        R=rank,
        R_PADDED=max(16, triton.next_power_of_2(rank)),
        BT=ROWS,
        BN=COLUMNS,
        num_warps=8,
    )
    return y_tn


@triton.jit
def _add(
    y,
    low,
    up,
    T,
    N,
    y_row,
    y_column,
    low_row,
    low_column,
    up_row,
    up_column,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    rows = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rank = tl.arange(0, R_PADDED)
    is_row, is_column, is_rank = rows < T, columns < N, rank < R
    place = y + rows[:, None] * y_row + columns[None, :] * y_column
    inside = is_row[:, None] & is_column[None, :]
    sum_so_far = tl.load(place, mask=inside, other=0.0)
    a = tl.load(
        low + rows[:, None] * low_row + rank[None, :] * low_column, mask=is_row[:, None] & is_rank[None, :], other=0.0
    )
    b = tl.load(
        up + rank[:, None] * up_row + columns[None, :] * up_column,
        mask=is_rank[:, None] & is_column[None, :],
        other=0.0,
    )
    product = tl.dot(a, b, input_precision="ieee")
    tl.store(place, (sum_so_far.to(tl.float32) + product).to(y.dtype.element_ty), mask=inside)
