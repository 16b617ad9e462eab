"""Rotary positions of queries and keys, and values copied beside them, in one pass; backward too.

The compiler needs three times as long for the gradient, which it gathers piece by piece (docs/lab.md). The first half
of a head is rotated against the second, as in Llama and its descendants: `x * cos + (-second, first) * sin`.

Legend: T tokens, H query heads, G key heads, D head dim, N = (H + 2 G) D.
"""

from __future__ import annotations

import torch

from tunesmith.kernels.operator import operator


def rotate_pair(
    q_thd: torch.Tensor, k_tgd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of separate linears."""
    return _RotatePair.apply(q_thd, k_tgd, cos_td, sin_td)


class _RotatePair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_thd, k_tgd, cos_td, sin_td):
        ctx.save_for_backward(cos_td, sin_td)
        return rotated(q_thd, k_tgd, cos_td, sin_td, False)

    @staticmethod
    def backward(ctx, d_q, d_k):
        return *rotated(d_q, d_k, *ctx.saved_tensors, True), None, None


def _room_for(one: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(one, memory_format=torch.contiguous_format)


@operator("rotated")
def rotated(
    q_thd: torch.Tensor, k_tgd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated, forward or `back`: the gradient's way."""
    found = _room_for(q_thd), _room_for(k_tgd)
    if not q_thd.is_cuda:
        for one, target in zip((q_thd, k_tgd), found, strict=True):
            target.copy_(_plain(one, cos_td, sin_td, back))
        return found
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into((q_thd, k_tgd), cos_td, sin_td, found, back=back)
    return found


@torch.library.register_fake(rotated)
def _(q_thd, k_tgd, cos_td, sin_td, back):
    return q_thd.new_empty(q_thd.shape), k_tgd.new_empty(k_tgd.shape)


@operator("rotated_apart")
def rotated_apart(
    y_tn: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor, key_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a joint product: queries and keys, rotated, and values. None of them keeps the product alive."""
    parts = _apart(y_tn, cos_td, key_heads)
    q, k, v = parts
    found = _room_for(q), _room_for(k), _room_for(v)
    if not y_tn.is_cuda:
        for one, target in zip(parts[:2], found, strict=False):
            target.copy_(_plain(one, cos_td, sin_td, False))
        found[2].copy_(parts[2])
        return found
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into(parts, cos_td, sin_td, found, back=False)
    return found


@torch.library.register_fake(rotated_apart)
def _(y_tn, cos_td, sin_td, key_heads):
    return tuple(y_tn.new_empty(one.shape) for one in _apart(y_tn, cos_td, key_heads))


@operator("rotated_back")
def rotated_back(
    d_q: torch.Tensor, d_k: torch.Tensor, d_v: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor
) -> torch.Tensor:
    """The gradient of the joint product [T, N]."""
    g_tn = _joint(d_q, d_k)
    parts = _apart(g_tn, cos_td, d_k.shape[1])
    if not d_q.is_cuda:
        for one, target in zip((d_q, d_k), parts, strict=False):
            target.copy_(_plain(one, cos_td, sin_td, True))
        parts[2].copy_(d_v)
        return g_tn
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into((d_q, d_k, d_v), cos_td, sin_td, parts, back=True)
    return g_tn


@torch.library.register_fake(rotated_back)
def _(d_q, d_k, d_v, cos_td, sin_td):
    return _joint(d_q, d_k)


def _joint(d_q: torch.Tensor, d_k: torch.Tensor) -> torch.Tensor:
    return d_q.new_empty(d_q.shape[0], (d_q.shape[1] + 2 * d_k.shape[1]) * d_q.shape[2])


def _apart(y_tn: torch.Tensor, cos_td: torch.Tensor, key_heads: int) -> tuple[torch.Tensor, ...]:
    heads = y_tn.unflatten(1, (-1, cos_td.shape[1]))
    return heads.split([heads.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)


def _plain(x_thd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor, back: bool) -> torch.Tensor:
    first, second = x_thd.float().chunk(2, -1)
    cos_1, cos_2 = cos_td[:, None].float().chunk(2, -1)
    sin_1, sin_2 = sin_td[:, None].float().chunk(2, -1)
    if back:
        return torch.cat([first * cos_1 + second * sin_2, second * cos_2 - first * sin_1], -1)
    return torch.cat([first * cos_1 - second * sin_1, second * cos_2 + first * sin_2], -1)
