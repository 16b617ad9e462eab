"""The kernel of `kernels.scan` that hands states on from chunk to chunk: a program takes some numbers of the state.

Legend: C chunks, G groups, N state size, R heads of a group, P head dim.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS, STAGES = 512, 4, 4


def hand_on_fused(states: torch.Tensor, decay_ch: torch.Tensor, *, backward: bool) -> torch.Tensor:
    """`kernels.scan.hand_on` in one pass."""
    states, decay_ch = states.contiguous(), decay_ch.contiguous()
    count, groups, size, width = states.shape
    heads = decay_ch.shape[1] // groups
    entering, numbers = torch.empty_like(states), groups * size * width
    _hand_on[(triton.cdiv(numbers, BLOCK),)](
        states,
        decay_ch,
        entering,
        count,
        numbers,
        OF_GROUP=size * width,
        WIDTH=width,
        HEADS=heads,
        GROUPS=groups,
        BACK=backward,
        BLOCK=BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return entering


@triton.jit
def _hand_on(
    states,
    decay,
    entering,
    count,
    numbers,
    OF_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < numbers
    head = place // OF_GROUP * HEADS + place % WIDTH // (WIDTH // HEADS)
    state = tl.zeros((BLOCK,), tl.float32)
    for step in range(count):
        chunk = step
        if BACK:
            chunk = count - 1 - step
        at = chunk.to(tl.int64) * numbers + place
        added = tl.load(states + at, mask=is_there, other=0.0).to(tl.float32)
        left = tl.load(decay + chunk * (HEADS * GROUPS) + head, mask=is_there, other=0.0)
        tl.store(entering + at, state.to(entering.dtype.element_ty), mask=is_there)
        state = state * left + added
