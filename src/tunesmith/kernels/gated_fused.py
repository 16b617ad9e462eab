"""`kernels.gated`'s backward pass on a GPU: three tensors read, three written, each once."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 2048, 8


def gated_backward_into(
    d_act: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    d_gate: torch.Tensor,
    d_up: torch.Tensor,
    act: torch.Tensor,
) -> None:
    """Of contiguous tensors of one shape."""
    count = gate.numel()
    _kernel[(triton.cdiv(count, BLOCK),)](d_act, gate, up, d_gate, d_up, act, count, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _kernel(d_act, gate, up, d_gate, d_up, act, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    g = tl.load(d_act + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    kind = act.dtype.element_ty
    tl.store(d_gate + at, (g * y * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(kind), mask=inside)
    tl.store(d_up + at, (g * silu).to(kind), mask=inside)
    tl.store(act + at, (silu * y).to(kind), mask=inside)
