"""A gated MLP with frozen weights and adapters on its three linears, as one operation.

`down(silu(gate(x)) * up(x))`. Of the wide tensors only the joint product of gate and up is kept for backward.

Legend: T tokens, H hidden, I intermediate, R rank; `8` marks fp8 values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tunesmith.kernels.lowrank import product_fp8, product_plus_small, product_plus_small_fp8, quantize_rows
from tunesmith.kernels.nf4 import whole
from tunesmith.kernels.swiglu import swiglu, swiglu_backward


class FrozenWeights(NamedTuple):
    """bf16 weights or nf4 ones (no scales), or fp8 values with a scale for each row."""

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
        if is_fp8:
            y = product_fp8(*quantize_rows(x), gate_up, gate_up_scale, x.dtype)
        else:
            y = x @ _gate_up(gate_up, b_gate, b_up, x).t()
        act, act8, act_scale = swiglu(y, low, b_gate, b_up, is_fp8)
        low_down = act @ a_down.t()
        if is_fp8:
            out = product_plus_small_fp8(act8, act_scale, down, down_scale, low_down, b_down.t(), x.dtype)
        else:
            out = product_plus_small(act, _down(down, a_down, b_down).t(), low_down, b_down.t(), None)
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
        if is_fp8:
            ones = torch.ones(down.shape[1], device=g.device, dtype=torch.float32)
            g8, g_scale = quantize_rows(g * down_scale.to(g.dtype))
            d_act = product_plus_small_fp8(g8, g_scale, down.t().contiguous(), ones, g_down, a_down, g.dtype)
        else:
            d_act = product_plus_small(g, _down(down, a_down, b_down), g_down, a_down, None)
        scale_in = gate_up_scale if is_fp8 else y.new_empty(0, dtype=torch.float32)
        d_y, d8, d_scale, act = swiglu_backward(d_act, y, low, b_gate, b_up, scale_in, is_fp8)
        intermediate, rank = b_gate.shape
        d_gate, d_up = d_y[:, :intermediate], d_y[:, intermediate:]
        g_gate_up = torch.cat([d_gate @ b_gate, d_up @ b_up], dim=1)
        d_x = None
        if ctx.needs_input_grad[0]:
            if is_fp8:
                ones = torch.ones(gate_up.shape[1], device=g.device, dtype=torch.float32)
                d_x = product_plus_small_fp8(d8, d_scale, gate_up.t().contiguous(), ones, g_gate_up, a_gate_up, g.dtype)
            else:
                d_x = product_plus_small(d_y, _gate_up(gate_up, b_gate, b_up, x), g_gate_up, a_gate_up, None)
        factors = (
            g_gate_up.t() @ x,
            d_gate.t() @ low[:, :rank],
            d_up.t() @ low[:, rank:],
            g_down.t() @ act,
            g.t() @ low_down,
        )
        return d_x, None, None, None, None, *factors


def _gate_up(weight: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return whole(weight, (b_gate.shape[0], b_up.shape[0]), x.shape[1], x.dtype)


def _down(weight: torch.Tensor, a_down: torch.Tensor, b_down: torch.Tensor) -> torch.Tensor:
    return whole(weight, (b_down.shape[0],), a_down.shape[1], a_down.dtype)
