"""Embeddings: texts that belong together should lie closer than all others of the step (InfoNCE, in-batch negatives).

The losses are those of sentence-transformers: MultipleNegativesRankingLoss over anchors and their positives, with the
hard negatives where the data have them; CosineSimilarityLoss for pairs with a score; MatryoshkaLoss around both where
leading dimensions are to work by themselves. A batch is the whole optimizer step, over all its micro-batches and ranks:
`model.embedding` brings the embeddings together.

One thing is added to them. A candidate that is the same text as an anchor's positive, or the positive of the same
anchor in another record, is no negative of that anchor: it is left out. Of a batch without duplicates, which
sentence-transformers' NO_DUPLICATES sampler makes, the losses are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunesmith.config.schema import Embedding
from tunesmith.objectives.base import Column, Objective, Rows

if TYPE_CHECKING:
    from torch import Tensor

RANKED = 2.0
"""The value of texts without a score (`Example.values`), which no cosine is."""
AT_A_TIME = 1024
"""Anchors whose similarities to all candidates are in memory together."""


@dataclass(frozen=True)
class Embedded:
    """The documents of a step, or of another batch, in any order but for each example's, which stand together: anchor,
    positive, negatives. Legend: D documents, H hidden, E examples, C candidates, K columns."""

    vectors_dh: Tensor
    """fp32, as they were pooled; what the gradient is taken by"""
    parts_d: Tensor
    """int64: the number of each document within its example"""
    values_d: Tensor
    """float64: the score of a pair, or `RANKED`"""
    keys_d: Tensor
    """int64: equal where texts are"""


@dataclass(frozen=True)
class Embed(Objective):
    embedding: Embedding = field(default_factory=Embedding)

    name = "embed"
    why = (
        "texts are compared with all others of their step: where that has several micro-batches, all are embedded "
        "once without a gradient before, so that a step is one batch however it is cut"
    )
    records = "related"
    documents = 2
    has_embeddings = True
    rate = 0.5

    @property
    def rows(self) -> Rows:
        return "ends" if self.embedding.pooling == "last" else "all"

    def sizes(self, hidden: int) -> list[int]:
        """How many leading dimensions are learned, each time: all of them, and those that are to work alone."""
        return [hidden, *self.embedding.matryoshka]

    def losses(self, batch: Embedded) -> Iterator[tuple[Tensor, Mapping[str, Column]]]:
        """Some examples at a time: which they are [E], and their loss and figures. Whoever takes gradients does so
        between them."""
        import torch

        firsts_e = torch.nonzero(batch.parts_d == 0).squeeze(1)
        is_ranked_e = batch.values_d[firsts_e] == RANKED
        for kind, of in ((is_ranked_e, self._ranked), (~is_ranked_e, self._scored)):
            examples = torch.nonzero(kind).squeeze(1)
            for some in examples.split(AT_A_TIME) if len(examples) else ():
                yield some, of(batch, firsts_e[some])

    def _ranked(self, batch: Embedded, anchors_e: Tensor) -> Mapping[str, Column]:
        import torch
        from torch.nn.functional import cross_entropy, normalize

        is_ranked_d = batch.values_d == RANKED
        candidates_c = torch.nonzero((batch.parts_d > 0) & is_ranked_d).squeeze(1)
        own_e = torch.searchsorted(candidates_c, anchors_e + 1)
        is_left_out_ec = _same(batch, anchors_e, candidates_c)
        is_left_out_ec[torch.arange(len(own_e), device=own_e.device), own_e] = False
        total_e, right_e = 0.0, None
        for size in self.sizes(batch.vectors_dh.shape[1]):
            anchors_eh = normalize(batch.vectors_dh[anchors_e, :size], dim=-1)
            candidates_ch = normalize(batch.vectors_dh[candidates_c, :size], dim=-1)
            logits_ec = (anchors_eh @ candidates_ch.T / self.embedding.temperature).masked_fill(
                is_left_out_ec, -torch.inf
            )
            total_e = total_e + cross_entropy(logits_ec, own_e, reduction="none").double()
            if right_e is None:
                right_e = (logits_ec.detach().argmax(-1) == own_e).double()
        assert right_e is not None
        return _columns(total_e, right_e, torch.zeros_like(right_e))

    def _scored(self, batch: Embedded, anchors_e: Tensor) -> Mapping[str, Column]:
        import torch
        from torch.nn.functional import cosine_similarity

        scores_e = batch.values_d[anchors_e]
        total_e, error_e = 0.0, None
        for size in self.sizes(batch.vectors_dh.shape[1]):
            found_e = cosine_similarity(batch.vectors_dh[anchors_e, :size], batch.vectors_dh[anchors_e + 1, :size])
            off_e = found_e.double() - scores_e
            total_e = total_e + off_e.square()
            error_e = off_e.detach().abs() if error_e is None else error_e
        assert error_e is not None
        return _columns(total_e, torch.zeros_like(error_e), error_e)


NAMES = ("loss", "accuracy", "error")
IS_LOSS = (True, False, False)


def _columns(losses_e: Tensor, right_e: Tensor, error_e: Tensor) -> Mapping[str, Column]:
    """`accuracy`: the share of anchors to which nothing is closer than their positive. `error`: of the cosine."""
    return {
        "loss": Column(losses_e, "examples", is_loss=True),
        "accuracy": Column(right_e, "pairs"),
        "error": Column(error_e, "scored"),
    }


def _same(batch: Embedded, anchors_e: Tensor, candidates_c: Tensor) -> Tensor:
    """bool [E, C]: candidates that are no negatives: the text of the anchor's positive, or a positive of its text."""
    keys_c = batch.keys_d[candidates_c]
    is_positive_c = batch.parts_d[candidates_c] == 1
    # Of a positive, the anchor stands right before it.
    anchor_keys_c = batch.keys_d[candidates_c - 1]
    same_text = batch.keys_d[anchors_e + 1][:, None] == keys_c
    same_anchor = (batch.keys_d[anchors_e][:, None] == anchor_keys_c) & is_positive_c
    return same_text | same_anchor
