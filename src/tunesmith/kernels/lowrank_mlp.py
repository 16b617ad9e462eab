"""A gated MLP with frozen weights and adapters on its three linears, as one operation.

`down(silu(gate(x)) * up(x))`. Of the wide tensors only the joint product of gate and up is kept for backward.

Legend: T tokens, H hidden, I intermediate, R rank; `8` marks fp8 values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tunesmith.kernels.lowrank import (
    product_fp8,
    product_plus_small,
    product_plus_small_fp8,
    quantize_apart,
    quantize_rows,
)
from tunesmith.kernels.nf4 import whole
from tunesmith.kernels.swiglu import swiglu, swiglu_backward


class FrozenWeights(NamedTuple):
    """Weights in bf16, fp8 or nf4. With a scale for each row the products run in fp8."""

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down: torch.Tensor
    down_scale: torch.Tensor | None


def lowrank_mlp(
    x_th: torch.Tensor,
    frozen: FrozenWeights,
    a_gate_up: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
) -> torch.Tensor:
    """`a_gate_up` [2R, H] holds the factors of gate and of up, one below the other; each `b` holds its scale."""
    return _LowRankMlp.apply(x_th, *frozen, a_gate_up, b_gate, b_up, a_down, b_down)


class _LowRankMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, gate_up_scale, down, down_scale, a_gate_up, b_gate, b_up, a_down, b_down):
        is_fp8 = gate_up_scale is not None
        low = x @ a_gate_up.t()
        weight = whole(gate_up, _rows(b_gate, b_up), x.shape[1], x, gate_up_scale)
        y = product_fp8(*quantize_rows(x), weight, gate_up_scale, x.dtype) if is_fp8 else x @ weight.t()
        act, act8, act_scale = swiglu(y, low, b_gate, b_up, is_fp8)
        low_down = act @ a_down.t()
        weight = whole(down, _rows(b_down), act.shape[1], act, down_scale)
        if is_fp8:
            out = product_plus_small_fp8(act8, act_scale, weight, down_scale, low_down, b_down.t(), x.dtype)
        else:
            out = product_plus_small(act, weight.t(), low_down, b_down.t(), None)
        ctx.save_for_backward(
            x, y, low, low_down, gate_up, gate_up_scale, down, down_scale, a_gate_up, b_gate, b_up, a_down, b_down
        )
        return out

    @staticmethod
    def backward(ctx, g):
        (x, y, low, low_down, gate_up, gate_up_scale, down, down_scale, a_gate_up, b_gate, b_up, a_down, b_down) = (
            ctx.saved_tensors
        )
        is_fp8 = gate_up_scale is not None
        g_down = g @ b_down
        weight = whole(down, _rows(b_down), a_down.shape[1], g, down_scale)
        if is_fp8:
            ones = torch.ones(weight.shape[1], device=g.device, dtype=torch.float32)
            d_act = product_fp8(*quantize_apart(g, down_scale), weight.t().contiguous(), ones, g.dtype)
        else:
            d_act = g @ weight
        scale_in = gate_up_scale if is_fp8 else y.new_empty(0, dtype=torch.float32)
        d_y, d8, d_scale, d_factors = swiglu_backward(d_act, g_down, y, low, b_gate, b_up, a_down, scale_in, is_fp8)
        intermediate = b_gate.shape[0]
        g_gate_up = torch.cat([d_y[:, :intermediate] @ b_gate, d_y[:, intermediate:] @ b_up], dim=1)
        d_x = None
        if ctx.needs_input_grad[0]:
            weight = whole(gate_up, _rows(b_gate, b_up), x.shape[1], d_y, gate_up_scale)
            if is_fp8:
                ones = torch.ones(weight.shape[1], device=g.device, dtype=torch.float32)
                d_x = product_plus_small_fp8(d8, d_scale, weight.t().contiguous(), ones, g_gate_up, a_gate_up, g.dtype)
            else:
                d_x = product_plus_small(d_y, weight, g_gate_up, a_gate_up, None)
        d_b_gate, d_b_up, d_a_down = d_factors.unbind()
        return d_x, None, None, None, None, g_gate_up.t() @ x, d_b_gate, d_b_up, d_a_down.t(), g.t() @ low_down


def _rows(*factors: torch.Tensor) -> tuple[int, ...]:
    return tuple(factor.shape[0] for factor in factors)
