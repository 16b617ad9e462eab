"""A gated MLP with frozen weights and adapters on its three linears, as one operation.

`down(act(gate(x)) * up(x))`, with the activations of `kernels.gating`. Of the wide tensors only the joint matmul of
gate and up is kept for backward. In slices of tokens not even that: each slice is computed again in the backward pass,
and wide tensors never exist for more than one of them.

Legend: T tokens, H hidden, I intermediate, R rank; `8` marks fp8 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tunesmith.kernels.gating import SILU
from tunesmith.kernels.lowrank import (
    matmul_add_lowrank,
    matmul_add_lowrank_fp8,
    matmul_fp8,
    quantize_apart,
    quantize_rows,
    transposed_copy,
    transposed_fp8,
)
from tunesmith.kernels.nf4 import dequantized
from tunesmith.kernels.operator import operator
from tunesmith.kernels.swiglu import swiglu, swiglu_backward

ROWS = 128
"""Slices are whole tiles of a GPU's matmuls."""


class FrozenWeights(NamedTuple):
    """Weights in bf16, fp8 or nf4. With a scale for each row the matmuls run in fp8."""

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down: torch.Tensor
    down_scale: torch.Tensor | None
    gate_up_transposed: torch.Tensor | None = None
    """In fp8, transposed, where that is kept."""
    down_transposed: torch.Tensor | None = None


def lowrank_mlp(
    x_th: torch.Tensor,
    frozen: FrozenWeights,
    a_gate_up: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
    slice_tokens: int = 0,
    gating: str = SILU.text,
) -> torch.Tensor:
    """`a_gate_up` [2R, H] holds the factors of gate and of up, one below the other; each `b` holds its scale. More than
    `slice_tokens` tokens (0: any number) are computed in slices."""
    factors = (a_gate_up, b_gate, b_up, a_down, b_down)
    if 0 < slice_tokens < x_th.shape[0]:
        return _sliced(x_th, *frozen[:4], *factors, slice_tokens, gating)
    return _LowRankMlp.apply(x_th, gating, *frozen, *factors)


class _LowRankMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gating, *others):
        (gate_up, gate_up_scale, down, down_scale, *transposed), factors = others[:6], others[6:]
        a_gate_up, b_gate, b_up, a_down, b_down = factors
        y, low, low_down, activation = _up(x, gate_up, gate_up_scale, a_gate_up, b_gate, b_up, a_down, gating)
        ctx.gating = gating
        out = _down(*activation, down, down_scale, low_down, b_down)
        ctx.save_for_backward(x, y, low, low_down, gate_up, gate_up_scale, down, down_scale, *factors, *transposed)
        return out

    @staticmethod
    def backward(ctx, g):
        d_x, *d_factors = _gradients(g, *ctx.saved_tensors, gating=ctx.gating, needs_x=ctx.needs_input_grad[0])
        return d_x, *[None] * 7, *d_factors


def _up(x, gate_up, gate_up_scale, a_gate_up, b_gate, b_up, a_down, gating, quantize=quantize_rows):
    """From the input to the activation (in its own precision, and in fp8 with scales), and what backward needs."""
    is_fp8 = gate_up_scale is not None
    low = x @ a_gate_up.t()
    weight = dequantized(gate_up, _rows(b_gate, b_up), x.shape[1], x, gate_up_scale)
    y = matmul_fp8(*quantize(x), weight8_nk=weight, scale_n=gate_up_scale, dtype=x.dtype) if is_fp8 else x @ weight.t()
    act, act8, act_scale = swiglu(y, low, b_gate, b_up, is_fp8, gating)
    return y, low, act @ a_down.t(), (act, act8, act_scale)


def _down(act, act8, act_scale, down, down_scale, low_down, b_down):
    weight = dequantized(down, _rows(b_down), act.shape[1], act, down_scale)
    if down_scale is not None:
        return matmul_add_lowrank_fp8(act8, act_scale, weight, down_scale, low_down, b_down.t(), act.dtype)
    return matmul_add_lowrank(act, weight.t(), low_down, b_down.t(), None)


def _gradients(
    g,
    x,
    y,
    low,
    low_down,
    gate_up,
    gate_up_scale,
    down,
    down_scale,
    a_gate_up,
    b_gate,
    b_up,
    a_down,
    b_down,
    gate_up_transposed=None,
    down_transposed=None,
    *,
    gating,
    needs_x,
):
    """Of the input (None when not needed) and of the five factors."""
    is_fp8 = gate_up_scale is not None
    g_down = g @ b_down
    if is_fp8:
        transposed = transposed_fp8(down, down_transposed, _rows(b_down), a_down.shape[1], g, down_scale)
        g8, g_scale = quantize_apart(g, down_scale)
        d_act = matmul_fp8(g8, g_scale, *transposed, g.dtype)
    else:
        d_act = g @ dequantized(down, _rows(b_down), a_down.shape[1], g)
    scale_in = gate_up_scale if is_fp8 else y.new_empty(0, dtype=torch.float32)
    d_y, d8, d_scale, d_factors = swiglu_backward(d_act, g_down, y, low, b_gate, b_up, a_down, scale_in, is_fp8, gating)
    intermediate = b_gate.shape[0]
    if is_fp8:  # d_y has the weights' scales in it
        scale_gate, scale_up = gate_up_scale[:, None].split(intermediate)
        b_gate, b_up = (b_gate / scale_gate).to(g.dtype), (b_up / scale_up).to(g.dtype)
    g_gate_up = torch.cat([d_y[:, :intermediate] @ b_gate, d_y[:, intermediate:] @ b_up], dim=1)
    d_x = None
    if needs_x:
        rows = _rows(b_gate, b_up)
        if is_fp8:
            transposed = transposed_fp8(gate_up, gate_up_transposed, rows, x.shape[1], d_y, gate_up_scale)
            d_x = matmul_add_lowrank_fp8(d8, d_scale, *transposed, g_gate_up, a_gate_up, g.dtype)
        else:
            d_x = matmul_add_lowrank(d_y, dequantized(gate_up, rows, x.shape[1], d_y), g_gate_up, a_gate_up, None)
    d_b_gate, d_b_up, d_a_down = d_factors.unbind()
    return d_x, g_gate_up.t() @ x, d_b_gate, d_b_up, d_a_down.t(), g.t() @ low_down


# In slices. Opaque to the compiler, for which every slice would be a graph of its own.


@operator("sliced_mlp")
def _sliced(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    a_gate_up: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
    size: int,
    gating: str,
) -> torch.Tensor:
    out = torch.empty_like(x)
    gate_up, down = _dequantized_once(x, gate_up, gate_up_scale, down, down_scale, b_gate, b_up, b_down)
    factors = (a_gate_up, b_gate, b_up, a_down)
    for part in _slices(x, size):
        _, _, low_down, activation = _up(x[part], gate_up, gate_up_scale, *factors, gating, quantize=_quantize_alone)
        out[part] = _down(*activation, down, down_scale, low_down, b_down)
        del activation  # before the next slice makes its own
    return out


@torch.library.register_fake(_sliced)
def _(x, gate_up, gate_up_scale, down, down_scale, a_gate_up, b_gate, b_up, a_down, b_down, size, gating):
    return torch.empty_like(x)


@operator("sliced_mlp_backward")
def _sliced_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    a_gate_up: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    a_down: torch.Tensor,
    b_down: torch.Tensor,
    size: int,
    gating: str,
    needs_x: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of x (empty when not needed), and those of the factors, summed over slices in fp32."""
    factors = (a_gate_up, b_gate, b_up, a_down, b_down)
    d_x = torch.empty_like(x) if needs_x else x.new_empty(0)
    sums = [torch.zeros_like(factor, dtype=torch.float32) for factor in factors]
    gate_up, down = _dequantized_once(x, gate_up, gate_up_scale, down, down_scale, b_gate, b_up, b_down)
    transposed = (transposed_copy(gate_up), transposed_copy(down)) if gate_up_scale is not None else (None, None)
    frozen = (gate_up, gate_up_scale, down if transposed[1] is None else transposed[1], down_scale)
    del down  # the transposed one is enough
    for part in _slices(x, size):
        y, low, low_down, activation = _up(x[part], gate_up, gate_up_scale, *factors[:4], gating, _quantize_alone)
        del activation  # backward computes it again on the way
        d_part, *d_factors = _gradients(
            g[part], x[part], y, low, low_down, *frozen, *factors, *transposed, gating=gating, needs_x=needs_x
        )
        if d_part is not None:
            d_x[part] = d_part
        for total, gradient in zip(sums, d_factors, strict=True):
            total += gradient
        del y, d_part  # before the next slice makes its own
    d_a_gate_up, d_b_gate, d_b_up, d_a_down, d_b_down = (total.to(x.dtype) for total in sums)
    return d_x, d_a_gate_up, d_b_gate, d_b_up, d_a_down, d_b_down


@torch.library.register_fake(_sliced_backward)
def _(g, x, gate_up, gate_up_scale, down, down_scale, a_gate_up, b_gate, b_up, a_down, b_down, size, gating, needs_x):
    d_x = torch.empty_like(x) if needs_x else x.new_empty(0)
    return d_x, *(torch.empty_like(factor) for factor in (a_gate_up, b_gate, b_up, a_down, b_down))


def _keep(ctx, inputs, output):
    *tensors, ctx.size, ctx.gating = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, g):
    needs_x = ctx.needs_input_grad[0]
    d_x, *d_factors = _sliced_backward(g.contiguous(), *ctx.saved_tensors, ctx.size, ctx.gating, needs_x)
    return d_x if needs_x else None, None, None, None, None, *d_factors, None, None


torch.library.register_autograd(_sliced, _backward, setup_context=_keep)


def _dequantized_once(x, gate_up, gate_up_scale, down, down_scale, b_gate, b_up, b_down):
    """The weights that all slices multiply with: made from nf4 for all of them."""
    return (
        dequantized(gate_up, _rows(b_gate, b_up), x.shape[1], x, gate_up_scale),
        dequantized(down, _rows(b_down), b_gate.shape[0], x, down_scale),
    )


def _quantize_alone(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where no compiler makes it part of what computes x."""
    return quantize_apart(x, None)


def _slices(x: torch.Tensor, size: int) -> Iterator[slice]:
    """Of equal length but for rounding, so that the last is not a small one."""
    tokens = x.shape[0]
    count = -(-tokens // size)
    each = -(-tokens // count // ROWS) * ROWS
    return (slice(start, min(start + each, tokens)) for start in range(0, tokens, each))


def _rows(*factors: torch.Tensor) -> tuple[int, ...]:
    return tuple(factor.shape[0] for factor in factors)
