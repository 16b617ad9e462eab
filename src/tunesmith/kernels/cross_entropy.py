"""Cross-entropy of rows of logits and its gradient, written over the logits or in fp8.

One program a row: a first pass finds the largest logit and the sum of exponentials, a second writes the gradient. The
logits are read twice and written once, in their own precision; nothing else of their size exists. In fp8 the label's
part of the gradient stays apart.

Legend: C rows, V vocabulary, W its width in fp8; `8` marks fp8 values.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
LOWEST = -1e30
"""Below every logit, and unlike minus infinity a number to subtract from."""
LARGEST = 448.0
PADDED = 16
"""Values between rows are padding if they are fewer."""


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
    of the weighted sum by the raw logits. Fewer than 16 values between two rows are padding, and become zeros.

    `scale` and `softcap` are applied to the raw logits first, and `z_loss` adds to the gradient, as in
    `kernels.linear_cross_entropy`.
    """
    losses_c, log_totals_c = torch.empty(2, logits_cv.shape[0], dtype=torch.float32, device=logits_cv.device).unbind()
    results = (losses_c, log_totals_c, losses_c, losses_c)
    _run(logits_cv, labels_c, weights_c, None, results, scale, softcap, z_loss, needs_gradient)
    return losses_c, log_totals_c


def cross_entropy_fp8(
    logits_cv: torch.Tensor,
    labels_c: torch.Tensor,
    weights_c: torch.Tensor,
    values8_cw: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same losses and logarithms; then, of the gradient, the scale of each row of `values8_cw`, which are written
    here, and the label's own entry, 0 among those: [C, 1] each, in fp32. What W has more than V is filled with zeros.

    The largest value of a row is the format's largest, or less than that where logits are soft-capped.
    """
    rows, device = logits_cv.shape[0], logits_cv.device
    losses_c, log_totals_c, owns_c = torch.empty(3, rows, dtype=torch.float32, device=device).unbind()
    scale_c1 = torch.empty(rows, 1, dtype=torch.float32, device=device)  # apart: fp8 matmuls want it aligned
    results = (losses_c, log_totals_c, scale_c1, owns_c)
    _run(logits_cv, labels_c, weights_c, values8_cw, results, scale, softcap, z_loss, True)
    return losses_c, log_totals_c, scale_c1, owns_c[:, None]


def _run(logits_cv, labels_c, weights_c, values8_cw, results, scale, softcap, z_loss, needs_gradient) -> None:
    assert logits_cv.stride(1) == 1
    rows, vocabulary = logits_cv.shape
    if not rows:
        return
    stride = logits_cv.stride(0)
    places = stride if vocabulary <= stride < vocabulary + PADDED else vocabulary
    block = min(BLOCK, triton.next_power_of_2(places))
    _row[(rows,)](
        logits_cv,
        stride,
        labels_c,
        weights_c,
        *results,
        logits_cv if values8_cw is None else values8_cw,
        vocabulary,
        places,
        places if values8_cw is None else values8_cw.shape[1],
        scale,
        softcap if softcap is not None else 1.0,
        z_loss,
        HAS_SOFTCAP=softcap is not None,
        NEEDS_GRADIENT=needs_gradient,
        IN_FP8=values8_cw is not None,
        LARGEST=LARGEST,
        LOWEST=LOWEST,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )


@triton.jit
def _row(
    logits,
    stride,
    labels,
    weights,
    losses,
    log_totals,
    scales,
    owns,
    values8,
    vocabulary,
    places,
    width,
    scale,
    softcap,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    IN_FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row).to(tl.int32)
    offsets = tl.arange(0, BLOCK)
    own = tl.load(start + label).to(tl.float32) * scale
    slope = 1.0
    if HAS_SOFTCAP:
        own_capped = _tanh(own / softcap)
        own = softcap * own_capped
        slope = 1.0 - own_capped * own_capped
    # Sums stay apart until the end: bringing them together in each block would take longer than all else. In fp8 the
    # label is not among them.
    largest = LOWEST
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + offsets
        z = tl.load(start + column, mask=column < places, other=0.0).to(tl.float32) * scale
        if HAS_SOFTCAP:
            z = softcap * _tanh(z / softcap)
        z = tl.where(column < vocabulary, z, float("-inf"))  # places as a mask: others would go value by value
        if IN_FP8:  # not as a mask of the load, which would then go value by value
            z = tl.where(column == label, float("-inf"), z)
        new_largest = tl.maximum(largest, tl.max(z, 0))
        totals = totals * tl.exp(largest - new_largest) + tl.exp(z - new_largest)
        largest = new_largest
    total = tl.sum(totals, 0)
    largest_other = largest
    if IN_FP8:
        largest = tl.maximum(largest_other, own)
        total = total * tl.exp(largest_other - largest) + tl.exp(own - largest)
    log_total = largest + tl.log(total)
    tl.store(losses + row, log_total - own)
    tl.store(log_totals + row, log_total)
    weight = tl.load(weights + row) * scale
    more = 1.0 + 2.0 * z_loss * log_total
    if IN_FP8:
        tl.store(scales + row, tl.exp(largest_other - log_total) / LARGEST * more * weight)
        tl.store(owns + row, (tl.exp(own - log_total) * more - 1.0) * slope * weight)
        for first in range(0, width, BLOCK):
            column = first + offsets
            z = tl.load(start + column, mask=column < places, other=0.0).to(tl.float32) * scale
            if HAS_SOFTCAP:
                capped = _tanh(z / softcap)
                value = tl.exp(softcap * capped - largest_other) * (1.0 - capped * capped)
            else:
                value = tl.exp(z - largest_other)
            value = tl.where((column < vocabulary) & (column != label), value * LARGEST, 0.0)
            tl.store(values8 + row * width + column, value.to(values8.dtype.element_ty), mask=column < width)
    elif NEEDS_GRADIENT:
        for first in range(0, vocabulary, BLOCK):
            column = first + offsets
            z = tl.load(start + column, mask=column < places, other=0.0).to(tl.float32) * scale
            if HAS_SOFTCAP:
                capped = _tanh(z / softcap)
                gradient = tl.exp(softcap * capped - log_total) * more
                gradient = tl.where(column == label, gradient - 1.0, gradient) * (1.0 - capped * capped)
            else:
                gradient = tl.exp(z - log_total) * more
                gradient = tl.where(column == label, gradient - 1.0, gradient)
            gradient = tl.where(column < vocabulary, gradient * weight, 0.0)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < places)


@triton.jit
def _tanh(x):
    # by exp, which every backend has; exact at both ends
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
