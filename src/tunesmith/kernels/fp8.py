"""A trained linear with all three matmuls in fp8: output, gradient of the input, gradient of the weight.

Every operand is quantized along the dimension that is summed over, each row (or column) with its own scale, from the
values of this very step.

Legend: T tokens, K inputs, N outputs; `8` marks fp8 values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunesmith.kernels.lowrank import (
    E4M3,
    matmul_fp8,
    quantize_apart,
    quantize_rows,
    quantized_like,
    with_whole_rows,
)
from tunesmith.kernels.operator import operator

FP8_MULTIPLE = 16
"""Sizes of fp8 matmuls are multiples of this."""


def fp8_linear(x_tk: torch.Tensor, weight_nk: torch.Tensor) -> torch.Tensor:
    return _Fp8Linear.apply(x_tk, weight_nk)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_tk, weight_nk):
        # What backward needs of x is kept in fp8: half the bytes. Linears with the same input share it.
        transposed = quantize_transposed(x_tk, None) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*transposed, weight_nk)
        return matmul_fp8(*quantize_rows(x_tk), *quantize_rows(weight_nk), x_tk.dtype)

    @staticmethod
    def backward(ctx, g_tn):
        *transposed, weight_nk = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        d_x = d_weight = largest_n = None
        if needs_x:
            if needs_weight:
                g8_tn, scale_t, largest_n = quantize_with_maxima(g_tn)
            else:
                g8_tn, scale_t = quantize_apart(g_tn, None)
            d_x = matmul_fp8(g8_tn, scale_t, *quantize_transposed(weight_nk, g_tn), dtype=g_tn.dtype)
        if needs_weight:
            d_weight = matmul_fp8(*quantize_transposed(g_tn, None, largest_n), *transposed, dtype=g_tn.dtype)
        return d_x, d_weight


@operator("quantize_with_maxima")
def quantize_with_maxima(x_tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_rows` in a pass that also gives the largest absolute value of each column, for
    `quantize_transposed`."""
    if not x_tk.is_cuda:
        return *quantize_apart(x_tk, None), x_tk.abs().amax(0).float()
    from tunesmith.kernels.quantize import quantize_with_maxima_into

    values, scale, largest_k = _quantized_with_maxima(x_tk)
    quantize_with_maxima_into(with_whole_rows(x_tk), values, scale, largest_k)
    return values, scale, largest_k


@torch.library.register_fake(quantize_with_maxima)
def _(x_tk):
    return _quantized_with_maxima(x_tk)


def _quantized_with_maxima(x_tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *quantized_like(x_tk), x_tk.new_empty(x_tk.shape[1], dtype=torch.float32)


@operator("quantize_transposed")
def quantize_transposed(
    x_tk: torch.Tensor, after: torch.Tensor | None, largest_k: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of the transposed matrix, with zeros up to the next multiple of what fp8 matmuls can sum over.

    `largest_k` spares a pass where the largest values of the columns are known. `after` is not looked at: what needs
    the gradient cannot be made in the forward pass and kept, as the compiler otherwise would.
    """
    if not x_tk.is_cuda:
        return quantize_rows(F.pad(x_tk.t(), (0, -x_tk.shape[0] % FP8_MULTIPLE)).contiguous())
    from tunesmith.kernels.quantize import quantize_transposed_into

    values, scale = _transposed(x_tk)
    quantize_transposed_into(with_whole_rows(x_tk), values, scale, largest_k)
    return values, scale


@torch.library.register_fake(quantize_transposed)
def _(x_tk, after, largest_k=None):
    return _transposed(x_tk)


def _transposed(x_tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x_tk.shape
    values = x_tk.new_empty(columns, rows + -rows % FP8_MULTIPLE, dtype=E4M3)
    return values, x_tk.new_empty(columns, 1, dtype=torch.float32)
