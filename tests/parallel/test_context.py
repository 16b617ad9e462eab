"""A cut micro-batch: every token on one rank, and queries that see what they would see in the whole."""

from __future__ import annotations

import numpy as np
import plain_flash4
import pytest
import torch
from torch import nn

from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.data.types import MicroBatch
from tunesmith.model.attention import packed_attention
from tunesmith.model.forward import Shape, to_device
from tunesmith.parallel.context import ContextShard

LENGTHS = (9, 1, 2, 30, 5, 1, 1, 12)


def batch_of(lengths: tuple[int, ...]) -> MicroBatch:
    first = np.cumsum([0, *lengths]).tolist()
    return micro_batch_of(
        [
            PackedDocument(
                np.arange(start, start + length), np.ones(length, np.float32), number % 3, f"document {number}"
            )
            for number, (start, length) in enumerate(zip(first, lengths, strict=False))
        ]
    )


def cuts(ranks: int, shape: Shape | None = None) -> list[ContextShard]:
    return [ContextShard(rank, ranks, multiple=2 * ranks, shape=shape) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("shape", [None, Shape(tokens=120, longest=40)])
def test_every_token_is_on_one_rank_with_its_label_position_and_source(ranks, shape):
    batch = batch_of(LENGTHS)
    whole = {}
    sources = batch.sources.repeat_interleave(batch.boundaries.diff().long())
    for at in range(sum(LENGTHS)):
        values = (batch.labels[at], batch.weights[at], batch.positions[at], sources[at])
        whole[at] = tuple(value.item() for value in values)
    found, sizes = {}, set()
    for one in cuts(ranks, shape):
        part = one(batch)
        part_sources = part.sources.repeat_interleave(part.boundaries.diff().long())
        sizes.add(part.tokens.shape[0])
        assert len(part.origins) == len(part.sources)
        for at, token in enumerate(part.tokens.tolist()):
            values = (part.labels[at], part.weights[at], part.positions[at], part_sources[at])
            if token > 0 or (part.weights[at] > 0):  # fillers are 0, as is the first token of all
                assert token not in found
                found[token] = tuple(value.item() for value in values)
    assert found == whole
    assert sizes == {(shape.tokens if shape else -(-sum(LENGTHS) // (2 * ranks)) * 2 * ranks) // ranks}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 4.0)])
def test_queries_see_the_earlier_tokens_of_their_document_on_whichever_rank(ranks, window, softcap, monkeypatch):
    whole, parts = outputs(ranks, window=window, softcap=softcap)
    assert_same(whole, parts)
    if window is None and softcap is None:
        plain_flash4.install(monkeypatch)
        assert_same(whole, outputs(ranks)[1])


def assert_same(whole, parts):
    for mine, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def outputs(ranks: int, **options) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What attention gives, with gradients by queries, keys and values: of the whole, and put together from parts."""
    batch = batch_of(LENGTHS)
    tokens = -(-sum(LENGTHS) // (2 * ranks)) * 2 * ranks
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    direction = torch.randn(tokens, 4, 8, generator=generator)
    options = {"sliding_window": options.get("window"), "softcap": options.get("softcap")}

    def attend(query: torch.Tensor, **bounds) -> torch.Tensor:
        return packed_attention(nn.Module(), query, k, v, None, max_length_k=30, **bounds, **options)[0][0]

    filled = ContextShard(multiple=2 * ranks)(batch)
    plain = attend(q, cu_seq_lens_q=filled.boundaries, max_length_q=filled.longest)
    together = torch.zeros_like(plain)
    chunk = tokens // (2 * ranks)
    for one in cuts(ranks):
        inputs = to_device(one(batch), torch.device("cpu"))
        for index, place in enumerate((one.rank, 2 * ranks - 1 - one.rank)):
            rows = slice(place * chunk, (place + 1) * chunk)
            bounds = {"cu_seq_lens_q": inputs.boundaries[index], "cu_seq_lens_k": inputs.keys[index]}
            together[rows] = attend(q[:, :, rows], max_length_q=chunk, **bounds)
    return tuple([out, *torch.autograd.grad(out, (q, k, v), direction)] for out in (plain, together))


def test_ranks_have_the_same_number_of_keys_to_look_at():
    batch = batch_of((240,))
    pairs = []
    for one in cuts(4):
        part = one(batch)
        pairs.append(int((part.positions + 1).sum()))
    assert max(pairs) == min(pairs)
