"""Linears for quantization-aware training: the forward pass has the weights that the exported file will have, and the
gradient passes straight through the rounding, as if there were none.

Rounded weights are made again in the backward pass: kept, they would take as much memory as all linears.

Legend: T tokens, N outputs, K inputs, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunesmith.kernels.rounding import Rounding


def fake_quantized_linear(
    x: torch.Tensor, weight_nk: torch.Tensor, bias_n: torch.Tensor | None, rounding: Rounding
) -> torch.Tensor:
    """`x @ rounded(W).T + bias`."""
    return _FakeQuantizedLinear.apply(x, weight_nk, bias_n, rounding)


def fake_quantized_lowrank(
    x: torch.Tensor,
    weight_nk: torch.Tensor,
    bias_n: torch.Tensor | None,
    a_rk: torch.Tensor,
    b_nr: torch.Tensor,
    scale: float,
    rounding: Rounding,
) -> torch.Tensor:
    """`x @ rounded(W + scale * B @ A).T + bias` with a frozen W: what a merged adapter is in the exported file."""
    return _FakeQuantizedLowRank.apply(x, weight_nk, bias_n, a_rk, b_nr, scale, rounding)


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_nk, bias_n, rounding):
        ctx.save_for_backward(x, weight_nk)
        ctx.rounding, ctx.has_bias = rounding, bias_n is not None
        return F.linear(x, rounding(weight_nk).to(x.dtype), bias_n)

    @staticmethod
    def backward(ctx, g):
        x, weight_nk = ctx.saved_tensors
        x_gradient = g @ ctx.rounding(weight_nk).to(g.dtype) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = (g.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight_nk.dtype)
        return x_gradient, weight_gradient, _bias_gradient(ctx, g), None


class _FakeQuantizedLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_nk, bias_n, a_rk, b_nr, scale, rounding):
        ctx.save_for_backward(x, weight_nk, a_rk, b_nr)
        ctx.rounding, ctx.scale, ctx.has_bias = rounding, scale, bias_n is not None
        return F.linear(x, rounding(_merged(weight_nk, a_rk, b_nr, scale)).to(x.dtype), bias_n)

    @staticmethod
    def backward(ctx, g):
        x, weight_nk, a_rk, b_nr = ctx.saved_tensors
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = g @ ctx.rounding(_merged(weight_nk, a_rk, b_nr, ctx.scale)).to(g.dtype)
        # Through the rank, so that no gradient of the size of W is made.
        g_tn, x_tk = g.flatten(0, -2), x.flatten(0, -2)
        scaled_tr = (g_tn @ b_nr.to(g.dtype)) * ctx.scale
        a_gradient = scaled_tr.t() @ x_tk
        b_gradient = (g_tn.t() @ (x_tk @ a_rk.t().to(x.dtype))) * ctx.scale
        return (
            x_gradient,
            None,
            _bias_gradient(ctx, g),
            a_gradient.to(a_rk.dtype),
            b_gradient.to(b_nr.dtype),
            None,
            None,
        )


def _merged(weight_nk: torch.Tensor, a_rk: torch.Tensor, b_nr: torch.Tensor, scale: float) -> torch.Tensor:
    """In the same order of operations as `LoraLinear.merged`, so that the bits are the same."""
    return weight_nk.float() + (b_nr.float() @ a_rk.float()) * scale


def _bias_gradient(ctx, g: torch.Tensor) -> torch.Tensor | None:
    return g.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
