"""Output head and cross-entropy together, a few rows at a time, so that the logits never exist as a whole.

Only rows that are targets are computed. The gradient is taken in the same pass, while the logits of a chunk are
still there; backward only scales it. Memory is one chunk of logits (`CHUNK_ELEMENTS`), whatever the number of
tokens and the vocabulary. The vocabulary may be cut over ranks: each has the logits of its part, and they exchange the
largest one, the sum of exponentials and the label's logit of each row; what each returns as the gradient of the hidden
states is then to be summed over them.

A frozen head may have its weight in fp8 besides, for the gradient of the hidden states alone. Probabilities and weights
are then rounded, but the label's part is added in full precision: where the label is likely, the gradient is the
small difference of the two, and rounding would be larger than that (docs/lab.md).

Legend: T tokens, N target rows, C rows of a chunk, H hidden, V vocabulary, W its width in fp8; `8` marks fp8 values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tunesmith.kernels.lowrank import E4M3, matmul_fp8, quantize_rows

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits held at a time: on a CPU what fits into its caches, on a GPU what makes its matmuls efficient."""
PLAIN_SHARE = 4
"""Where ranks share a vocabulary no kernel works in place: of each logit there are several numbers in fp32."""
ROWS_MULTIPLE = 128
"""Chunks are whole tiles of a GPU's matmuls."""
ALIGNED = 256
"""Bytes."""
WHOLE = 16
"""On a GPU rows of logits begin at multiples of so many, and the tokens beyond the last multiple are multiplied apart:
vocabularies may be odd, and such a matmul takes five times as long (docs/lab.md)."""


class VocabularyPart(NamedTuple):
    """Of a vocabulary that is cut over ranks, the part of one of them."""

    first: int
    height: int
    """Of all parts but the last ones, which may have fewer tokens."""
    group: dist.ProcessGroup


class Transposed(NamedTuple):
    """A head's weight transposed and in fp8, with the scale of each row (`kernels.fp8.quantize_transposed`)."""

    values8_hw: torch.Tensor
    scale_h1: torch.Tensor


def linear_cross_entropy(
    hidden_th: torch.Tensor,
    weight_vh: torch.Tensor,
    labels_n: torch.Tensor,
    weights_n: torch.Tensor,
    rows_n: torch.Tensor,
    *,
    bias_v: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    part: VocabularyPart | None = None,
    transposed: Transposed | None = None,
    room: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of `weights_n` times the cross-entropy of the rows `rows_n`, and each row's own loss (no gradient).

    Logits are `(hidden @ weight.T + bias) * scale`, then soft-capped. `rows_n` must not repeat a row. `z_loss` times
    the squared logarithm of each row's sum of exponentials is added to the sum, and not to the rows' own losses.
    `part`: what of the vocabulary `weight_vh` and `bias_v` are, where ranks share it. `transposed`: `weight_vh` once
    more, of a whole head that is frozen, where the gradient of `hidden_th` is to be computed in fp8. `room`: bytes to
    put the logits in, as many as `chunk_bytes` says, where the caller has them anyway.
    """
    assert transposed is None or part is None
    if chunk is None:
        chunk = chunk_rows(hidden_th.device, part.height if part else weight_vh.shape[0], is_shared=part is not None)
    return _LinearCrossEntropy.apply(
        hidden_th, weight_vh, bias_v, labels_n, weights_n, rows_n, scale, softcap, z_loss, chunk, part, transposed, room
    )


def chunk_bytes(tokens: int, weight_vh: torch.Tensor, transposed: Transposed | None = None) -> int:
    """Of the logits that exist at a time, and of their gradient in fp8, where so many tokens may be targets."""
    rows = min(tokens, chunk_rows(weight_vh.device, weight_vh.shape[0]))
    return _logits_bytes(rows, weight_vh) + (0 if transposed is None else rows * transposed.values8_hw.shape[1])


def chunk_rows(device: torch.device, height: int, *, is_shared: bool = False) -> int:
    """Ranks that share a vocabulary must have the same chunks, so it is the largest part's `height` that counts."""
    budget = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"]) // (PLAIN_SHARE if is_shared else 1)
    return max(1, budget // height // ROWS_MULTIPLE) * ROWS_MULTIPLE


def head_logits(
    rows_ch: torch.Tensor, weight_vh: torch.Tensor, bias_v: torch.Tensor | None, room: torch.Tensor | None = None
) -> torch.Tensor:
    """Raw logits of a few rows, in `room` where there is one. Between rows there may be padding."""
    places = (rows_ch.shape[0], _row_width(weight_vh))
    logits_cv = _placed(room, 0, places, rows_ch.dtype, rows_ch.device)[:, : weight_vh.shape[0]]
    for some in _tokens_apart(weight_vh):
        torch.mm(rows_ch, weight_vh[some].t(), out=logits_cv[:, some])
    if bias_v is not None:
        logits_cv += bias_v
    return logits_cv


def hidden_gradient(d_logits_cv: torch.Tensor, weight_vh: torch.Tensor) -> torch.Tensor:
    """Of a few rows."""
    first, *rest = _tokens_apart(weight_vh)
    d_rows_ch = d_logits_cv[:, first] @ weight_vh[first]
    for some in rest:
        d_rows_ch.addmm_(d_logits_cv[:, some], weight_vh[some])
    return d_rows_ch


def add_weight_gradient_(d_weight_vh: torch.Tensor, d_logits_cv: torch.Tensor, rows_ch: torch.Tensor) -> None:
    """Add a few rows' part, in fp32. On a GPU the matmul itself adds, and nothing is rounded on the way."""
    for some in _tokens_apart(d_weight_vh):
        here_vh, d_some_vc = d_weight_vh[some], d_logits_cv[:, some].t()
        if rows_ch.is_cuda and rows_ch.dtype != torch.float32:
            torch.addmm(here_vh, d_some_vc, rows_ch, torch.float32, out=here_vh)
        else:
            here_vh += d_some_vc @ rows_ch


def _tokens_apart(weight_vh: torch.Tensor) -> list[slice]:
    """The tokens that are multiplied together."""
    height = weight_vh.shape[0]
    whole = height // WHOLE * WHOLE if weight_vh.is_cuda else height
    return [some for some in (slice(0, whole), slice(whole, height)) if some.start < some.stop]


def _row_width(weight_vh: torch.Tensor) -> int:
    height = weight_vh.shape[0]
    return -(-height // WHOLE) * WHOLE if weight_vh.is_cuda else height


def _logits_bytes(rows: int, weight_vh: torch.Tensor) -> int:
    """Up to where something else may begin."""
    return -(-rows * _row_width(weight_vh) * weight_vh.itemsize // ALIGNED) * ALIGNED


def scaled_gradients(ctx, d_total: torch.Tensor) -> list[torch.Tensor | None]:
    """In a backward pass: the gradients that the forward pass has left, times that of the loss. They are used up."""
    if ctx.gradients is None:
        raise RuntimeError("the loss over an output head keeps its gradient for one backward pass only")
    gradients, ctx.gradients = ctx.gradients, None
    pairs = zip(gradients, ctx.dtypes, strict=True)
    return [None if gradient is None else gradient.mul_(d_total).to(dtype) for gradient, dtype in pairs]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_th,
        weight_vh,
        bias_v,
        labels_n,
        weights_n,
        rows_n,
        scale,
        softcap,
        z_loss,
        chunk,
        part,
        transposed,
        room,
    ):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_any = needs_hidden or needs_weight or needs_bias
        assert transposed is None or not (needs_weight or needs_bias)
        width = None if transposed is None else transposed.values8_hw.shape[1]
        n = labels_n.shape[0]
        total = hidden_th.new_zeros((), dtype=torch.float32)
        losses_n = hidden_th.new_zeros(n, dtype=torch.float32)
        d_hidden = torch.zeros_like(hidden_th) if needs_hidden else None
        d_weight = torch.zeros_like(weight_vh, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias_v, dtype=torch.float32) if needs_bias else None
        for start in range(0, n, chunk):
            some = slice(start, min(start + chunk, n))
            rows_ch = hidden_th.index_select(0, rows_n[some])
            given = (rows_ch, weight_vh, bias_v, labels_n[some], weights_n[some], scale, softcap, z_loss)
            losses_c, log_totals_c, d_logits = _chunk(*given, needs_any, part, width, room)
            losses_n[some] = losses_c
            total += (losses_c * weights_n[some]).sum()
            if z_loss:
                total += z_loss * (log_totals_c.square() * weights_n[some]).sum()
            if d_logits is None:
                continue
            if isinstance(d_logits, _Rounded):
                assert d_hidden is not None
                d_hidden.index_copy_(0, rows_n[some], _d_rows(d_logits, transposed, weight_vh, labels_n[some]))
            else:
                d_logits = d_logits.to(rows_ch.dtype)
                if d_hidden is not None:
                    d_hidden.index_copy_(0, rows_n[some], hidden_gradient(d_logits, weight_vh))
                if d_weight is not None:
                    add_weight_gradient_(d_weight, d_logits, rows_ch)
                if d_bias is not None:
                    d_bias += d_logits.float().sum(0)
            del d_logits  # before the next chunk is made
        ctx.gradients = (d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden_th.dtype, weight_vh.dtype, bias_v.dtype if bias_v is not None else None)
        ctx.mark_non_differentiable(losses_n)
        return total, losses_n

    @staticmethod
    def backward(ctx, d_total, _):
        return *scaled_gradients(ctx, d_total), *[None] * 10


class _Rounded(NamedTuple):
    """The gradient of a few rows of logits in fp8."""

    values8_cw: torch.Tensor
    scale_c1: torch.Tensor
    own_c1: torch.Tensor
    """The label's entry, which is 0 among the values."""


def _d_rows(d_logits, transposed, weight_vh, labels_c):
    """The gradient of the hidden states of a few rows."""
    rounded = (d_logits.values8_cw, d_logits.scale_c1, *transposed)
    d_rows_ch = matmul_fp8(*rounded, dtype=weight_vh.dtype, fast=False)
    return d_rows_ch.addcmul_(weight_vh.index_select(0, labels_c), d_logits.own_c1)


def _chunk(rows_ch, weight_vh, bias_v, labels_c, weights_c, scale, softcap, z_loss, needs_gradient, part, width, room):
    """Losses of a few rows, logarithms of their sums of exponentials, and the gradient by the raw logits: in fp8 of
    this `width` where it is given."""
    rows = rows_ch.shape[0]
    logits_cv = head_logits(rows_ch, weight_vh, bias_v, room)
    if logits_cv.is_cuda and part is None:
        from tunesmith.kernels.cross_entropy import cross_entropy_, cross_entropy_fp8

        given = (logits_cv, labels_c, weights_c)
        options = {"scale": scale, "softcap": softcap, "z_loss": z_loss}
        if needs_gradient and width is not None:
            values8_cw = _placed(room, _logits_bytes(rows, weight_vh), (rows, width), E4M3, rows_ch.device)
            losses_c, log_total_c, *rest = cross_entropy_fp8(*given, values8_cw, **options)
            return losses_c, log_total_c, _Rounded(values8_cw, *rest)
        losses_c, log_total_c = cross_entropy_(*given, **options, needs_gradient=needs_gradient)
        return losses_c, log_total_c, logits_cv if needs_gradient else None
    logits_cv = logits_cv.float()
    if scale != 1.0:
        logits_cv *= scale
    if softcap is not None:
        logits_cv = torch.tanh(logits_cv.div_(softcap)).mul_(softcap)
    if part is None:
        is_here_c, column_c1 = torch.ones_like(weights_c), labels_c[:, None]
        label_c, log_total_c, probability_cv = _softmax(logits_cv, column_c1)
    else:
        column_c = labels_c - part.first
        is_here_c = ((column_c >= 0) & (column_c < logits_cv.shape[1])).to(logits_cv.dtype)
        column_c1 = column_c.clamp(0, logits_cv.shape[1] - 1)[:, None]
        label_c, log_total_c, probability_cv = _softmax_over_ranks(logits_cv, column_c1, is_here_c, part.group)
    losses_c = log_total_c - label_c
    if not needs_gradient:
        return losses_c, log_total_c, None
    more_c1 = (1 + 2 * z_loss * log_total_c)[:, None]
    factor_c1 = (weights_c * scale)[:, None]
    slope_cv = None if softcap is None else 1 - (logits_cv / softcap) ** 2
    if width is not None:
        return losses_c, log_total_c, _rounded(probability_cv, column_c1, more_c1, factor_c1, slope_cv, width)
    d_logits_cv = probability_cv
    if z_loss:
        d_logits_cv *= more_c1
    d_logits_cv.scatter_add_(1, column_c1, -is_here_c[:, None])
    d_logits_cv *= factor_c1
    if slope_cv is not None:
        d_logits_cv *= slope_cv
    return losses_c, log_total_c, d_logits_cv


def _placed(room, start, shape, dtype, device):
    """An empty tensor, in `room` from so many bytes on where there is one."""
    if room is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return room[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _rounded(probability_cv, column_c1, more_c1, factor_c1, slope_cv, width):
    own_c1 = (probability_cv.gather(1, column_c1) * more_c1 - 1) * factor_c1
    others_cv = probability_cv.scatter_(1, column_c1, 0.0)
    if slope_cv is not None:
        own_c1 *= slope_cv.gather(1, column_c1)
        others_cv *= slope_cv
    values8_cw, scale_c1 = quantize_rows(F.pad(others_cv, (0, width - others_cv.shape[1])))
    return _Rounded(values8_cw, scale_c1 * more_c1 * factor_c1, own_c1)


def _softmax(logits_cv, column_c1):
    """The label's logit of each row, the logarithm of its sum of exponentials, and its probabilities."""
    largest_c, index_c = logits_cv.max(-1)
    probability_cv = torch.softmax(logits_cv, -1)
    # The largest probability is at least 1/V, so its logarithm is exact where that of the label's may underflow.
    log_total_c = largest_c - probability_cv.gather(1, index_c[:, None]).squeeze(1).log()
    return logits_cv.gather(1, column_c1).squeeze(1), log_total_c, probability_cv


def _softmax_over_ranks(logits_cv, column_c1, is_here_c, group):
    """The same where each rank has some of the columns; of the probabilities, those of its columns."""
    largest_c = logits_cv.amax(-1)
    dist.all_reduce(largest_c, dist.ReduceOp.MAX, group=group)
    probability_cv = (logits_cv - largest_c[:, None]).exp_()
    label_c = logits_cv.gather(1, column_c1).squeeze(1) * is_here_c
    both = torch.stack([probability_cv.sum(-1), label_c])
    dist.all_reduce(both, group=group)
    total_c, label_c = both
    return label_c, largest_c + total_c.log(), probability_cv.div_(total_c[:, None])
