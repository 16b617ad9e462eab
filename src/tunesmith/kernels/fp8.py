"""A trained linear with all three products in fp8: output, gradient of the input, gradient of the weight.

Every operand is quantized along the dimension that is summed over, each row (or column) with its own scale, from the
values of this very step.

Legend: T tokens, K inputs, N outputs; `8` marks fp8 values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunesmith.kernels.lowrank import product_fp8, quantize_rows

FP8_MULTIPLE = 16
"""Sizes of fp8 products are multiples of this."""


def fp8_linear(x_tk: torch.Tensor, weight_nk: torch.Tensor) -> torch.Tensor:
    return _Fp8Linear.apply(x_tk, weight_nk)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tk, weight_nk):
        ctx.save_for_backward(x_tk, weight_nk)
        return product_fp8(*quantize_rows(x_tk), *quantize_rows(weight_nk), x_tk.dtype)

    @staticmethod
    def backward(ctx, g_tn):
        x_tk, weight_nk = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = product_fp8(*quantize_rows(g_tn), *quantize_rows(weight_nk.t().contiguous()), g_tn.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = product_fp8(*quantize_rows(_turned(g_tn)), *quantize_rows(_turned(x_tk)), g_tn.dtype)
        return d_x, d_weight


def _turned(x_tk: torch.Tensor) -> torch.Tensor:
    """Transposed, with zeros up to the next multiple of the tokens that fp8 products can sum over."""
    return F.pad(x_tk.t(), (0, -x_tk.shape[0] % FP8_MULTIPLE)).contiguous()
