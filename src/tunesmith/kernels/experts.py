"""Tokens times the matrices of their experts, a stack of frozen ones in nf4 or int8, which is made whole when it is
used: in the forward pass and again in the backward pass, and not kept.

Tokens lie expert by expert. Where torch multiplies groups of rows by a matrix each, that is one kernel, and the
CPU need not know how many tokens an expert has; elsewhere it is a matmul for each expert.

Legend: S pairs of a token and one of its experts, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunesmith.kernels import int8, nf4
from tunesmith.kernels.operator import operator

ALIGNED = 8
"""Grouped matmuls take rows of a multiple of so many numbers."""
AMPERE = (8, 0)


def expert_matmuls(
    x_sk: torch.Tensor, ends_e: torch.Tensor, stack: torch.Tensor, scale_n: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    """Each row times the matrix [N, K] of its expert: [S, N]. The rows of expert e end before `ends_e[e]`, in int32.

    `stack` is what `nf4.quantize` makes of all matrices, or with `scale_n` what `int8.quantize` makes of them."""
    return _ExpertMatmuls.apply(x_sk, ends_e, stack, scale_n, outputs)


class _ExpertMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_sk, ends_e, stack, scale_n, outputs):
        ctx.save_for_backward(ends_e, stack, scale_n)
        ctx.shape = (outputs, x_sk.shape[1])
        return _multiply(x_sk, ends_e, stack, scale_n, *ctx.shape, False)

    @staticmethod
    def backward(ctx, g_sn):
        return _multiply(g_sn, *ctx.saved_tensors, *ctx.shape, True), None, None, None, None


@operator("expert_matmuls")
def _multiply(
    x: torch.Tensor,
    ends_e: torch.Tensor,
    stack: torch.Tensor,
    scale_n: torch.Tensor | None,
    outputs: int,
    inputs: int,
    is_backward: bool,
) -> torch.Tensor:
    """[S, K] -> [S, N], or in the backward pass [S, N] -> [S, K]."""
    experts = ends_e.shape[0]
    if scale_n is None:
        weight = nf4.dequantize(stack, [experts * outputs], inputs, x.dtype)
    else:
        weight = int8.dequantize(stack, scale_n, x.dtype)
    weight_enk = weight.view(experts, outputs, inputs)
    return grouped(x.contiguous(), weight_enk if is_backward else weight_enk.transpose(1, 2), ends_e)


@torch.library.register_fake(_multiply)
def _(x, ends_e, stack, scale_n, outputs, inputs, is_backward):
    return x.new_empty(x.shape[0], inputs if is_backward else outputs)


def grouped(x: torch.Tensor, weight: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
    """Rows [S, A] of each expert times its matrix, of [E, A, B]."""
    is_aligned = all(size % ALIGNED == 0 for size in weight.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and is_aligned and torch.cuda.get_device_capability(x.device) >= AMPERE:
        return F.grouped_mm(x, weight, offs=ends_e)
    found = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends_e.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=found[start:end])
        start = end
    return found
