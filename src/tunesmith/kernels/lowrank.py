"""A frozen linear and its low-rank adapter as one operation: `x @ W.T + (x @ A.T) @ B.T`, with its gradients.

The large matmul runs in bf16 or in fp8, with W held in bf16, fp8 or nf4; the adapter's small ones add to its output
in place, so that neither the sum nor the gradient of a sum is a pass over memory of its own. W has no gradient. In
fp8 each row of x, of W and of the incoming gradient has its own scale. W is quantized once; its scales are folded
into the gradient before that is quantized, so that forward and backward use the same values of W.

Legend: T tokens, K inputs, N outputs, R rank; `8` marks fp8 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tunesmith.kernels.nf4 import dequantized
from tunesmith.kernels.operator import operator

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def lowrank_linear(
    x_tk: torch.Tensor,
    weight_nk: torch.Tensor,
    a_rk: torch.Tensor,
    b_nr: torch.Tensor,
    bias_n: torch.Tensor | None,
    rows: Sequence[int] = (),
) -> torch.Tensor:
    """In the precision of `x_tk`. `b_nr` already holds the adapter's scale. `weight_nk` may be held in nf4, as several
    weights with so many `rows` each."""
    return _LowRank.apply(x_tk, weight_nk, a_rk, b_nr, bias_n, tuple(rows))


def lowrank_linear_fp8(
    x_tk: torch.Tensor,
    weight8_nk: torch.Tensor,
    scale_n: torch.Tensor,
    a_rk: torch.Tensor,
    b_nr: torch.Tensor,
    bias_n: torch.Tensor | None,
    rows: Sequence[int] = (),
    transposed8_kn: torch.Tensor | None = None,
) -> torch.Tensor:
    """The large matmuls in fp8, the adapter's in the precision of `x_tk`. Weights held in nf4 become fp8 each time.
    `transposed8_kn`: the weight transposed, where that is kept."""
    return _LowRankFp8.apply(x_tk, weight8_nk, scale_n, a_rk, b_nr, bias_n, tuple(rows), transposed8_kn)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and the scale [rows, 1] that gives x back: x is about values * scale. In plain torch, so that the
    compiler makes it part of what computes x."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x.float() / scale).to(E4M3), scale


@operator("quantize_rows")
def quantize_apart(x: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows(x * factor)` in a pass of its own, which reads x once: for what is there already."""
    if not x.is_cuda:
        return quantize_rows(x if factor is None else x.float() * factor)
    from tunesmith.kernels.quantize import quantize_rows_into

    values, scale = quantized_like(x)
    quantize_rows_into(with_whole_rows(x), factor, values, scale)
    return values, scale


@torch.library.register_fake(quantize_apart)
def _(x, factor):
    return quantized_like(x)


@operator("transposed_copy")
def transposed_copy(values8: torch.Tensor) -> torch.Tensor:
    """The transposed matrix."""
    if not values8.is_cuda:
        return values8.t().contiguous()
    from tunesmith.kernels.quantize import transpose_into

    transposed = _transposed_like(values8)
    transpose_into(values8.contiguous(), transposed)
    return transposed


@torch.library.register_fake(transposed_copy)
def _transposed_like(values8):
    return values8.new_empty(values8.shape[1], values8.shape[0])


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Its rows may lie apart, as those of a part of some columns do; the values of one do not."""
    return x if x.stride(1) == 1 else x.contiguous()


def quantized_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tk, weight_nk, a_rk, b_nr, bias_n, rows):
        low_tr = x_tk @ a_rk.t()
        ctx.save_for_backward(x_tk, weight_nk, a_rk, b_nr, low_tr)
        ctx.rows = rows
        weight_nk = dequantized(weight_nk, rows, x_tk.shape[1], x_tk)
        return matmul_add_lowrank(x_tk, weight_nk.t(), low_tr, b_nr.t(), bias_n)

    @staticmethod
    def backward(ctx, g_tn):
        x_tk, weight_nk, a_rk, b_nr, low_tr = ctx.saved_tensors
        g_tr = g_tn @ b_nr
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = matmul_add_lowrank(g_tn, dequantized(weight_nk, ctx.rows, x_tk.shape[1], g_tn), g_tr, a_rk, None)
        return d_x, None, g_tr.t() @ x_tk, g_tn.t() @ low_tr, None, None


class _LowRankFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tk, held, scale_n, a_rk, b_nr, bias_n, rows, transposed8_kn):
        low_tr = x_tk @ a_rk.t()
        ctx.save_for_backward(x_tk, held, scale_n, a_rk, b_nr, low_tr, transposed8_kn)
        ctx.rows = rows
        weight8_nk = dequantized(held, rows, x_tk.shape[1], x_tk, scale_n)
        y = matmul_add_lowrank_fp8(*quantize_apart(x_tk, None), weight8_nk, scale_n, low_tr, b_nr.t(), x_tk.dtype)
        return y if bias_n is None else y + bias_n

    @staticmethod
    def backward(ctx, g_tn):
        x_tk, held, scale_n, a_rk, b_nr, low_tr, transposed8_kn = ctx.saved_tensors
        g_tr = g_tn @ b_nr
        d_x = None
        if ctx.needs_input_grad[0]:
            transposed = transposed_fp8(held, transposed8_kn, ctx.rows, x_tk.shape[1], g_tn, scale_n)
            d_x = matmul_add_lowrank_fp8(*quantize_apart(g_tn, scale_n), *transposed, g_tr, a_rk, g_tn.dtype)
        return d_x, None, None, g_tr.t() @ x_tk, g_tn.t() @ low_tr, None, None, None


def transposed_fp8(
    held: torch.Tensor,
    transposed8_kn: torch.Tensor | None,
    rows: Sequence[int],
    columns: int,
    like: torch.Tensor,
    scale_n: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transposed weight for a gradient that has the rows' scales in it already, and ones in place of scales. Made
    anew each time where it is not kept: 6 ms a step for an 8B model, against 7 GB."""
    made = (
        transposed8_kn
        if transposed8_kn is not None
        else transposed_copy(dequantized(held, rows, columns, like, scale_n))
    )
    return made, torch.ones(columns, device=like.device, dtype=torch.float32)


def matmul_fp8(
    x8: torch.Tensor,
    scale_t: torch.Tensor,
    weight8_nk: torch.Tensor,
    scale_n: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = True,
) -> torch.Tensor:
    """`(x8 * scale_t) @ (weight8 * scale_n).T`, in `dtype` (bf16 on a GPU). Sums that are not `fast` are carried on in
    fp32 every 128 values: for very long ones (docs/lab.md)."""
    if x8.is_cuda:
        return torch._scaled_mm(
            x8, weight8_nk.t(), scale_t, scale_n.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return ((x8.float() * scale_t) @ (weight8_nk.float() * scale_n.reshape(-1, 1)).t()).to(dtype)


# The large matmul with the small one added in place: opaque to the compiler, which would copy the sum.


@operator("matmul_add_lowrank")
def matmul_add_lowrank(
    x: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight + low @ up (+ bias)`."""
    y = x @ weight if bias is None else torch.addmm(bias, x, weight)
    return _add_small_(y, low, up)


@torch.library.register_fake(matmul_add_lowrank)
def _(x, weight, low, up, bias):
    return x.new_empty(x.shape[0], weight.shape[1])


@operator("matmul_add_lowrank_fp8")
def matmul_add_lowrank_fp8(
    x8: torch.Tensor,
    scale_t: torch.Tensor,
    weight8_nk: torch.Tensor,
    scale_n: torch.Tensor,
    low: torch.Tensor,
    up: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(x8 * scale_t) @ (weight8 * scale_n).T + low @ up`, in `dtype`."""
    return _add_small_(matmul_fp8(x8, scale_t, weight8_nk, scale_n, dtype), low, up)


@torch.library.register_fake(matmul_add_lowrank_fp8)
def _(x8, scale_t, weight8_nk, scale_n, low, up, dtype):
    return low.new_empty(x8.shape[0], weight8_nk.shape[0], dtype=dtype)


def _add_small_(y: torch.Tensor, low: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if not y.is_cuda:
        return y.addmm_(low, up)
    from tunesmith.kernels.add_lowrank import add_lowrank_

    return add_lowrank_(y, low, up)
