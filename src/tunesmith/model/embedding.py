"""Vectors of whole texts: pooled from the hidden states of packed documents, and what an objective makes of a batch.

In-batch negatives are those of the whole optimizer step. Their loss is no sum over micro-batches, but its gradient by
each vector is all that a micro-batch needs to know of the others: all texts are embedded without a gradient first, the
loss and these gradients are computed once over all of them, and each micro-batch is then embedded again and takes its
own (GradCache, arXiv 2101.06983; sentence-transformers' CachedMultipleNegativesRankingLoss). Both passes draw the same
dropout, so the step is that of one large batch. Where a rank has a single micro-batch, its first pass is its last.

Legend: D documents that count, H hidden, N tokens that count, E examples, S data sets, K columns of an objective.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from tunesmith.model.forward import Entrance, Inputs, hidden_states
from tunesmith.model.scoring import Answered, targets_of
from tunesmith.objectives.embed import NAMES, RANKED, Embed, Embedded
from tunesmith.plan.plan import ForwardSpec


def pooled(model: nn.Module, inputs: Inputs, spec: ForwardSpec, lengths_d: torch.Tensor) -> torch.Tensor:
    """fp32 [D, H]: the mean over the tokens of each document that count; `lengths_d` says how many these are."""
    if isinstance(model, Entrance):
        return model(pooled, inputs, spec, lengths_d)
    rows_nh = hidden_states(model, inputs, spec).index_select(0, inputs.rows).float()
    if rows_nh.shape[0] == lengths_d.shape[0]:  # one each
        return rows_nh
    return torch.segment_reduce(rows_nh, "mean", lengths=lengths_d, axis=0, unsafe=True)


def lengths_of(batch: Answered) -> torch.Tensor:
    """int64 [D], on the host: tokens of each document that count."""
    return targets_of(batch)[1]


def facts_of(batch: Answered) -> torch.Tensor:
    """int64 [D, 4], on the host: part, value (the bits of a float64), key and data set of each document."""
    count = int((batch.parts >= 0).sum())
    bounds = batch.boundaries.tolist()
    keys = [key_of(batch.tokens[start:end]) for start, end in pairwise(bounds[: count + 1])]
    values_d = batch.values[:count].double().view(torch.int64)
    each = (batch.parts[:count], values_d, torch.tensor(keys, dtype=torch.int64), batch.sources[:count])
    return torch.stack(each, dim=1)


def key_of(tokens: torch.Tensor) -> int:
    """The same for the same tokens, and for no others that anybody will meet."""
    return int.from_bytes(hashlib.sha256(tokens.long().numpy().tobytes()).digest()[:8], "big", signed=True)


def embedded(vectors_dh: torch.Tensor, facts_d4: torch.Tensor) -> Embedded:
    facts_d4 = facts_d4.to(vectors_dh.device)
    return Embedded(
        vectors_dh=vectors_dh,
        parts_d=facts_d4[:, 0],
        values_d=facts_d4[:, 1].contiguous().view(torch.float64),
        keys_d=facts_d4[:, 2],
    )


@dataclass(frozen=True)
class BatchLoss:
    """What an objective found in a batch, of the examples that were asked about; as `model.scoring.Scoring` has it."""

    sums: torch.Tensor
    """float64 [K, S], on the device"""
    weights: torch.Tensor
    """float64 [K, S], on the host: what the sums are to be divided by"""
    gradients_dh: torch.Tensor | None = None
    """fp32: of the mean loss, by each vector"""


def batch_loss(
    objective: Embed,
    batch: Embedded,
    sources_d: torch.Tensor,
    *,
    sources: int,
    mine: slice = slice(None),
    divisor: float | None = None,
) -> BatchLoss:
    """Loss and figures of the examples whose documents are `mine`, and by which gradient they and all others want these
    documents' vectors changed, where there is a `divisor`: the examples of the whole batch."""
    leaf_dh = batch.vectors_dh.detach().requires_grad_(divisor is not None)
    batch = replace(batch, vectors_dh=leaf_dh)
    firsts_e = torch.nonzero(batch.parts_d == 0).squeeze(1)
    is_mine_d = torch.zeros(leaf_dh.shape[0], dtype=torch.bool, device=leaf_dh.device)
    is_mine_d[mine] = True
    sums = torch.zeros(len(NAMES), sources, dtype=torch.float64, device=leaf_dh.device)
    with torch.set_grad_enabled(divisor is not None):
        for some_e, columns in objective.losses(batch):
            each_ke = torch.stack([columns[name].each_e.detach() for name in NAMES])
            at_e = firsts_e[some_e]
            is_of_es = torch.nn.functional.one_hot(sources_d[at_e].to(leaf_dh.device), sources).double()
            sums += (each_ke * is_mine_d[at_e]) @ is_of_es
            if divisor is not None:
                parts = [one.each_e.sum() / divisor for one in columns.values() if one.is_loss]
                torch.stack(parts).sum().backward()
    mine_e = firsts_e[is_mine_d[firsts_e]].cpu()
    is_ranked_e = (batch.values_d.cpu()[mine_e] == RANKED).double()
    counted_ke = torch.stack([torch.ones_like(is_ranked_e), is_ranked_e, 1 - is_ranked_e])
    weights = counted_ke @ torch.nn.functional.one_hot(sources_d.cpu()[mine_e], sources).double()
    gradients_dh = None
    if divisor is not None:
        gradients_dh = (torch.zeros_like(leaf_dh) if leaf_dh.grad is None else leaf_dh.grad)[mine]
    return BatchLoss(sums, weights, gradients_dh)
