"""A trained linear with all three products in fp8: output, gradient of the input, gradient of the weight.

Every operand is quantized along the dimension that is summed over, each row (or column) with its own scale, from the
values of this very step.

Legend: T tokens, K inputs, N outputs; `8` marks fp8 values.
"""

from __future__ import annotations

import torch

from tunesmith.kernels.lowrank import quantize_rows


def fp8_linear(x_tk: torch.Tensor, weight_nk: torch.Tensor) -> torch.Tensor:
    return _Fp8Linear.apply(x_tk, weight_nk)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tk, weight_nk):
        ctx.save_for_backward(x_tk, weight_nk)
        return _product(*quantize_rows(x_tk), *quantize_rows(weight_nk), x_tk.dtype)

    @staticmethod
    def backward(ctx, g_tn):
        x_tk, weight_nk = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _product(*quantize_rows(g_tn), *quantize_rows(weight_nk.t().contiguous()), g_tn.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = _product(
                *quantize_rows(g_tn.t().contiguous()), *quantize_rows(x_tk.t().contiguous()), g_tn.dtype
            )
        return d_x, d_weight


def _product(a8, scale_a, b8, scale_b, dtype) -> torch.Tensor:
    """`(a8 * scale_a) @ (b8 * scale_b).T`."""
    if a8.is_cuda:
        return torch._scaled_mm(a8, b8.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    return ((a8.float() * scale_a) @ (b8.float() * scale_b).t()).to(dtype)
