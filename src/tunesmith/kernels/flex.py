"""torch's FlexAttention for packed documents: what the other kernels lack, as one kernel made by the compiler.

It takes soft-capped scores, sinks, linear biases (ALiBi), and values of another size than the keys. Every query of a
packed micro-batch sees one unbroken range of keys, whatever the mask: the document so far, a window of it, or a chunk.
So a mask is two numbers for each query, and which blocks are computed follows from them by arithmetic, without a
matrix of the mask. Compiled layers make these tables as part of themselves; otherwise they are made once for each
micro-batch and kind of mask, and shared by all layers. Lengths of documents are data: nothing is compiled for them.

Legend: T tokens, S tokens with keys, H query heads, G key heads, D head dim, V value dim, M and N blocks of each.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Tokens in a block of queries and of keys."""
MOST_KEPT = 8
"""Tables that wait for the next layer: kinds of masks, of two micro-batches."""


class Tables(NamedTuple):
    """Which keys queries see, and the blocks that follow from it. Blocks are `full` where every query sees every key,
    else `part`; each has a count and then, as wide as there are blocks, their numbers."""

    first: torch.Tensor
    """int32 [T]: the first key that a query sees"""
    last: torch.Tensor
    """int32 [T]: the last, which is where the query itself stands"""
    part_k: tuple[torch.Tensor, torch.Tensor]
    """int32 [M], [M, N]"""
    full_k: tuple[torch.Tensor, torch.Tensor]
    part_q: tuple[torch.Tensor, torch.Tensor]
    """int32 [N], [N, M]: the same by blocks of keys"""
    full_q: tuple[torch.Tensor, torch.Tensor]


def flex(
    q_htd: torch.Tensor,
    k_gsd: torch.Tensor,
    v_gsv: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    window: int | None = None,
    *,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each document, whose queries and keys end together: [H, T, V]. `window` counts the token
    itself; a `chunk` is counted from the document's start. `sinks` [H] are scores of nothing, `slopes` [H] what a
    token's distance adds to its score."""
    options = (q_htd.shape[1], k_gsd.shape[1], window, chunk)
    is_compiled = torch.compiler.is_compiling()
    if not is_compiled:
        # Another scale or soft cap is another kernel; as a symbol, which the second value would make it, it is none.
        torch._dynamo.config.specialize_float = True
    tables = tables_of(queries, keys, *options) if is_compiled else _kept(queries, keys, *options)
    attend = _attend if is_compiled or not q_htd.is_cuda else _compiled()
    return attend(q_htd, k_gsd, v_gsv, tables, scale, softcap, sinks, slopes)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: Tables,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    first, last = tables.first, tables.last

    def is_seen(_batch, _head, query, key):
        return (key >= first[query]) & (key <= last[query])

    def changed(score, _batch, head, query, key):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * (key - last[query])
        return score

    counts = [(one[0][None, None], one[1][None, None]) for one in tables[2:]]
    mask = BlockMask(
        (q.shape[1], k.shape[1]), *counts[0], *counts[1], *counts[2], *counts[3], (BLOCK, BLOCK), mask_mod=is_seen
    )
    out, found = flex_attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        score_mod=None if softcap is None and slopes is None else changed,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:  # a sink is one more term of the softmax's sum
        assert found.lse is not None
        out = out * torch.sigmoid(found.lse - sinks.float()[:, None]).unsqueeze(-1).to(out.dtype)
    return out.squeeze(0)


@cache
def _compiled():
    return torch.compile(_attend, fullgraph=True)


def tables_of(
    queries: torch.Tensor, keys: torch.Tensor, tokens: int, others: int, window: int | None, chunk: int | None
) -> Tables:
    first, last = seen(queries, keys, tokens, window, chunk)
    device = first.device
    head = torch.arange(0, tokens, BLOCK, device=device)
    tail = (head + BLOCK - 1).clamp(max=tokens - 1)
    # Both ends only grow from query to query, so a block of queries sees what lies between those of its outermost.
    low, end = first[head] // BLOCK, last[tail] // BLOCK + 1
    full_low, full_end = (first[tail] + BLOCK - 1) // BLOCK, (last[head] + 1) // BLOCK
    number = torch.arange(-(-others // BLOCK), dtype=torch.int32, device=device)
    ranges = [
        torch.searchsorted(edges, number, right=right, out_int32=True)
        for edges, right in ((end, True), (low, True), (full_end, True), (full_low, True))
    ]
    part_k, full_k = _listed(low, end, full_low, full_end, number.shape[0])
    part_q, full_q = _listed(ranges[0], ranges[1], ranges[2], ranges[3], head.shape[0])
    return Tables(first, last, part_k, full_k, part_q, full_q)


def seen(
    queries: torch.Tensor, keys: torch.Tensor, tokens: int, window: int | None, chunk: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last key that each query sees, int32 [T]."""
    place = torch.arange(tokens, dtype=torch.int32, device=queries.device)
    document = torch.searchsorted(queries, place, right=True) - 1
    first, last = keys[document], place
    if keys is not queries:
        last = keys[document + 1] - queries[document + 1] + place
    if chunk is not None:
        first = last - (last - first) % chunk
    if window is not None:
        first = torch.maximum(first, last - (window - 1))
    return first.int(), last.int()


def _listed(low, end, full_low, full_end, most: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The blocks from `low` to `end`, those in part and those in full, by count and numbers; of several such rows."""
    end = torch.maximum(end, low)
    has_full = full_end > full_low
    full_low, full_end = torch.where(has_full, full_low, end), torch.where(has_full, full_end, end)
    place = torch.arange(most, dtype=torch.int32, device=low.device)
    before = (full_low - low)[:, None]
    part = torch.where(place < before, low[:, None] + place, full_end[:, None] + place - before)
    full = full_low[:, None] + place
    part_count, full_count = (full_low - low) + (end - full_end), full_end - full_low
    return tuple(
        (count.int(), numbers.clamp(0, most - 1).int().contiguous())
        for count, numbers in ((part_count, part), (full_count, full))
    )


_tables: dict[tuple, tuple[weakref.ref, weakref.ref, Tables]] = {}


def _kept(
    queries: torch.Tensor, keys: torch.Tensor, tokens: int, others: int, window: int | None, chunk: int | None
) -> Tables:
    """`tables_of`, of the same boundaries once."""
    options = (tokens, others, window, chunk)
    key = (id(queries), queries._version, id(keys), keys._version, *options)
    if key in _tables and _tables[key][0]() is queries and _tables[key][1]() is keys:
        return _tables[key][2]
    made = tables_of(queries, keys, *options)
    while len(_tables) >= MOST_KEPT:
        del _tables[next(iter(_tables))]
    _tables[key] = weakref.ref(queries), weakref.ref(keys), made
    return made
