"""The kernel of `kernels.rotary`: a program takes one token with all its heads.

Legend: H query heads, G key heads, D head dim, R rotated values of a head.
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
    cos_tr: torch.Tensor,
    sin_tr: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    *,
    pairs: int,
    back: bool,
) -> None:
    """`parts` are queries, keys and, where there is a third, values, which are only copied: [T, heads, D], as are the
    `targets`. (Quantizing the rows in the same pass took longer than in one of its own.)"""
    queries, keys = parts[:2]
    tokens, query_heads, size = queries.shape
    turned = cos_tr.shape[1]
    assert turned % 2 == 0
    key_heads, value_heads = keys.shape[1], keys.shape[1] if len(parts) == 3 else 0
    parts, targets = ((*some, some[1])[:3] for some in (parts, targets))  # without values: any pointer
    assert all(one.stride(2) == 1 for one in (*parts, *targets))
    _rotate[(tokens,)](
        *parts,
        cos_tr.contiguous(),
        sin_tr.contiguous(),
        *targets,
        *(stride for one in (*parts, *targets) for stride in one.stride()[:2]),
        H=query_heads,
        G=key_heads,
        V=value_heads,
        D=size,
        R=turned,
        HEADS=triton.next_power_of_2(query_heads + key_heads + value_heads),
        HALF=triton.next_power_of_2(turned // 2),
        REST=triton.next_power_of_2(max(1, size - turned)),
        PAIRS=pairs,
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
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    is_q = head < H
    is_k = (head >= H) & (head < H + G)
    is_v = (head >= H + G) & (head < H + G + V)
    from_q, into_q = q + token * q_row + head * q_head, q_out + token * q_out_row + head * q_out_head
    from_k, into_k = k + token * k_row + (head - H) * k_head, k_out + token * k_out_row + (head - H) * k_out_head
    from_v, into_v = v, v_out
    if V > 0:
        from_v += token * v_row + (head - H - G) * v_head
        into_v += token * v_out_row + (head - H - G) * v_out_head
    dtype = q_out.dtype.element_ty

    number = tl.arange(0, HALF)
    is_pair = (number < R // 2)[None, :]
    if PAIRS == 0:  # of each pair, where its two values are, and their angles
        one, two = number, number + R // 2
    else:
        one, two = 2 * number, 2 * number + 1
    if PAIRS == 2:
        angle_1, angle_2 = number, number
    else:
        angle_1, angle_2 = one, two
    is_angle = number < R // 2
    cos_1 = tl.load(cos + token * R + angle_1, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + token * R + angle_2, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + token * R + angle_1, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + token * R + angle_2, mask=is_angle, other=0.0).to(tl.float32)[None, :]
    one, two = one[None, :], two[None, :]
    first = tl.load(from_q + one, mask=is_q & is_pair, other=0.0)
    first += tl.load(from_k + one, mask=is_k & is_pair, other=0.0)
    second = tl.load(from_q + two, mask=is_q & is_pair, other=0.0)
    second += tl.load(from_k + two, mask=is_k & is_pair, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if BACK:
        new_first = first * cos_1 + second * sin_2
        new_second = second * cos_2 - first * sin_1
    else:
        new_first = first * cos_1 - second * sin_1
        new_second = second * cos_2 + first * sin_2
    tl.store(into_q + one, new_first.to(dtype), mask=is_q & is_pair)
    tl.store(into_q + two, new_second.to(dtype), mask=is_q & is_pair)
    tl.store(into_k + one, new_first.to(dtype), mask=is_k & is_pair)
    tl.store(into_k + two, new_second.to(dtype), mask=is_k & is_pair)
    if V > 0:
        tl.store(into_v + one, tl.load(from_v + one, mask=is_v & is_pair), mask=is_v & is_pair)
        tl.store(into_v + two, tl.load(from_v + two, mask=is_v & is_pair), mask=is_v & is_pair)
    if D > R:
        rest = R + tl.arange(0, REST)[None, :]
        is_rest = rest < D
        tl.store(into_q + rest, tl.load(from_q + rest, mask=is_q & is_rest), mask=is_q & is_rest)
        tl.store(into_k + rest, tl.load(from_k + rest, mask=is_k & is_rest), mask=is_k & is_rest)
        if V > 0:
            tl.store(into_v + rest, tl.load(from_v + rest, mask=is_v & is_rest), mask=is_v & is_rest)
