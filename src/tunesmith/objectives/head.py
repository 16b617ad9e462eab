"""Objectives with a head of their own, over the last token of each document or over words: scores and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.objectives.base import Column, Objective, Rows, Scores, Tags, share_above_0


def padding_id(tokenizer: Any) -> int | None:
    """The token with which documents of a batch are filled up, as the saved model knows it."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


class Reward(Objective):
    """The chosen answer of a pair should score higher, by Bradley and Terry's model (with a margin where the data give
    one); where an answer has a score, the head should give it."""

    name = "reward"
    why = "a head with one output is trained over the last token; a step costs less than SFT's, which has logits"
    records = "ranked"
    documents = 2
    has_head = True
    rate = 0.1

    def columns_of_scores(self, scores: Scores) -> Mapping[str, Column]:
        import torch
        from torch.nn.functional import logsigmoid

        each_d = scores.scores_dl[:, 0].double()
        count = each_d.shape[0]
        is_pair_e = scores.is_pair_e.double()
        first_e, values_e = each_d[scores.firsts_e], scores.values_d[scores.firsts_e]
        # Of an example that is no pair the second is the first itself, which counts nothing.
        seconds_e = (scores.firsts_e + scores.is_pair_e.long()).clamp(max=max(0, count - 1))
        ahead_e = first_e - each_d[seconds_e]
        losses_e = torch.where(scores.is_pair_e, -logsigmoid(ahead_e - values_e), (first_e - values_e).square())
        found_e, ahead_e = first_e.detach(), ahead_e.detach()
        return {
            "loss": Column(losses_e, "examples", is_loss=True),
            "accuracy": Column(share_above_0(ahead_e) * is_pair_e, "pairs"),
            "margin": Column(ahead_e * is_pair_e, "pairs"),
            "error": Column((found_e - values_e).abs() * (1 - is_pair_e), "scored"),
        }


class Classify(Objective):
    """The cross-entropy of each text's label."""

    name = "classify"
    why = "a head with an output a label is trained over the last token; a step costs less than SFT's, which has logits"
    records = "labelled"
    has_head = True
    rate = 0.3

    def columns_of_scores(self, scores: Scores) -> Mapping[str, Column]:
        from torch.nn.functional import cross_entropy

        labels_e = scores.values_d.long()
        losses_e = cross_entropy(scores.scores_dl, labels_e, reduction="none").double()
        is_right_e = (scores.scores_dl.detach().argmax(-1) == labels_e).double()
        return {"loss": Column(losses_e, "examples", is_loss=True), "accuracy": Column(is_right_e, "examples")}


@dataclass(frozen=True)
class ClassifyTokens(Objective):
    """The cross-entropy of each word's label, at the first token of the word; the mean over words."""

    labels: tuple[str, ...] = ()

    name = "classify_tokens"
    why = "a head with an output a label is trained over the first token of each word; there are no logits of tokens"
    records = "tagged"
    has_head = True
    rate = 0.3

    @property
    def rows(self) -> Rows:
        return "tagged"

    def columns_of_tags(self, tags: Tags) -> Mapping[str, Column]:
        import torch
        from torch.nn.functional import cross_entropy

        losses_n = cross_entropy(tags.scores_nl, tags.labels_n, reduction="none").double()
        is_right_n = (tags.scores_nl.detach().argmax(-1) == tags.labels_n).double()
        each_e = [
            torch.segment_reduce(one, "sum", lengths=tags.lengths_d, unsafe=True) for one in (losses_n, is_right_n)
        ]
        return {"loss": Column(each_e[0], "tokens", is_loss=True), "accuracy": Column(each_e[1], "tokens")}

    def f1(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """F1 of each label that was met or given, and their mean, from how often each was given rightly, was given, and
        was right to give. Counts words: of a name of three words, each by itself."""
        rows = zip(self.labels, *counts, strict=True)
        found = {f"f1_{name}": 2 * both / (given + true) for name, both, given, true in rows if given + true}
        return {"f1": sum(found.values()) / len(found), **found} if found else {}
