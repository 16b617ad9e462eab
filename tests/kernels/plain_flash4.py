"""Stands in for flash-attn-4 where there is no GPU: plain attention behind the same two functions, so that our
operators around them, and layers compiled with them, can be tried on a CPU."""

from __future__ import annotations

import itertools

import torch

from tunesmith.kernels import flash4
from tunesmith.model import attention


def install(monkeypatch) -> None:
    """Let packed attention take the operators of `kernels.flash4`, and those compute plainly."""
    monkeypatch.setattr(flash4, "functions", lambda: (_forward, _backward))
    monkeypatch.setattr(flash4, "is_available", lambda: True)
    monkeypatch.setattr(attention, "_path", lambda *_: "flash-attn-4")


def _forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, return_lse, learnable_sink=None, **_):
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for part, seen in _documents(cu_seqlens_q, cu_seqlens_k):
        out[part], lse[:, part] = _attention(q[part], k[seen], v[seen], softmax_scale)
    if learnable_sink is not None:
        with_sink = torch.logaddexp(lse, learnable_sink[:, None])
        out, lse = out * (lse - with_sink).exp().t()[:, :, None], with_sink
    return out, lse


def _backward(
    q, k, v, out, d_out, lse, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, deterministic, learnable_sink=None, **_
):
    found = [torch.empty_like(one) for one in (q, k, v)]
    delta = (d_out * out).sum(-1).t()
    for part, seen in _documents(cu_seqlens_q, cu_seqlens_k):
        weights = (_scores(q[part], k[seen], softmax_scale) - lse[:, part, None]).exp()
        d_weights = torch.einsum("qhd,khd->hqk", d_out[part], _for_each_query(v[seen], q))
        d_scores = weights * (d_weights - delta[:, part, None]) * softmax_scale
        found[0][part] = torch.einsum("hqk,khd->qhd", d_scores, _for_each_query(k[seen], q))
        for whole, gradient in (
            (found[1], torch.einsum("hqk,qhd->khd", d_scores, q[part])),
            (found[2], torch.einsum("hqk,qhd->khd", weights, d_out[part])),
        ):
            whole[seen] = gradient.unflatten(1, (whole.shape[1], -1)).sum(2)
    if learnable_sink is not None:
        found.append(-((learnable_sink[:, None] - lse).exp() * delta).sum(1))
    return found


def _documents(queries, keys):
    bounds = (itertools.pairwise(one.tolist()) for one in (queries, keys))
    return [tuple(slice(start, end) for start, end in both) for both in zip(*bounds, strict=True)]


def _attention(q, k, v, scale):
    """[T, heads, D] to the same and the logarithm of each query's sum [heads, T]."""
    scores = _scores(q, k, scale)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), _for_each_query(v, q)), scores.logsumexp(-1)


def _scores(q, k, scale):
    scores = torch.einsum("qhd,khd->hqk", q, _for_each_query(k, q)) * scale
    beyond = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k.shape[0] - q.shape[0])
    return scores.masked_fill(beyond, float("-inf"))


def _for_each_query(keys, q):
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
