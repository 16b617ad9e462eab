"""Cross-entropy of rows of logits and its gradient, the gradient written over the logits.

One program a row: a first pass finds the largest logit and the sum of exponentials, a second writes the gradient. The
logits are read twice and written once, in their own precision; nothing else of their size exists.

Legend: C rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192


def cross_entropy_(
    logits_cv: torch.Tensor,
    labels_c: torch.Tensor,
    weights_c: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    needs_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row and the logarithm of its sum of exponentials, [C] in fp32; `logits_cv` becomes the gradient
    of the weighted sum by the raw logits.

    `scale` and `softcap` are applied to the raw logits first, and `z_loss` adds to the gradient, as in
    `kernels.linear_cross_entropy`.
    """
    assert logits_cv.stride(1) == 1
    rows, vocabulary = logits_cv.shape
    losses_c, log_totals_c = torch.empty(2, rows, dtype=torch.float32, device=logits_cv.device).unbind()
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        _row[(rows,)](
            logits_cv,
            logits_cv.stride(0),
            labels_c,
            weights_c,
            losses_c,
            log_totals_c,
            vocabulary,
            scale,
            softcap if softcap is not None else 1.0,
            z_loss,
            HAS_SOFTCAP=softcap is not None,
            NEEDS_GRADIENT=needs_gradient,
            BLOCK=block,
            num_warps=8 if block >= 4096 else 4,
        )
    return losses_c, log_totals_c


@triton.jit
def _row(
    logits,
    stride,
    labels,
    weights,
    losses,
    log_totals,
    vocabulary,
    scale,
    softcap,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row)
    offsets = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        inside = first + offsets < vocabulary
        z = tl.load(start + first + offsets, mask=inside, other=float("-inf")).to(tl.float32) * scale
        if HAS_SOFTCAP:
            z = tl.where(inside, softcap * _tanh(z / softcap), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest), 0)
        largest = new_largest
    log_total = largest + tl.log(total)
    own = tl.load(start + label).to(tl.float32) * scale
    if HAS_SOFTCAP:
        own = softcap * _tanh(own / softcap)
    tl.store(losses + row, log_total - own)
    tl.store(log_totals + row, log_total)
    if NEEDS_GRADIENT:
        weight = tl.load(weights + row) * scale
        more = 1.0 + 2.0 * z_loss * log_total
        for first in range(0, vocabulary, BLOCK):
            column = first + offsets
            inside = column < vocabulary
            z = tl.load(start + column, mask=inside, other=0.0).to(tl.float32) * scale
            if HAS_SOFTCAP:
                capped = _tanh(z / softcap)
                gradient = tl.exp(softcap * capped - log_total) * more
                gradient = tl.where(column == label, gradient - 1.0, gradient) * (1.0 - capped * capped)
            else:
                gradient = tl.exp(z - log_total) * more
                gradient = tl.where(column == label, gradient - 1.0, gradient)
            tl.store(start + column, (gradient * weight).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    # by exp, which every backend has; exact at both ends
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
