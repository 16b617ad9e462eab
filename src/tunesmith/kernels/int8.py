"""Frozen weights in 8 bits: whole numbers from -127 to 127 and an fp32 scale for each row, made whole when used.

Legend: N outputs (rows), K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tunesmith.kernels.operator import operator

LARGEST = 127


def quantize(weight_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value to the nearest of its row's 255: int8 [N, K] and the rows' scales [N]."""
    weight_nk = weight_nk.detach().float()
    scale_n = weight_nk.abs().amax(1) / LARGEST
    nearest = (weight_nk / scale_n.clamp(min=1e-38)[:, None]).round_()
    return nearest.clamp_(-LARGEST, LARGEST).to(torch.int8), scale_n


@operator("int8_dequantize")
def dequantize(
    weight8: torch.Tensor, scale_n: torch.Tensor, dtype: torch.dtype, after: torch.Tensor | None = None
) -> torch.Tensor:
    """The weights [N, K] in `dtype`, in one pass. `after` is not looked at; see `nf4.dequantize`."""
    whole = torch.empty(weight8.shape, dtype=dtype, device=weight8.device)
    return torch.mul(weight8.view(torch.int8), scale_n[:, None], out=whole)  # bytes of another name in shards


@torch.library.register_fake(dequantize)
def _(weight8, scale_n, dtype, after=None):
    return torch.empty(weight8.shape, dtype=dtype, device=weight8.device)


def int8_linear(
    x: torch.Tensor, weight8: torch.Tensor, scale_n: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W.T + bias` with a frozen W, for inputs of any shape [..., K]."""
    return _Int8Linear.apply(x, weight8, scale_n, bias)


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight8, scale_n, bias):
        ctx.save_for_backward(weight8, scale_n)
        return F.linear(x, dequantize(weight8, scale_n, x.dtype), bias)

    @staticmethod
    def backward(ctx, g):
        weight8, scale_n = ctx.saved_tensors
        return g @ dequantize(weight8, scale_n, g.dtype, g), None, None, None
