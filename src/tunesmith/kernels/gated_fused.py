"""`kernels.gated`'s backward pass on a GPU: three tensors read, three written, each once."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.gating_fused import constants, with_derivatives

BLOCK, WARPS = 2048, 8


def gated_backward_into(
    d_act: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    d_gate: torch.Tensor,
    d_up: torch.Tensor,
    act: torch.Tensor,
    gating: str,
) -> None:
    """Of tensors of one shape, all of them contiguous, or gate and up (and their gradients) halves of contiguous
    ones."""
    rows, width = 1, gate.numel()
    if not gate.is_contiguous():
        width = gate.shape[-1]
        rows = gate.numel() // width
    stride = gate.stride(-2) if rows > 1 else 0
    grid = (rows * triton.cdiv(width, BLOCK),)
    options = {"BLOCK": BLOCK, "num_warps": WARPS, **constants(gating)}
    _kernel[grid](d_act, gate, up, d_gate, d_up, act, width, stride, **options)


@triton.jit
def _kernel(
    d_act,
    gate,
    up,
    d_gate,
    d_up,
    act,
    WIDTH,
    STRIDE,
    BLOCK: tl.constexpr,
    CURVE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(WIDTH, BLOCK)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    narrow, wide = row * WIDTH + column, row * STRIDE + column
    g = tl.load(d_act + narrow, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + wide, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + wide, mask=inside, other=0.0).to(tl.float32)
    made, by_gate, by_up = with_derivatives(x, y, CURVE, SLOPE, LIMIT, SHIFT)
    kind = act.dtype.element_ty
    tl.store(d_gate + wide, (g * by_gate).to(kind), mask=inside)
    tl.store(d_up + wide, (g * by_up).to(kind), mask=inside)
    tl.store(act + narrow, made.to(kind), mask=inside)
