"""The joint matmul of queries, keys and values with frozen weights and adapters, rotated, as one operation.

`rotate(x @ W.T + (x @ A.T) @ B.T)`, apart into queries, keys and values. The matmul itself is not kept, and the
gradients of the three become one matrix in the pass that rotates them back.

Legend: T tokens, K inputs, N outputs, R rank, D head dim, C rotated values of a head; `8` marks fp8 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tunesmith.kernels.lowrank import matmul_add_lowrank, matmul_add_lowrank_fp8, quantize_apart, transposed_fp8
from tunesmith.kernels.nf4 import dequantized
from tunesmith.kernels.rotary import HALVES, rotated_apart, rotated_back


def lowrank_qkv(
    x_tk: torch.Tensor,
    weight_nk: torch.Tensor,
    scale_n: torch.Tensor | None,
    a_rk: torch.Tensor,
    b_nr: torch.Tensor,
    bias_n: torch.Tensor | None,
    rows: Sequence[int],
    transposed8_kn: torch.Tensor | None,
    cos_tc: torch.Tensor,
    sin_tc: torch.Tensor,
    key_heads: int,
    head_dim: int,
    pairs: int = HALVES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, heads, D] each. `weight_nk` is in bf16, fp8 or nf4, as weights with so many `rows` (one of a joint linear,
    or three); with `scale_n` the large matmuls run in fp8, and `transposed8_kn` is the weight transposed, where that is
    kept. `b_nr` already holds the adapters' scale. `pairs` is one of `kernels.rotary.PAIRS`."""
    held = weight_nk, scale_n, a_rk, b_nr, bias_n, tuple(rows), transposed8_kn
    return _LowRankQkv.apply(x_tk, *held, cos_tc, sin_tc, key_heads, head_dim, pairs)


class _LowRankQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x_tk, held, scale_n, a_rk, b_nr, bias_n, rows, transposed8_kn, cos_tc, sin_tc, key_heads, head_dim, pairs
    ):
        weight_nk = dequantized(held, rows, x_tk.shape[1], x_tk, scale_n)
        low_tr = x_tk @ a_rk.t()
        if scale_n is None:
            y_tn = matmul_add_lowrank(x_tk, weight_nk.t(), low_tr, b_nr.t(), bias_n)
        else:
            y_tn = matmul_add_lowrank_fp8(*quantize_apart(x_tk, None), weight_nk, scale_n, low_tr, b_nr.t(), x_tk.dtype)
            y_tn = y_tn if bias_n is None else y_tn + bias_n
        ctx.save_for_backward(x_tk, held, scale_n, a_rk, b_nr, low_tr, transposed8_kn, cos_tc, sin_tc)
        ctx.rows, ctx.pairs = rows, pairs
        return rotated_apart(y_tn, cos_tc, sin_tc, key_heads, head_dim, pairs)

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):
        x_tk, held, scale_n, a_rk, b_nr, low_tr, transposed8_kn, cos_tc, sin_tc = ctx.saved_tensors
        g_tn = rotated_back(d_q, d_k, d_v, cos_tc, sin_tc, ctx.pairs)
        g_tr = g_tn @ b_nr
        d_x = None
        if ctx.needs_input_grad[0]:
            if scale_n is not None:
                transposed = transposed_fp8(held, transposed8_kn, ctx.rows, x_tk.shape[1], g_tn, scale_n)
                d_x = matmul_add_lowrank_fp8(*quantize_apart(g_tn, scale_n), *transposed, g_tr, a_rk, g_tn.dtype)
            else:
                weight_nk = dequantized(held, ctx.rows, x_tk.shape[1], g_tn)
                d_x = matmul_add_lowrank(g_tn, weight_nk, g_tr, a_rk, None)
        return d_x, None, None, g_tr.t() @ x_tk, g_tn.t() @ low_tr, *[None] * 8
