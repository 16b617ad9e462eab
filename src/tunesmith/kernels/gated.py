"""`(act(gate) * up) @ W.T` with a trained W, whose activation is not kept: backward makes it again.

The gradient of W needs the activation, so a compiler keeps it, a third of what a gated MLP keeps. Here one pass in the
backward direction reads gate, up and the activation's gradient, and writes the gradients of both and the activation.
Gate and up may lie side by side, as one linear gives them.

Legend: T tokens, I intermediate, N outputs.
"""

from __future__ import annotations

import torch

from tunesmith.kernels.gating import SILU, gating_of
from tunesmith.kernels.operator import operator


def gated_matmul(
    gate_ti: torch.Tensor, up_ti: torch.Tensor, weight_ni: torch.Tensor, gating: str = SILU.text
) -> torch.Tensor:
    return _GatedMatmul.apply(gate_ti, up_ti, weight_ni, gating)


def joint_gated_matmul(y_t2i: torch.Tensor, weight_ni: torch.Tensor, gating: str = SILU.text) -> torch.Tensor:
    """The same of gate and up side by side."""
    return _JointGatedMatmul.apply(y_t2i, weight_ni, gating)


class _GatedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_ti, up_ti, weight_ni, gating):
        ctx.save_for_backward(gate_ti, up_ti, weight_ni)
        ctx.gating = gating
        return gating_of(gating)(gate_ti, up_ti) @ weight_ni.t()

    @staticmethod
    def backward(ctx, g_tn):
        gate_ti, up_ti, weight_ni = ctx.saved_tensors
        d_gate, d_up, act_ti = gated_backward(g_tn @ weight_ni, gate_ti, up_ti, ctx.gating)
        return d_gate, d_up, g_tn.t() @ act_ti, None


class _JointGatedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_t2i, weight_ni, gating):
        ctx.save_for_backward(y_t2i, weight_ni)
        ctx.gating = gating
        return gating_of(gating)(*y_t2i.chunk(2, dim=-1)) @ weight_ni.t()

    @staticmethod
    def backward(ctx, g_tn):
        y_t2i, weight_ni = ctx.saved_tensors
        d_y, act_ti = joint_gated_backward(g_tn @ weight_ni, y_t2i, ctx.gating)
        return d_y, g_tn.t() @ act_ti, None


# Opaque to the compiler, which would otherwise find the same activation in both passes, and keep it.


@operator("gated_backward")
def gated_backward(
    d_act: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gating: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, and the activation."""
    outputs = gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if gate.is_cuda:
        d_act, gate, up = d_act.contiguous(), gate.contiguous(), up.contiguous()
    _into(d_act, gate, up, *outputs, gating)
    return outputs


@torch.library.register_fake(gated_backward)
def _(d_act, gate, up, gating):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@operator("joint_gated_backward")
def joint_gated_backward(d_act: torch.Tensor, y: torch.Tensor, gating: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of gate and up side by side, and the activation."""
    d_y, act = y.new_empty(y.shape), y.new_empty(d_act.shape)
    if y.is_cuda:
        d_act, y = d_act.contiguous(), y.contiguous()
    (gate, up), (d_gate, d_up) = y.chunk(2, dim=-1), d_y.chunk(2, dim=-1)
    _into(d_act, gate, up, d_gate, d_up, act, gating)
    return d_y, act


@torch.library.register_fake(joint_gated_backward)
def _(d_act, y, gating):
    return y.new_empty(y.shape), y.new_empty(d_act.shape)


def _into(d_act, gate, up, d_gate, d_up, act, gating: str) -> None:
    if gate.is_cuda:
        from tunesmith.kernels.gated_fused import gated_backward_into

        gated_backward_into(d_act, gate, up, d_gate, d_up, act, gating)
        return
    made, by_gate, by_up = gating_of(gating).with_derivatives(gate.float(), up.float())
    d_gate.copy_(d_act.float() * by_gate)
    d_up.copy_(d_act.float() * by_up)
    act.copy_(made)
