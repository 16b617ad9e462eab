"""Rotary positions of queries and keys, and values copied beside them, in one pass; backward too.

The compiler needs three times as long for the gradient, which it gathers piece by piece (docs/lab.md). Two values of a
head make a pair: `(first * cos - second * sin, second * cos + first * sin)`. Which two, and which angles are theirs, is
one of the `PAIRS`. Where angles are given for fewer values than a head has, the rest of the head is copied.

Legend: T tokens, H query heads, G key heads, D head dim, R rotated values of a head, N = (H + 2 G) D.
"""

from __future__ import annotations

import torch

from tunesmith.kernels.operator import operator

HALVES, NEIGHBOURS, NEIGHBOURS_FIRST_ANGLES = PAIRS = (0, 1, 2)
"""The first half of the rotated values against the second, as in Llama and its descendants; each value and its
neighbour (Cohere); neighbours again, whose angles stand in the first half alone (GLM)."""


def rotate_pair(
    q_thd: torch.Tensor, k_tgd: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, pairs: int = HALVES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of separate linears."""
    return _RotatePair.apply(q_thd, k_tgd, cos_tr, sin_tr, pairs)


def rotate_joint(
    y_tn: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, key_heads: int, head_dim: int, pairs: int = HALVES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one linear, apart. None of them keeps its product alive."""
    return _RotateJoint.apply(y_tn, cos_tr, sin_tr, key_heads, head_dim, pairs)


class _RotatePair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_thd, k_tgd, cos_tr, sin_tr, pairs):
        ctx.save_for_backward(cos_tr, sin_tr)
        ctx.pairs = pairs
        return rotated(q_thd, k_tgd, cos_tr, sin_tr, pairs, False)

    @staticmethod
    def backward(ctx, d_q, d_k):
        return *rotated(d_q, d_k, *ctx.saved_tensors, ctx.pairs, True), None, None, None


class _RotateJoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_tn, cos_tr, sin_tr, key_heads, head_dim, pairs):
        ctx.save_for_backward(cos_tr, sin_tr)
        ctx.pairs = pairs
        return rotated_apart(y_tn, cos_tr, sin_tr, key_heads, head_dim, pairs)

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):
        return rotated_back(d_q, d_k, d_v, *ctx.saved_tensors, ctx.pairs), *[None] * 5


def _room_for(one: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(one, memory_format=torch.contiguous_format)


@operator("rotated")
def rotated(
    q_thd: torch.Tensor, k_tgd: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, pairs: int, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated, forward or `back`: the gradient's way."""
    found = _room_for(q_thd), _room_for(k_tgd)
    if not q_thd.is_cuda:
        for one, target in zip((q_thd, k_tgd), found, strict=True):
            target.copy_(_plain(one, cos_tr, sin_tr, pairs, back))
        return found
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into((q_thd, k_tgd), cos_tr, sin_tr, found, pairs=pairs, back=back)
    return found


@torch.library.register_fake(rotated)
def _(q_thd, k_tgd, cos_tr, sin_tr, pairs, back):
    return q_thd.new_empty(q_thd.shape), k_tgd.new_empty(k_tgd.shape)


@operator("rotated_apart")
def rotated_apart(
    y_tn: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, key_heads: int, head_dim: int, pairs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a joint product: queries and keys, rotated, and values. None of them keeps the product alive."""
    parts = _apart(y_tn, key_heads, head_dim)
    q, k, v = parts
    found = _room_for(q), _room_for(k), _room_for(v)
    if not y_tn.is_cuda:
        for one, target in zip(parts[:2], found, strict=False):
            target.copy_(_plain(one, cos_tr, sin_tr, pairs, False))
        found[2].copy_(parts[2])
        return found
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into(parts, cos_tr, sin_tr, found, pairs=pairs, back=False)
    return found


@torch.library.register_fake(rotated_apart)
def _(y_tn, cos_tr, sin_tr, key_heads, head_dim, pairs):
    return tuple(y_tn.new_empty(one.shape) for one in _apart(y_tn, key_heads, head_dim))


@operator("rotated_back")
def rotated_back(
    d_q: torch.Tensor, d_k: torch.Tensor, d_v: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, pairs: int
) -> torch.Tensor:
    """The gradient of the joint product [T, N]."""
    g_tn = _joint(d_q, d_k)
    parts = _apart(g_tn, d_k.shape[1], d_k.shape[2])
    if not d_q.is_cuda:
        for one, target in zip((d_q, d_k), parts, strict=False):
            target.copy_(_plain(one, cos_tr, sin_tr, pairs, True))
        parts[2].copy_(d_v)
        return g_tn
    from tunesmith.kernels.rotary_fused import rotate_into

    rotate_into((d_q, d_k, d_v), cos_tr, sin_tr, parts, pairs=pairs, back=True)
    return g_tn


@torch.library.register_fake(rotated_back)
def _(d_q, d_k, d_v, cos_tr, sin_tr, pairs):
    return _joint(d_q, d_k)


def _joint(d_q: torch.Tensor, d_k: torch.Tensor) -> torch.Tensor:
    return d_q.new_empty(d_q.shape[0], (d_q.shape[1] + 2 * d_k.shape[1]) * d_q.shape[2])


def _apart(y_tn: torch.Tensor, key_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    heads = y_tn.unflatten(1, (-1, head_dim))
    return heads.split([heads.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)


def _plain(x_thd: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, pairs: int, back: bool) -> torch.Tensor:
    size = cos_tr.shape[1]
    first, second = _members(x_thd[..., :size].float(), pairs)
    (cos_1, cos_2), (sin_1, sin_2) = (_angles(one[:, None].float(), pairs) for one in (cos_tr, sin_tr))
    if back:
        made = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        made = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    turned = torch.cat(made, -1) if pairs == HALVES else torch.stack(made, -1).flatten(-2)
    return torch.cat([turned, x_thd[..., size:].float()], -1)


def _angles(angles_t1r: torch.Tensor, pairs: int) -> tuple[torch.Tensor, ...]:
    if pairs == NEIGHBOURS_FIRST_ANGLES:
        return (angles_t1r.chunk(2, -1)[0],) * 2
    return _members(angles_t1r, pairs)


def _members(x: torch.Tensor, pairs: int) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, -1) if pairs == HALVES else (x[..., 0::2], x[..., 1::2])
