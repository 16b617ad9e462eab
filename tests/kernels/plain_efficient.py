"""Stands in for torch's memory-efficient attention where there is no GPU: plain attention behind the same two
functions, so that our operators around them, and layers compiled with them, can be tried on a CPU."""

from __future__ import annotations

import torch
from plain_flash4 import _documents

from tunesmith.kernels import efficient
from tunesmith.model import attention


def install(monkeypatch) -> None:
    """Let packed attention take the operators of `kernels.efficient`, and those compute plainly."""
    monkeypatch.setattr(efficient, "_functions", lambda: (_forward, _backward))
    monkeypatch.setattr(attention, "_path", lambda *_: "memory-efficient")


def _forward(q, k, v, bias, queries, keys, longest_q, longest_k, dropout, mask, with_lse, *, scale, window_size):
    _check(q, k, v, queries, keys, longest_q, longest_k)
    assert (bias, dropout, mask, with_lse) == (None, 0.0, 2, True)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_full((queries.shape[0] - 1, q.shape[2], -(-longest_q // 32) * 32), float("nan"), dtype=torch.float32)
    for number, (part, seen) in enumerate(_documents(queries, keys)):
        scores = _scores(q[0, part], k[0, seen], scale, window_size)
        out[0, part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[0, seen])
        lse[number, :, : scores.shape[1]] = scores.logsumexp(-1)
    nothing = torch.empty((), dtype=torch.int64)
    return out, lse, nothing, nothing, longest_q, longest_k


def _backward(
    d_out,
    q,
    k,
    v,
    bias,
    out,
    queries,
    keys,
    longest_q,
    longest_k,
    lse,
    dropout,
    seed,
    offset,
    mask,
    bias_gradient,
    *,
    scale,
    window_size,
):
    _check(q, k, v, queries, keys, longest_q, longest_k)
    assert (bias, dropout, mask, bias_gradient) == (None, 0.0, 2, False)
    assert lse.shape == (queries.shape[0] - 1, q.shape[2], -(-longest_q // 32) * 32)
    assert out.is_contiguous()
    d_q, d_k, d_v = (torch.full_like(one, float("nan")) for one in (q, k, v))
    for number, (part, seen) in enumerate(_documents(queries, keys)):
        scores = _scores(q[0, part], k[0, seen], scale, window_size)
        weights = (scores - lse[number, :, : scores.shape[1], None]).exp().to(q.dtype)
        d_weights = torch.einsum("qhd,khd->hqk", d_out[0, part], v[0, seen])
        d_scores = weights * (d_weights - (d_out[0, part] * out[0, part]).sum(-1).t()[:, :, None]) * scale
        d_q[0, part] = torch.einsum("hqk,khd->qhd", d_scores, k[0, seen])
        d_k[0, seen] = torch.einsum("hqk,qhd->khd", d_scores, q[0, part])
        d_v[0, seen] = torch.einsum("hqk,qhd->khd", weights, d_out[0, part])
    return d_q, d_k, d_v, None


def _check(q, k, v, queries, keys, longest_q, longest_k) -> None:
    """What the kernels ask for."""
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
    assert all(tensor.stride(3) == 1 for tensor in (q, k, v))
    assert queries.dtype == keys.dtype == torch.int32
    assert queries.diff().max() <= longest_q <= q.shape[1]
    assert keys.diff().max() <= longest_k <= k.shape[1]


def _scores(q, k, scale, window):
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(k.shape[0])[k.shape[0] - q.shape[0] :, None] - torch.arange(k.shape[0])[None]
    return scores.masked_fill((distance < 0) | (distance >= (window or k.shape[0])), float("-inf"))
