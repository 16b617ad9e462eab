"""The kernel of `kernels.rotary`: a program takes one token with all its heads.

Legend: H query heads, G key heads, D head dim.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 8


def rotate_into(
    parts: tuple[torch.Tensor, ...],
    cos_td: torch.Tensor,
    sin_td: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    *,
    back: bool,
) -> None:
    """`parts` are queries, keys and, where there is a third, values, which are only copied: [T, heads, D], as are the
    `targets`. (Quantizing the rows in the same pass took longer than in one of its own.)"""
    queries, keys = parts[:2]
    tokens, query_heads, size = queries.shape
    key_heads, value_heads = keys.shape[1], keys.shape[1] if len(parts) == 3 else 0
    parts, targets = ((*some, some[1])[:3] for some in (parts, targets))  # without values: any pointer
    assert all(one.stride(2) == 1 for one in (*parts, *targets))
    _rotate[(tokens,)](
        *parts,
        cos_td.contiguous(),
        sin_td.contiguous(),
        *targets,
        *(stride for one in (*parts, *targets) for stride in one.stride()[:2]),
        H=query_heads,
        G=key_heads,
        V=value_heads,
        D=size,
        HEADS=triton.next_power_of_2(query_heads + key_heads + value_heads),
        HALF=triton.next_power_of_2(size // 2),
        BACK=back,
        num_warps=WARPS,
    )


@triton.jit
def _rotate(
    q,
    k,
    v,
    cos,
    sin,
    q_out,
    k_out,
    v_out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    q_out_row,
    q_out_head,
    k_out_row,
    k_out_head,
    v_out_row,
    v_out_head,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, HALF)[None, :]
    is_place = place < D // 2
    is_q = (head < H) & is_place
    is_k = (head >= H) & (head < H + G) & is_place
    is_v = (head >= H + G) & (head < H + G + V) & is_place
    in_q = q + token * q_row + head * q_head + place
    in_k = k + token * k_row + (head - H) * k_head + place
    first = tl.load(in_q, mask=is_q, other=0.0) + tl.load(in_k, mask=is_k, other=0.0)
    second = tl.load(in_q + D // 2, mask=is_q, other=0.0) + tl.load(in_k + D // 2, mask=is_k, other=0.0)
    angle = token * D + tl.arange(0, HALF)
    is_angle = tl.arange(0, HALF) < D // 2
    cos_1 = tl.load(cos + angle, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angle + D // 2, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angle, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angle + D // 2, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    first, second = first.to(tl.float32), second.to(tl.float32)
    if BACK:
        new_first = first * cos_1 + second * sin_2
        new_second = second * cos_2 - first * sin_1
    else:
        new_first = first * cos_1 - second * sin_1
        new_second = second * cos_2 + first * sin_2
    if V > 0:
        in_v = v + token * v_row + (head - H - G) * v_head + place
        new_first += tl.load(in_v, mask=is_v, other=0.0).to(tl.float32)
        new_second += tl.load(in_v + D // 2, mask=is_v, other=0.0).to(tl.float32)
    dtype = q_out.dtype.element_ty
    out_q = q_out + token * q_out_row + head * q_out_head + place
    out_k = k_out + token * k_out_row + (head - H) * k_out_head + place
    tl.store(out_q, new_first.to(dtype), mask=is_q)
    tl.store(out_q + D // 2, new_second.to(dtype), mask=is_q)
    tl.store(out_k, new_first.to(dtype), mask=is_k)
    tl.store(out_k + D // 2, new_second.to(dtype), mask=is_k)
    if V > 0:
        out_v = v_out + token * v_out_row + (head - H - G) * v_out_head + place
        tl.store(out_v, new_first.to(dtype), mask=is_v)
        tl.store(out_v + D // 2, new_second.to(dtype), mask=is_v)
