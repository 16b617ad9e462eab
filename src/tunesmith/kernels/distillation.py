"""Cross-entropy and a divergence from a teacher, of rows of logits, with the gradient written over them: the kernels of
`kernels.linear_distillation`, whose plain version has the formulas.

One program a row, three times over its logits: the sums of exponentials, the divergence, the gradient. Student and
teacher are read in their own precision, and nothing else of their size exists. Of likeliest tokens the caller takes the
student's logits out of the row first (they are minus infinity there), so that the sum over all others is one of them
alone; their gradient is given apart.

Legend: C rows, V vocabulary, K likeliest tokens. Kinds of a divergence: 0 forward KL, 1 reverse KL, 2 JSD.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tunesmith.kernels.cross_entropy import _tanh

BLOCK = 4096
LOWEST = -1e30
"""Below every logit, and unlike minus infinity a number to subtract from."""
LEAST = -1e4
"""Of a teacher's log-probability: one of minus infinity times a probability of zero would be no number."""
TINY = tl.constexpr(1e-37)
"""Of the mean of two probabilities, whose logarithm is taken."""
KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


@dataclass(frozen=True)
class Form:
    """How logits become a loss."""

    divergence: str
    temperature: float
    weight: float
    vocabulary: int
    scale: float = 1.0
    softcap: float | None = None


def of_all_(
    logits_cv: torch.Tensor,
    labels_c: torch.Tensor,
    weights_c: torch.Tensor,
    teacher_cv: torch.Tensor,
    teacher_heat: float,
    form: Form,
    *,
    needs_gradient: bool = True,
) -> torch.Tensor:
    """Both parts of each row's loss [C, 2]; `logits_cv` become the gradient of the weighted sum by the raw logits.
    The teacher's scores are divided by `teacher_heat` and normalised here."""
    assert logits_cv.stride(1) == 1 == teacher_cv.stride(1)
    parts_c2 = torch.empty(logits_cv.shape[0], 2, dtype=torch.float32, device=logits_cv.device)
    block = min(BLOCK, triton.next_power_of_2(logits_cv.shape[1]))
    if logits_cv.shape[0]:
        _all_row[(logits_cv.shape[0],)](
            *(logits_cv, logits_cv.stride(0), teacher_cv, teacher_cv.stride(0), labels_c, weights_c, parts_c2),
            *_numbers(logits_cv, form),
            1.0 / teacher_heat,
            **_constants(form, needs_gradient, block, logits_cv.shape[1]),
        )
    return parts_c2


def of_likeliest_(
    logits_cv: torch.Tensor,
    labels_c: torch.Tensor,
    weights_c: torch.Tensor,
    teacher: torch.Tensor,
    ids_ck: torch.Tensor,
    form: Form,
    *,
    needs_gradient: bool = True,
) -> torch.Tensor:
    """The same from log-probabilities of `ids_ck`, and in one column more that of all other tokens, where there are
    any. Without a gradient `logits_cv` are left without those of `ids_ck`."""
    assert logits_cv.stride(1) == 1 == teacher.stride(1)
    rows, count = ids_ck.shape
    parts_c2 = torch.empty(rows, 2, dtype=torch.float32, device=logits_cv.device)
    if not rows:
        return parts_c2
    owns_c = logits_cv.gather(1, labels_c[:, None]).squeeze(1)
    likely_ck = logits_cv.gather(1, ids_ck)
    logits_cv.scatter_(1, ids_ck, -math.inf)
    block = min(BLOCK, triton.next_power_of_2(logits_cv.shape[1]))
    _likeliest_row[(rows,)](
        *(logits_cv, logits_cv.stride(0), owns_c, likely_ck, ids_ck.contiguous(), teacher, teacher.stride(0)),
        *(labels_c, weights_c, parts_c2),
        *_numbers(logits_cv, form),
        count,
        HAS_REST=teacher.shape[1] > count,
        BLOCK_K=triton.next_power_of_2(count),
        **_constants(form, needs_gradient, block, logits_cv.shape[1]),
    )
    if needs_gradient:
        logits_cv.scatter_(1, ids_ck, likely_ck)  # by now their gradient
    return parts_c2


def _numbers(logits_cv: torch.Tensor, form: Form) -> tuple[float, ...]:
    softcap = 1.0 if form.softcap is None else form.softcap
    return logits_cv.shape[1], form.vocabulary, form.scale, softcap, form.temperature, form.weight


def _constants(form: Form, needs_gradient: bool, block: int, width: int) -> dict[str, object]:
    return {
        "KIND": KINDS[form.divergence],
        "HAS_SOFTCAP": form.softcap is not None,
        "IS_SAME": form.temperature == 1.0 and form.vocabulary == width,
        "NEEDS_GRADIENT": needs_gradient,
        "LOWEST": LOWEST,
        "LEAST": LEAST,
        "BLOCK": block,
        "num_warps": 8 if block >= 4096 else 4,
    }


@triton.jit
def _logit(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logit of a raw one. One that is minus infinity stays so."""
    z = raw * scale
    if HAS_SOFTCAP:
        z = tl.where(raw == float("-inf"), raw, softcap * _tanh(z / softcap))
    return z


@triton.jit
def _by_raw(gradient, z, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """A gradient by logits, by the raw ones."""
    gradient *= scale
    if HAS_SOFTCAP:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    return gradient


@triton.jit
def _added(largest, totals, z):
    """A running sum of exponentials, with a block more: exp(z - largest) for each place."""
    new_largest = tl.maximum(largest, tl.max(z, 0))
    return new_largest, totals * tl.exp(largest - new_largest) + tl.exp(z - new_largest)


@triton.jit
def _terms(student, teacher, KIND: tl.constexpr):
    """From log-probabilities of classes: what the divergence sums, and what the gradient subtracts the sum of."""
    q, p = tl.exp(student), tl.exp(teacher)
    if KIND == 0:
        summed = tl.where(p > 0.0, p * (teacher - student), 0.0)
        inner = summed
    elif KIND == 1:
        summed = tl.where(q > 0.0, q * (student - teacher), 0.0)
        inner = summed
    else:
        mean = tl.log(tl.maximum((q + p) * 0.5, TINY))
        inner = tl.where(q > 0.0, q * (student - mean), 0.0)
        summed = (tl.where(p > 0.0, p * (teacher - mean), 0.0) + inner) * 0.5
    return summed, inner


@triton.jit
def _slope_of(student, teacher, inner_sum, KIND: tl.constexpr):
    """The divergence's gradient by the student's logits of these classes, divided by the temperature."""
    q, p = tl.exp(student), tl.exp(teacher)
    if KIND == 0:
        found = q - p
    elif KIND == 1:
        found = tl.where(q > 0.0, q * (student - teacher - inner_sum), 0.0)
    else:
        found = tl.where(q > 0.0, q * (student - tl.log(tl.maximum((q + p) * 0.5, TINY)) - inner_sum), 0.0) * 0.5
    return found


@triton.jit
def _all_row(
    logits,
    stride,
    teacher,
    teacher_stride,
    labels,
    weights,
    parts,
    width,
    vocabulary,
    scale,
    softcap,
    heat,
    share,
    teacher_scale,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SAME: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    LOWEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, taught = logits + row * stride, teacher + row * teacher_stride
    label = tl.load(labels + row).to(tl.int32)
    offsets = tl.arange(0, BLOCK)
    own = _logit(tl.load(start + label).to(tl.float32), scale, softcap, HAS_SOFTCAP)
    own_largest, warm_largest, taught_largest = LOWEST, LOWEST, LOWEST
    own_totals = tl.zeros((BLOCK,), dtype=tl.float32)
    warm_totals = tl.zeros((BLOCK,), dtype=tl.float32)
    taught_totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + offsets
        common = column < vocabulary
        raw = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
        z = _logit(raw, scale, softcap, HAS_SOFTCAP)
        own_largest, own_totals = _added(own_largest, own_totals, z)
        if not IS_SAME:
            warm_largest, warm_totals = _added(warm_largest, warm_totals, tl.where(common, z / heat, float("-inf")))
        t = tl.load(taught + column, mask=common, other=float("-inf")).to(tl.float32) * teacher_scale
        taught_largest, taught_totals = _added(taught_largest, taught_totals, t)
    own_total = own_largest + tl.log(tl.sum(own_totals, 0))
    warm_total = own_total
    if not IS_SAME:
        warm_total = warm_largest + tl.log(tl.sum(warm_totals, 0))
    taught_total = taught_largest + tl.log(tl.sum(taught_totals, 0))
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    inner = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + offsets
        common = column < vocabulary
        raw = tl.load(start + column, mask=common, other=float("-inf")).to(tl.float32)
        z = _logit(raw, scale, softcap, HAS_SOFTCAP)
        t = tl.load(taught + column, mask=common, other=float("-inf")).to(tl.float32) * teacher_scale
        some, some_inner = _terms(z / heat - warm_total, tl.maximum(t - taught_total, LEAST), KIND)
        summed += tl.where(common, some, 0.0)
        inner += tl.where(common, some_inner, 0.0)
    divergence = tl.sum(summed, 0)
    inner_sum = tl.sum(inner, 0)
    tl.store(parts + 2 * row, (1.0 - share) * (own_total - own))
    tl.store(parts + 2 * row + 1, share * heat * heat * divergence)
    if NEEDS_GRADIENT:
        weight = tl.load(weights + row)
        for first in range(0, width, BLOCK):
            column = first + offsets
            common = column < vocabulary
            raw = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
            z = _logit(raw, scale, softcap, HAS_SOFTCAP)
            t = tl.load(taught + column, mask=common, other=float("-inf")).to(tl.float32) * teacher_scale
            gradient = (tl.exp(z - own_total) - tl.where(column == label, 1.0, 0.0)) * (1.0 - share)
            drawn = _slope_of(z / heat - warm_total, tl.maximum(t - taught_total, LEAST), inner_sum, KIND)
            gradient += tl.where(common, drawn, 0.0) * (share * heat)
            gradient = _by_raw(gradient * weight, z, scale, softcap, HAS_SOFTCAP)
            gradient = tl.where(raw == float("-inf"), 0.0, gradient)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < width)


@triton.jit
def _likeliest_row(
    logits,
    stride,
    owns,
    likely,
    ids,
    teacher,
    teacher_stride,
    labels,
    weights,
    parts,
    width,
    vocabulary,
    scale,
    softcap,
    heat,
    share,
    count,
    HAS_REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SAME: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    LOWEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row).to(tl.int32)
    offsets, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    is_class = place < count
    own = _logit(tl.load(owns + row).to(tl.float32), scale, softcap, HAS_SOFTCAP)
    raw_k = tl.load(likely + row * count + place, mask=is_class, other=float("-inf")).to(tl.float32)
    z_k = _logit(raw_k, scale, softcap, HAS_SOFTCAP)
    own_largest = tl.maximum(tl.max(z_k, 0), LOWEST)
    own_of_k = tl.sum(tl.exp(z_k - own_largest), 0)
    own_totals = tl.zeros((BLOCK,), dtype=tl.float32)
    rest_largest = LOWEST
    rest_totals = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + offsets
        raw = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
        z = _logit(raw, scale, softcap, HAS_SOFTCAP)
        before = own_largest
        own_largest, own_totals = _added(own_largest, own_totals, z)
        own_of_k *= tl.exp(before - own_largest)
        warm = tl.where(column < vocabulary, z / heat, float("-inf"))
        rest_largest, rest_totals = _added(rest_largest, rest_totals, warm)
    own_total = own_largest + tl.log(tl.sum(own_totals, 0) + own_of_k)
    rest = rest_largest + tl.log(tl.sum(rest_totals, 0))  # minus infinity where there is none
    warm_largest = tl.maximum(tl.max(z_k, 0) / heat, rest)
    warm_total = warm_largest + tl.log(tl.sum(tl.exp(z_k / heat - warm_largest), 0) + tl.exp(rest - warm_largest))
    student_k, student_rest = z_k / heat - warm_total, rest - warm_total
    taught = teacher + row * teacher_stride
    teacher_k = tl.maximum(tl.load(taught + place, mask=is_class, other=LEAST).to(tl.float32), LEAST)
    summed_k, inner_k = _terms(student_k, teacher_k, KIND)
    divergence = tl.sum(tl.where(is_class, summed_k, 0.0), 0)
    inner_sum = tl.sum(tl.where(is_class, inner_k, 0.0), 0)
    slope_rest = 0.0
    if HAS_REST:
        teacher_rest = tl.maximum(tl.load(taught + count).to(tl.float32), LEAST)
        summed_rest, inner_rest = _terms(student_rest, teacher_rest, KIND)
        divergence += summed_rest
        inner_sum += inner_rest
        slope_rest = _slope_of(student_rest, teacher_rest, inner_sum, KIND)
    tl.store(parts + 2 * row, (1.0 - share) * (own_total - own))
    tl.store(parts + 2 * row + 1, share * heat * heat * divergence)
    if NEEDS_GRADIENT:
        weight = tl.load(weights + row)
        id_k = tl.load(ids + row * count + place, mask=is_class, other=-1)
        gradient_k = (tl.exp(z_k - own_total) - tl.where(id_k == label, 1.0, 0.0)) * (1.0 - share)
        gradient_k += _slope_of(student_k, teacher_k, inner_sum, KIND) * (share * heat)
        gradient_k = _by_raw(gradient_k * weight, z_k, scale, softcap, HAS_SOFTCAP)
        tl.store(likely + row * count + place, gradient_k.to(logits.dtype.element_ty), mask=is_class)
        for first in range(0, width, BLOCK):
            column = first + offsets
            raw = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
            z = _logit(raw, scale, softcap, HAS_SOFTCAP)
            gradient = (tl.exp(z - own_total) - tl.where(column == label, 1.0, 0.0)) * (1.0 - share)
            if HAS_REST:
                drawn = tl.exp(z / heat - rest) * slope_rest * (share * heat)
                gradient += tl.where(column < vocabulary, drawn, 0.0)
            gradient = _by_raw(gradient * weight, z, scale, softcap, HAS_SOFTCAP)
            gradient = tl.where(raw == float("-inf"), 0.0, gradient)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < width)
