"""Held-out loss and figures, by data set, in bounded memory: a micro-batch at a time, logits in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tunesmith.data.loader import evaluation_batches
from tunesmith.data.store import TokenStore
from tunesmith.data.types import MicroBatch
from tunesmith.model.embedding import batch_loss, embedded, facts_of, lengths_of, pooled
from tunesmith.model.forward import Inputs, Shape, moved, to_device, token_losses
from tunesmith.model.scoring import Scoring, TagScoring, figures_of, reported, risen, scoring_of
from tunesmith.objectives.base import Objective
from tunesmith.objectives.embed import Embed
from tunesmith.objectives.head import ClassifyTokens
from tunesmith.parallel.context import ContextShard
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec

COMPARED = 64
"""Held-out examples, in their order in the data, whose texts are compared with each other (`objective: embed`): the
same ones whatever the machine and the batch of training."""


@dataclass(frozen=True)
class HeldOut:
    """Loss of one data set: the weighted mean over its target tokens, or what its objective makes of it."""

    title: str
    loss: float
    target_tokens: float
    examples: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the objective reports besides."""


@dataclass
class TokenLosses:
    """The losses of single tokens of the first held-out documents of each data set, where a loss is a sum over them."""

    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    DOCUMENTS, TOKENS, SETS = 3, 384, 8

    def see(self, store: int, title: str, batch: MicroBatch, losses_n: torch.Tensor) -> None:
        wanted = [place for place, number in enumerate(batch.numbers.tolist()) if number < self.DOCUMENTS]
        if store >= self.SETS or not wanted:
            return
        rows = torch.nonzero(batch.weights).squeeze(1)
        for place in wanted:
            begin, end = batch.boundaries[place : place + 2].tolist()
            if not batch.weights[begin:end].any():  # what a rank without documents computes
                continue
            end = min(end, begin + self.TOKENS)
            low, high = torch.searchsorted(rows, torch.tensor([begin, end - 1])).tolist()
            found: list[float | None] = [None] * (end - begin)
            for row, loss in zip(rows[low:high].tolist(), losses_n[low:high].tolist(), strict=True):
                found[row - begin + 1] = round(loss, 3) if math.isfinite(loss) else None
            number = int(batch.numbers[place])
            self.documents[f"{store}:{number}"] = {
                "data": title,
                "where": batch.origins[place],
                "ids": batch.tokens[begin:end].tolist(),
                "losses": found,
            }


@dataclass(frozen=True)
class Sums:
    """What is summed over a data set: numbers, and what each is to be divided by."""

    names: Sequence[str]
    is_loss: Sequence[bool]
    totals: Sequence[float]
    weights: Sequence[float]

    @property
    def loss(self) -> float:
        parts = [t / w for t, w, is_loss in zip(self.totals, self.weights, self.is_loss, strict=True) if is_loss and w]
        return sum(parts) if parts else float("nan")

    @property
    def figures(self) -> dict[str, float]:
        return figures_of(self.names, self.is_loss, self.totals, self.weights)


@torch.no_grad()
def held_out_losses(
    model: nn.Module,
    spec: ForwardSpec,
    stores: Sequence[TokenStore],
    *,
    device: torch.device,
    sequence_length: int,
    micro_batch: int = 1,
    shape: Shape | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    share: tuple[int, int] = (0, 1),
    context_shard: ContextShard | None = None,
    objective: Objective | None = None,
    mismatched: Sequence[TokenStore] = (),
    documents: dict[str, tuple[float, float]] | None = None,
    tokens: TokenLosses | None = None,
) -> list[HeldOut]:
    """The model must be in evaluation mode. `progress` is told the documents done, of how many. Several ranks share
    the work (`share`: which part of how many this rank does; `context_shard`: what of each micro-batch), and all know
    the result. `mismatched`: as many stores, where the `objective` has a baseline. `documents` is given this rank's
    documents: the sum of each one's losses and of its weights, where these are all there is to the loss; `tokens` the
    losses of a few documents' tokens."""
    assert not model.training
    ranks, context_shard = ranks or Ranks(), context_shard or ContextShard()
    if objective is not None and objective.is_token_sum:
        objective = None
    sizes = {"sequence_length": sequence_length, "micro_batch": micro_batch}
    sizes |= {"lengths": spec.lengths(sequence_length), "rank": share[0], "ranks": share[1]}
    sizes["counts_prompts"] = objective is not None and objective.counts_prompts
    sizes["rows"] = "targets" if objective is None else objective.rows
    done, count = 0, -(-sum(store.document_count for store in (*stores, *mismatched)) // share[1])

    def batches(store: TokenStore) -> Iterator[MicroBatch]:
        nonlocal done
        for batch in evaluation_batches(store, **sizes):
            yield context_shard(batch)
            done += len(batch.origins)
            if progress:
                progress(min(done, count), count)

    results = []
    for number, store in enumerate(stores):
        if isinstance(objective, Embed):
            sums = _embedding_sums(objective, model, spec, batches(store), store, device, shape, ranks)
            found = Sums(*reported(objective), *sums.tolist())
            weight = float(store.target_weights.sum())
            results.append(HeldOut(store.title, found.loss, weight, len(store), found.figures))
            continue
        baseline = None
        if mismatched:
            each = (risen(model, one, spec, device, shape) for one in batches(mismatched[number]))
            above, compared = ranks.sum(sum(each))
            baseline = (above / compared).clamp(min=0)
        totals = _Totals(objective, device)
        for batch in batches(store):
            scoring = objective and scoring_of(objective, batch, device, sources=1, baseline=baseline)
            inputs = to_device(batch, device, shape)
            total, losses_n = token_losses(model, inputs, spec, weigh=scoring)
            if scoring is not None:
                totals.add_scored(scoring)
                continue
            totals.add(total, batch)
            if documents is not None:
                documents |= by_document(number, batch, inputs, losses_n)
            if tokens is not None:
                tokens.see(number, store.title, batch, losses_n)
        copies = ranks.count // (share[1] * context_shard.ranks)  # ranks that share a model all know its losses
        results.append(totals.result(store, ranks, copies))
    return results


class _Totals:
    """What the micro-batches of a data set add up to, on the device."""

    def __init__(self, objective: Objective | None, device: torch.device):
        self.objective, self.device = objective, device
        self.names, self.is_loss = reported(objective) if objective else (("loss",), (True,))
        self.sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)
        """The sum of each of the names, and what it is to be divided by."""
        labels = len(objective.labels) if isinstance(objective, ClassifyTokens) else 0
        self.counts = torch.zeros(3, labels, dtype=torch.float64, device=device)
        """Counts of labels, as in `TagScoring.counts`."""

    def add(self, total: torch.Tensor, batch: MicroBatch) -> None:
        self.sums[0] += total.double()
        self.sums[1] += batch.weights.double().sum().item()

    def add_scored(self, scoring: Scoring) -> None:
        if scoring.sums is not None and scoring.weights is not None:
            self.sums[0] += scoring.sums[:, 0]
            self.sums[1] += scoring.weights[:, 0].to(self.device)
        if isinstance(scoring, TagScoring) and scoring.counts is not None:
            self.counts += scoring.counts

    def result(self, store: TokenStore, ranks: Ranks, copies: int) -> HeldOut:
        """Over all ranks, `copies` of which have added the same."""
        found = Sums(self.names, self.is_loss, *(ranks.sum(self.sums) / copies).tolist())
        figures = found.figures
        if isinstance(self.objective, ClassifyTokens):
            figures |= self.objective.f1((ranks.sum(self.counts) / copies).tolist())
        weight = found.weights[0] if self.objective is None else float(store.target_weights.sum())
        return HeldOut(store.title, found.loss, weight, len(store), figures)


def _embedding_sums(
    objective: Embed,
    model: nn.Module,
    spec: ForwardSpec,
    batches: Iterator[MicroBatch],
    store: TokenStore,
    device: torch.device,
    shape: Shape | None,
    ranks: Ranks,
) -> torch.Tensor:
    """[2, K]: sums over a data set, and what they are to be divided by; the same on all ranks."""
    count = store.document_count
    vectors_dh, facts_d4 = torch.zeros(count, 0), torch.zeros(count, 4, dtype=torch.int64)
    for batch in batches:
        lengths_d = lengths_of(batch)
        found_dh = pooled(model, to_device(batch, device, shape), spec, moved(lengths_d, device)).cpu()
        if not vectors_dh.shape[1]:
            vectors_dh = torch.zeros(count, found_dh.shape[1])
        numbers_d = batch.numbers[: len(lengths_d)]
        vectors_dh[numbers_d], facts_d4[numbers_d] = found_dh, facts_of(batch)
    vectors_dh, facts_d4 = ranks.sum(vectors_dh), ranks.sum(facts_d4)
    sums = torch.zeros(2, len(reported(objective)[0]), dtype=torch.float64)
    for first in range(0, len(store), COMPARED):
        last = min(first + COMPARED, len(store)) - 1
        some = slice(store.documents(first).start, store.documents(last).stop)
        compared = batch_loss(
            objective, embedded(vectors_dh[some], facts_d4[some]), torch.zeros(len(facts_d4[some])).long(), sources=1
        )
        sums += torch.stack([compared.sums[:, 0], compared.weights[:, 0]])
    return sums


def by_document(
    store: int, batch: MicroBatch, inputs: Inputs, losses_n: torch.Tensor
) -> dict[str, tuple[float, float]]:
    """Loss and weight of each document, by the numbers of its data set and of itself in that (`0:17`)."""
    count = inputs.boundaries.shape[0] - 1
    owners_n = torch.bucketize(inputs.rows, inputs.boundaries[1:], right=True)
    both = torch.stack([losses_n.double() * inputs.weights, inputs.weights.double()])
    sums = torch.zeros(2, count, dtype=torch.float64, device=both.device).index_add(1, owners_n, both).tolist()
    found = zip(batch.numbers.tolist(), *sums, strict=False)  # padding is documents at the end
    return {f"{store}:{number}": (loss, weight) for number, loss, weight in found if weight > 0}


def overall(results: Sequence[HeldOut]) -> float:
    """Loss over all data sets: over their target tokens, or, where an objective counts by examples, over these."""
    return mean_of(results, [result.loss for result in results])


def overall_figures(results: Sequence[HeldOut]) -> dict[str, float]:
    """The figures that the objective reports, over all data sets."""
    names = dict.fromkeys(name for result in results for name in result.figures)
    having = {name: [result for result in results if name in result.figures] for name in names}
    return {name: mean_of(some, [result.figures[name] for result in some]) for name, some in having.items()}


def mean_of(results: Sequence[HeldOut], values: Sequence[float]) -> float:
    weights = [result.examples if result.figures else result.target_tokens for result in results]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
