"""Output head, cross-entropy and a divergence from a teacher together, a few rows at a time.

As `kernels.linear_cross_entropy` does it: only rows that are targets are computed, the gradient is taken while the
logits of a chunk are there (on a GPU by `kernels.distillation`), and those of student and teacher never exist as a
whole. The teacher's log-probabilities are those of the whole vocabulary, or of its likeliest tokens; all others are
then one class, on both sides, so that the divergence is that of K + 1 classes: no more than the one of all, and the
same where K is the vocabulary.

Gradients are written out. By the logits of its classes, divided by the temperature, that of a divergence is

    forward KL   q - p
    reverse KL   q (log q/p - D)
    JSD          q (log q/m - KL(q|m)) / 2,   m = (p + q) / 2

with the teacher's p and the student's q; a token of the rest has its share of the rest's.

Legend: T tokens, N target rows, C rows of a chunk, H hidden, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from tunesmith.kernels.linear_cross_entropy import (
    add_weight_gradient_,
    chunk_rows,
    head_logits,
    hidden_gradient,
    scaled_gradients,
)

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
MOST = 4096
"""Likeliest tokens that the kernel takes."""
LOWEST = -1e4
"""Of a log-probability; one of minus infinity times a probability of zero would be no number."""


class Taught(NamedTuple):
    """What a teacher says of some rows, at the temperature of the lesson."""

    logps: torch.Tensor
    """float32 [C, V]; or [C, K] of `ids_ck`, and in one column more that of all other tokens, where there are any"""
    ids_ck: torch.Tensor | None = None
    heat: float | None = None
    """Given where `logps` are logits [C, V] in any precision: they are divided by it, and normalised, as they are
    used."""

    @property
    def normalised(self) -> torch.Tensor:
        return self.logps if self.heat is None else torch.log_softmax(self.logps.float() / self.heat, -1)


@dataclass(frozen=True)
class Lesson:
    """What is to be learned from a teacher in a micro-batch."""

    taught: Callable[[int, int], Taught]
    """Of its target rows from one to before another."""
    divergence: Divergence
    temperature: float
    weight: float
    """Of the divergence; that of the cross-entropy is the rest."""
    vocabulary: int
    """Tokens that both models know: the first so many of each. Heads are often padded, to different sizes."""


def linear_distillation(
    hidden_th: torch.Tensor,
    weight_vh: torch.Tensor,
    labels_n: torch.Tensor,
    weights_n: torch.Tensor,
    rows_n: torch.Tensor,
    lesson: Lesson,
    *,
    bias_v: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of `weights_n` times the loss of the rows `rows_n`, and each row's two parts of it [N, 2] (no gradient): of
    the cross-entropy and of the divergence, weighted as they are summed. Logits are made as for
    `linear_cross_entropy`."""
    chunk = chunk or chunk_rows(hidden_th.device, weight_vh.shape[0], is_shared=True)
    return _LinearDistillation.apply(
        hidden_th, weight_vh, bias_v, labels_n, weights_n, rows_n, lesson, scale, softcap, chunk
    )


def distillation_by_module(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_th: torch.Tensor,
    labels_n: torch.Tensor,
    weights_n: torch.Tensor,
    rows_n: torch.Tensor,
    lesson: Lesson,
    *,
    scale: float,
    softcap: float | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a head that must be called, whose logits backward makes again."""

    def of(rows_ch: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        some = slice(start, start + rows_ch.shape[0])
        logits_cv = head(rows_ch).float() * scale
        if softcap is not None:
            logits_cv = torch.tanh(logits_cv / softcap) * softcap
        taught = lesson.taught(some.start, some.stop)
        return _OfLogits.apply(logits_cv, labels_n[some], weights_n[some], taught, lesson)

    total, parts = hidden_th.new_zeros((), dtype=torch.float32), []
    for start in range(0, rows_n.shape[0], chunk):
        rows_ch = hidden_th.index_select(0, rows_n[start : start + chunk])
        part, parts_c2 = checkpoint(of, rows_ch, start, use_reentrant=False)
        total = total + part
        parts.append(parts_c2)
    return total, torch.cat(parts) if parts else hidden_th.new_zeros((0, 2), dtype=torch.float32)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_th, weight_vh, bias_v, labels_n, weights_n, rows_n, lesson, scale, softcap, chunk):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        n = labels_n.shape[0]
        total = hidden_th.new_zeros((), dtype=torch.float32)
        parts_n2 = hidden_th.new_zeros((n, 2), dtype=torch.float32)
        d_hidden = torch.zeros_like(hidden_th) if needs_hidden else None
        d_weight = torch.zeros_like(weight_vh, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias_v, dtype=torch.float32) if needs_bias else None
        for start in range(0, n, chunk):
            some = slice(start, min(start + chunk, n))
            rows_ch = hidden_th.index_select(0, rows_n[some])
            logits_cv = head_logits(rows_ch, weight_vh, bias_v)
            taught = lesson.taught(some.start, some.stop)
            given = (logits_cv, labels_n[some], weights_n[some], taught, lesson)
            needs_gradient = needs_hidden or needs_weight or needs_bias
            parts_c2, d_logits_cv = weighted_losses_(*given, scale, softcap, needs_gradient=needs_gradient)
            parts_n2[some] = parts_c2
            total += (parts_c2.sum(-1) * weights_n[some]).sum()
            if not needs_gradient:
                continue
            if d_hidden is not None:
                d_hidden.index_copy_(0, rows_n[some], hidden_gradient(d_logits_cv, weight_vh))
            if d_weight is not None:
                add_weight_gradient_(d_weight, d_logits_cv, rows_ch)
            if d_bias is not None:
                d_bias += d_logits_cv.float().sum(0)
            del logits_cv, taught, given, d_logits_cv  # before the next chunk is made
        ctx.gradients = (d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden_th.dtype, weight_vh.dtype, bias_v.dtype if bias_v is not None else None)
        ctx.mark_non_differentiable(parts_n2)
        return total, parts_n2

    @staticmethod
    def backward(ctx, d_total, _):
        return *scaled_gradients(ctx, d_total), *[None] * 7


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_cv, labels_c, weights_c, taught, lesson):
        given = (logits_cv.clone() if logits_cv.is_cuda else logits_cv, labels_c, weights_c, taught, lesson)
        parts_c2, d_logits_cv = weighted_losses_(*given, 1.0, None)
        ctx.save_for_backward(d_logits_cv)
        ctx.mark_non_differentiable(parts_c2)
        return (parts_c2.sum(-1) * weights_c).sum(), parts_c2

    @staticmethod
    def backward(ctx, d_total, _):
        return ctx.saved_tensors[0] * d_total, None, None, None, None


def weighted_losses_(
    logits_cv: torch.Tensor,
    labels_c: torch.Tensor,
    weights_c: torch.Tensor,
    taught: Taught,
    lesson: Lesson,
    scale: float,
    softcap: float | None,
    *,
    needs_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of each row's loss [C, 2], and the gradient of their weighted sum by the raw logits, in their
    precision. On a GPU by a kernel, which writes it over them."""
    if logits_cv.is_cuda and (taught.ids_ck is None or taught.ids_ck.shape[1] <= MOST):
        from tunesmith.kernels import distillation

        settings = (lesson.divergence, lesson.temperature, lesson.weight, lesson.vocabulary)
        form, given = distillation.Form(*settings, scale, softcap), (logits_cv, labels_c, weights_c, taught.logps)
        if taught.ids_ck is None:
            parts_c2 = distillation.of_all_(*given, taught.heat or 1.0, form, needs_gradient=needs_gradient)
        else:
            parts_c2 = distillation.of_likeliest_(*given, taught.ids_ck, form, needs_gradient=needs_gradient)
        return parts_c2, logits_cv
    raw_dtype = logits_cv.dtype
    logits_cv = logits_cv.float() * scale
    if softcap is not None:
        logits_cv = torch.tanh(logits_cv.div_(softcap)).mul_(softcap)
    parts_c2, d_logits_cv = losses_of_logits(logits_cv, labels_c, taught, lesson)
    if needs_gradient:
        d_logits_cv *= (weights_c * scale)[:, None]
        if softcap is not None:
            d_logits_cv *= 1 - (logits_cv / softcap) ** 2
    return parts_c2, d_logits_cv.to(raw_dtype)


def losses_of_logits(
    logits_cv: torch.Tensor, labels_c: torch.Tensor, taught: Taught, lesson: Lesson
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of each row's loss [C, 2], and the gradient of their sum by its logits [C, V], in fp32."""
    heat, weight = lesson.temperature, lesson.weight
    own_logps_cv = torch.log_softmax(logits_cv, -1)
    own_c = -own_logps_cv.gather(1, labels_c[:, None]).squeeze(1)
    is_same = heat == 1.0 and lesson.vocabulary == logits_cv.shape[1]
    common_cv = logits_cv[:, : lesson.vocabulary]
    logps_cv = own_logps_cv if is_same else torch.log_softmax(common_cv / heat, -1)
    if taught.ids_ck is None:
        divergence_c, d_common_cv = divergence_of(logps_cv, taught.normalised, lesson.divergence)
    else:
        divergence_c, d_common_cv = _of_likeliest(logps_cv, taught.logps, taught.ids_ck, lesson.divergence)
    d_logits_cv = own_logps_cv.exp_()
    d_logits_cv.scatter_add_(1, labels_c[:, None], torch.full_like(own_c, -1.0)[:, None])
    d_logits_cv *= 1 - weight
    d_logits_cv[:, : lesson.vocabulary].add_(d_common_cv, alpha=weight * heat)
    return torch.stack([(1 - weight) * own_c, weight * heat**2 * divergence_c], -1), d_logits_cv


def _of_likeliest(
    logps_cv: torch.Tensor, teacher: torch.Tensor, ids_ck: torch.Tensor, kind: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of the likeliest tokens and the rest, and its gradient by the logits of all."""
    likeliest_ck = logps_cv.gather(1, ids_ck)
    if teacher.shape[1] == ids_ck.shape[1]:  # there is no rest
        divergence_c, d_ck = divergence_of(likeliest_ck, teacher, kind)
        return divergence_c, torch.zeros_like(logps_cv).scatter_(1, ids_ck, d_ck)
    rest_c1 = rest_of(logps_cv, ids_ck)
    divergence_c, d_classes = divergence_of(torch.cat([likeliest_ck, rest_c1], 1), teacher, kind)
    d_cv = (logps_cv - rest_c1).exp_().mul_(d_classes[:, -1:])
    return divergence_c, d_cv.scatter_(1, ids_ck, d_classes[:, :-1])


def rest_of(logps_cv: torch.Tensor, ids_ck: torch.Tensor) -> torch.Tensor:
    """The log-probability of all other tokens together, [C, 1]: not from 1 minus a sum, which would be rounded off."""
    return logps_cv.scatter(1, ids_ck, -math.inf).logsumexp(-1, keepdim=True)


def divergence_of(student: torch.Tensor, teacher: torch.Tensor, kind: Divergence) -> tuple[torch.Tensor, torch.Tensor]:
    """From log-probabilities of the same classes, the divergence of each row, and its gradient by the student's
    logits."""
    teacher = teacher.clamp(min=LOWEST)
    q, p = student.exp(), teacher.exp()
    if kind == "forward_kl":
        divergence_c = (p * (teacher - student)).sum(-1)
        return divergence_c, q.sub_(p)
    if kind == "reverse_kl":
        ratio = student - teacher
        divergence_c = (q * ratio).sum(-1)
        return divergence_c, ratio.sub_(divergence_c[:, None]).mul_(q)
    mean = torch.logaddexp(student, teacher) - math.log(2)
    ratio = student - mean
    to_mean_c = (q * ratio).sum(-1)
    divergence_c = ((p * (teacher - mean)).sum(-1) + to_mean_c) / 2
    return divergence_c, ratio.sub_(to_mean_c[:, None]).mul_(q).div_(2)
