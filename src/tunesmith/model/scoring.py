"""An objective over one micro-batch: from the losses of its target tokens to their weights in the gradient.

The loss of each token is known first, without a gradient. Their sums over documents go to the objective; the gradient
of what it makes of them, by the loss of each token, are the weights with which `model.forward.token_losses` takes the
gradient of everything below. A document's log-probability is summed in float64: of a thousand tokens, the difference
between two answers is a small part.

Legend: N target tokens, D documents that count, E examples, S data sets, K columns of an objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from tunesmith.model.forward import Documents, Shape, moved, to_device, token_losses
from tunesmith.objectives.base import Answers, Column, Objective, Scores, Tags
from tunesmith.objectives.embed import IS_LOSS, NAMES
from tunesmith.plan.plan import ForwardSpec


class Answered(Documents, Protocol):
    """What is needed of a micro-batch; `data.types.MicroBatch` is one."""

    @property
    def sources(self) -> torch.Tensor: ...
    @property
    def parts(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def references(self) -> torch.Tensor: ...
    @property
    def answers(self) -> torch.Tensor | None: ...
    @property
    def advantages(self) -> torch.Tensor | None: ...
    @property
    def compared(self) -> torch.Tensor | None: ...
    @property
    def sampler(self) -> torch.Tensor | None: ...


class Scoring:
    """To be given to `token_losses` as what weighs; afterwards `sums` and `weights` say what the objective found."""

    def __init__(
        self,
        objective: Objective,
        batch: Answered,
        device: torch.device,
        *,
        sources: int,
        divisors: Mapping[str, float] | None = None,
        baseline: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
    ):
        """`divisors`: those of the whole step, where a gradient is wanted. `baseline`: a number, on the device.
        `sampled`: the tokens' log-probabilities before the first update, where this is a later one."""
        self.sampled = sampled
        """float64 [N]; once called, what they are or were before the first update"""
        self.objective, self.divisors, self.sources = objective, divisors, sources
        self.device = device
        self.baseline = torch.zeros((), dtype=torch.float64, device=device) if baseline is None else baseline
        self.batch = batch
        self.is_counted = batch.parts >= 0
        assert self.is_counted[: int(self.is_counted.sum())].all()
        self.sums: torch.Tensor | None = None
        """float64 [K, S], on the device; None where no document counts"""
        self.weights: torch.Tensor | None = None
        """float64 [K, S], on the host: what the sums are to be divided by"""

    def __call__(self, losses_n: torch.Tensor) -> torch.Tensor:
        """The weight of each target token's loss in the gradient; zeros where none is wanted."""
        if self.sampled is None:
            self.sampled = -losses_n.detach().double()
        if not self.is_counted.any():
            return torch.zeros_like(losses_n)
        if self.divisors is None:
            self._keep(self.objective.columns(self._answers(losses_n)))
            return torch.zeros_like(losses_n)
        with torch.enable_grad():
            leaf_n = losses_n.detach().requires_grad_()
            columns = self.objective.columns(self._answers(leaf_n))
            parts = [one.each_e.sum() / self.divisors[one.divisor] for one in columns.values() if one.is_loss]
            (weights_n,) = torch.autograd.grad(torch.stack(parts).sum(), leaf_n)
        self._keep(columns)
        return weights_n

    def _answers(self, losses_n: torch.Tensor) -> Answers:
        batch, count = self.batch, int(self.is_counted.sum())
        rows_n, lengths_d = targets_of(batch)
        assert int(lengths_d.sum()) == len(rows_n)
        weights_n = moved(batch.weights[rows_n].double(), self.device)
        each = {"advantages_d": batch.advantages, "references_n": batch.compared, "sampler_n": batch.sampler}
        rolled = {name: None if one is None else moved(one, self.device) for name, one in each.items()}
        if rolled["advantages_d"] is not None:
            rolled |= {"advantages_d": rolled["advantages_d"][:count], "sampled_n": self.sampled}
        return Answers(
            logps_n=-losses_n.double(),
            weights_n=weights_n if batch.answers is None else moved(batch.answers[rows_n].double(), self.device),
            text_weights_n=weights_n,
            lengths_d=moved(lengths_d, self.device),
            references_d=moved(batch.references[:count], self.device),
            values_d=moved(batch.values[:count], self.device),
            baseline=self.baseline,
            **rolled,
        )

    def _keep(self, columns: Mapping[str, Column]) -> None:
        batch = self.batch
        firsts_d = batch.parts == 0
        is_of_source_es = torch.nn.functional.one_hot(batch.sources[: len(firsts_d)][firsts_d], self.sources).double()
        each_ke = torch.stack([one.each_e.detach() for one in columns.values()])
        self.sums = each_ke @ moved(is_of_source_es, self.device)
        divisors = self._divisors(firsts_d)
        self.weights = torch.stack([divisors[one.divisor] for one in columns.values()]) @ is_of_source_es

    def _divisors(self, firsts_d: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of each example [E], on the host."""
        batch = self.batch
        values_d, count = batch.values[self.is_counted], int(self.is_counted.sum())
        bounds = batch.boundaries[: count + 1].long()
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), batch.weights.double().cumsum(0)])
        wanted_d = (sums[bounds[1:]] - sums[bounds[:-1]]) * (values_d > 0)
        example_d = firsts_d[self.is_counted].long().cumsum(0) - 1
        examples = int(firsts_d.sum())
        tokens_e = torch.zeros(examples, dtype=torch.float64).index_add_(0, example_d, wanted_d)
        values_e = values_d[firsts_d[self.is_counted]]
        ones_e = torch.ones(examples, dtype=torch.float64)
        return {"examples": ones_e, "tokens": tokens_e, "wanted": values_e, "unwanted": 1 - values_e}


class HeadScoring(Scoring):
    """Of an objective with a head of its own: from what that gives the last token of each document to the loss."""

    def total(self, scores_dl: torch.Tensor) -> torch.Tensor:
        """To call backward on; 0 where no document counts or no gradient is wanted."""
        if not self.is_counted.any():
            return scores_dl.float().sum() * 0.0
        columns = self._columns(scores_dl.float())
        self._keep(columns)
        if self.divisors is None:
            return scores_dl.new_zeros((), dtype=torch.float32)
        parts = [one.each_e.sum() / self.divisors[one.divisor] for one in columns.values() if one.is_loss]
        return torch.stack(parts).sum().float()

    def _columns(self, scores_dl: torch.Tensor) -> Mapping[str, Column]:
        return self.objective.columns_of_scores(self._scores(scores_dl))

    def _scores(self, scores_dl: torch.Tensor) -> Scores:
        batch, count = self.batch, int(self.is_counted.sum())
        parts_d = batch.parts[:count]
        firsts_e = torch.nonzero(parts_d == 0).squeeze(1)
        sizes_e = torch.cat([firsts_e, torch.tensor([count])]).diff()
        move = partial(moved, device=self.device)
        return Scores(scores_dl, move(batch.values[:count]), move(firsts_e), move(sizes_e > 1))

    def _divisors(self, firsts_d: torch.Tensor) -> dict[str, torch.Tensor]:
        count = int(self.is_counted.sum())
        firsts_e = torch.nonzero(firsts_d[:count]).squeeze(1)
        is_pair_e = (torch.cat([firsts_e, torch.tensor([count])]).diff() > 1).double()
        return {"examples": torch.ones_like(is_pair_e), "pairs": is_pair_e, "scored": 1 - is_pair_e}


class TagScoring(HeadScoring):
    """The same over tokens that have labels of their own."""

    counts: torch.Tensor | None = None
    """int64 [3, L], on the device: how often each label was given rightly, was given, and was right to give; None where
    no document counts"""

    def _columns(self, scores_dl: torch.Tensor) -> Mapping[str, Column]:
        rows_n, lengths_d = targets_of(self.batch)
        labels_n = moved(self.batch.labels[rows_n], self.device)
        if self.divisors is None:  # an evaluation
            given_n, outputs = scores_dl.detach().argmax(-1), scores_dl.shape[1]
            ways = (given_n[given_n == labels_n], given_n, labels_n)
            self.counts = torch.stack([torch.bincount(one, minlength=outputs) for one in ways])
        return self.objective.columns_of_tags(Tags(scores_dl, labels_n, moved(lengths_d, self.device)))

    def _divisors(self, firsts_d: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"tokens": targets_of(self.batch)[1].double()}


def scoring_of(objective: Objective, *arguments: Any, **options: Any) -> Scoring:
    kind = TagScoring if objective.rows == "tagged" else HeadScoring if objective.has_head else Scoring
    return kind(objective, *arguments, **options)


def reported(objective: Objective) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The names of what an objective reports, and which of it are its loss."""
    if objective.has_embeddings:
        return NAMES, IS_LOSS
    none = torch.zeros(0, dtype=torch.float64)
    nothing = Answers(none, none, none, none.long(), none, none, torch.zeros((), dtype=torch.float64))
    unscored = Scores(torch.zeros(0, 2), none, none.long(), none.bool())
    if objective.rows == "tagged":
        columns = objective.columns_of_tags(Tags(torch.zeros(0, 2), none.long(), none.long()))
    else:
        columns = objective.columns_of_scores(unscored) if objective.has_head else objective.columns(nothing)
    return tuple(columns), tuple(one.is_loss for one in columns.values())


def figures_of(
    names: Sequence[str], is_loss: Sequence[bool], sums: Sequence[float], weights: Sequence[float]
) -> dict[str, float]:
    """What an objective reports besides its loss; the parts of the loss, too, where it has several."""
    has_parts = sum(is_loss) > 1
    parts = zip(names, is_loss, sums, weights, strict=True)
    return {name: total / weight for name, is_part, total, weight in parts if weight and (has_parts or not is_part)}


def risen(
    model: nn.Module, batch: Answered, spec: ForwardSpec, device: torch.device, shape: Shape | None
) -> torch.Tensor:
    """By how much the log-probabilities of the documents are above the reference's, summed, and how many they are."""
    logps_d = document_logps(batch, token_losses(model, to_device(batch, device, shape), spec)[1])
    count = logps_d.shape[0]
    above = (logps_d - moved(batch.references[:count], device)).sum()
    return torch.stack([above, torch.full_like(above, count)])


def document_logps(batch: Answered, losses_n: torch.Tensor) -> torch.Tensor:
    """The log-probability of the targets of each document that counts, float64 [D]."""
    rows_n, lengths_d = targets_of(batch)
    logps_n = -losses_n.double() * moved(batch.weights[rows_n].double(), losses_n.device)
    counted_n = logps_n[: int(lengths_d.sum())]
    return torch.segment_reduce(counted_n, "sum", lengths=moved(lengths_d, losses_n.device), unsafe=True)


def targets_of(batch: Answered) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of target tokens [N], and how many of them each document that counts has [D]; on the host."""
    count = int((batch.parts >= 0).sum())
    rows_n = torch.nonzero(batch.weights).squeeze(1)
    return rows_n, torch.searchsorted(rows_n, batch.boundaries[: count + 1].long()).diff()
