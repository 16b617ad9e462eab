"""torch's memory-efficient attention for packed documents, as operators inside compiled layers without a break.

It is there from compute capability 5.0 on and in fp32 too, where flash attention is not. Ours is only the wrapping:
grouped heads, shapes known to the compiler, and one logarithm for each query in place of `longest` for each document.
Documents may change their lengths from call to call without anything being compiled again.

Legend: T tokens, S tokens with keys, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tunesmith.kernels.operator import operator, register_backward

ENDS_TOGETHER = 2
"""The kernels' number for a causal mask in which the last query stands at the last key."""


def efficient(
    q_thd: torch.Tensor,
    k_sgd: torch.Tensor,
    v_sgd: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention inside each document, whose queries and keys end together. `window` counts the token itself, and
    is for documents with as many queries as keys: gradients are wrong else. `longest` bounds a document's queries and
    is at most T. A backward pass takes memory for as many queries in every document."""
    return _forward(q_thd, k_sgd, v_sgd, queries, None if keys is queries else keys, longest, scale, window or 0)[0]


def _functions() -> tuple[Callable, Callable]:
    return torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward


@operator("efficient")
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = _functions()[0](
        *_rows(q, k, v),
        None,
        *_bounds(k, queries, keys, longest),
        0.0,
        ENDS_TOGETHER,
        True,
        scale=scale,
        window_size=window or None,
    )
    document, place = _places(queries, q.shape[0])
    return out.squeeze(0), lse[document, :, place]


@torch.library.register_fake(_forward)
def _(q, k, v, queries, keys, longest, scale, window):
    tokens, heads, _ = q.shape
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(tokens, heads, dtype=torch.float32)


@operator("efficient_backward")
def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    document, place = _places(queries, q.shape[0])
    padded = lse.new_full((queries.shape[0] - 1, q.shape[1], -(-longest // 32) * 32), float("inf"))
    padded[document, :, place] = lse
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of dropout
    d_q, d_k, d_v, _ = _functions()[1](
        d_out.contiguous().unsqueeze(0),
        *_rows(q, k, v),
        None,
        out.unsqueeze(0),
        *_bounds(k, queries, keys, longest),
        padded,
        0.0,
        unused,
        unused,
        ENDS_TOGETHER,
        False,
        scale=scale,
        window_size=window or None,
    )
    return d_q.squeeze(0), _summed(d_k, k), _summed(d_v, v)


register_backward(_forward, _backward)


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """One row of tokens each, with as many key heads as query heads."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return [q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)]


def _bounds(
    k: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor | None, longest: int
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    if keys is None:
        return queries, queries, longest, longest
    return queries, keys, longest, k.shape[0]  # keys without queries may be longer than any document


def _places(queries: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each query, and its place there. The kernels have logarithms as [documents, H, longest], of which
    with many short documents little is used."""
    position = torch.arange(tokens, dtype=queries.dtype, device=queries.device)
    document = torch.searchsorted(queries, position, right=True) - 1
    return document, position - queries[document]


def _summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    gradient = gradient.squeeze(0)
    return gradient if gradient.shape == like.shape else gradient.unflatten(1, (like.shape[1], -1)).sum(2)
