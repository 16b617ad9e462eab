"""What an objective is: the records it is trained on, its loss as a function of log-probabilities, and its figures.

Everything an objective knows is here, so that the step, the loader, the planner and evaluation need not know which one
they serve. Its loss never sees logits. The step computes the loss of every target token without a gradient, gives the
objective these, and takes the gradient of what it makes of them by each; a second pass over the output head, with that
gradient as the tokens' weights, then is the gradient of the whole (`model.scoring`). So a loss may be any function of
the tokens' log-probabilities, and no more than one chunk of logits exists at a time.

A loss is a sum over examples, or over tokens, divided by what the whole optimizer step has of them, over all
micro-batches and ranks: how a step is cut changes nothing.

No torch when imported: the planner asks objectives what they need.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from tunesmith.config.schema import Preference

if TYPE_CHECKING:
    from torch import Tensor

Records = Literal["texts", "pairs", "judged", "ranked", "labelled", "prompts", "related", "tagged"]
"""Texts and conversations; two answers to a prompt, one of them better; answers that are wanted or not; pairs or
answers with a score; texts with a label; prompts, with what an answer is checked by; texts that belong together;
words, each with a label."""
Rows = Literal["targets", "ends", "all", "tagged"]
"""The tokens whose hidden states count: those that predict a target, the last of each document, all, or those that have
a label of their own."""
Divisor = Literal["examples", "tokens", "wanted", "unwanted", "pairs", "scored"]
"""What a sum is divided by: examples, target tokens of wanted answers, answers of one kind, or examples of one kind."""


@dataclass(frozen=True)
class Answers:
    """The documents of a micro-batch, as an objective sees them; float64. Legend: N target tokens, D documents, E
    examples.

    The documents of an example stand together: of pairs, the chosen and the rejected answer in turn.
    """

    logps_n: Tensor
    """Log-probability of each target token, document after document; what the gradient is taken by"""
    weights_n: Tensor
    """Weight of each in its answer; 0 for tokens of prompts"""
    text_weights_n: Tensor
    """Weight of each in its text: of prompts' tokens too, where these count (`Objective.counts_prompts`)"""
    lengths_d: Tensor
    """int64: how many of these tokens each document has"""
    references_d: Tensor
    """What the reference gives it; 0 without one."""
    values_d: Tensor
    """1 for an answer that is wanted, 0 for one that is not."""
    baseline: Tensor
    """How much more likely than for the reference an answer has become to a prompt it does not belong to."""
    advantages_d: Tensor | None = None
    """How much better each answer is than others to its prompt, where the model itself has given them."""
    sampled_n: Tensor | None = None
    """Log-probability of each target token before the first update with these answers; None: as it is now."""
    references_n: Tensor | None = None
    """What the reference gives each target token."""
    sampler_n: Tensor | None = None
    """Log-probability with which each target token was drawn, where another engine than the trainer has answered."""

    @cached_property
    def logps_d(self) -> Tensor:
        """Log-probability of each answer: the weighted sum over its target tokens."""
        return self.by_document(self.logps_n * self.weights_n)

    @cached_property
    def text_logps_d(self) -> Tensor:
        """Log-probability of each answer with its prompt's tokens, where these count."""
        return self.by_document(self.logps_n * self.text_weights_n)

    @cached_property
    def targets_d(self) -> Tensor:
        """Target tokens of each answer, by their weights."""
        return self.by_document(self.weights_n)

    def by_document(self, each_n: Tensor) -> Tensor:
        """Sums over each document's tokens; in the same order each time, as adding by index on a GPU is not."""
        import torch

        return torch.segment_reduce(each_n, "sum", lengths=self.lengths_d, unsafe=True)

    def pairs(self, each_d: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen and rejected."""
        return each_d[0::2], each_d[1::2]


@dataclass(frozen=True)
class Scores:
    """What a head gives the documents of a micro-batch, in fp32. Legend: L outputs of the head."""

    scores_dl: Tensor
    """At the last token of each document; what the gradient is taken by"""
    values_d: Tensor
    """float64: the number of its label, its score, or of a pair's first answer the margin"""
    firsts_e: Tensor
    """int64: the first document of each example"""
    is_pair_e: Tensor
    """Whether it has another one"""


@dataclass(frozen=True)
class Tags:
    """What a head gives the labelled tokens of a micro-batch, document after document."""

    scores_nl: Tensor
    """fp32; what the gradient is taken by"""
    labels_n: Tensor
    """int64: the number of each one's label"""
    lengths_d: Tensor
    """int64: how many of them each document has"""


class Column(NamedTuple):
    """A sum over examples [E], and what it is to be divided by."""

    each_e: Tensor
    divisor: Divisor
    is_loss: bool = False
    """Part of the loss; else a figure to look at."""


@dataclass(frozen=True)
class Objective(ABC):
    """One way to learn. Stateless: what it returns depends on its settings and arguments alone."""

    settings: Preference

    name: ClassVar[str]
    why: ClassVar[str] = ""
    """What the plan says of it: what it computes besides the steps of SFT."""
    records: ClassVar[Records] = "texts"
    has_reference: ClassVar[bool] = False
    """It compares with the model as it is before training: each document's log-probability is computed once."""
    has_teacher: ClassVar[bool] = False
    """It learns from the probabilities of another model (`kernels.linear_distillation`)."""
    has_rollouts: ClassVar[bool] = False
    """It is trained on answers that the model gives while it is trained, and that are checked."""
    has_head: ClassVar[bool] = False
    """It trains a new head over some tokens of each document (`rows`), in place of the one that predicts tokens."""
    has_embeddings: ClassVar[bool] = False
    """It compares what the model makes of whole texts, over a whole step, and needs no head (`model.embedding`)."""
    has_baseline: ClassVar[bool] = False
    """It compares with answers to other prompts: before each step these are computed, without a gradient."""
    counts_prompts: ClassVar[bool] = False
    """The prompts of wanted answers are targets of its SFT loss, too."""
    rate: ClassVar[float] = 1.0
    """The learning rate that is usual for this objective, as a share of SFT's."""
    documents: ClassVar[int] = 1
    """Documents of an example."""

    @property
    def has_pairs(self) -> bool:
        """Its examples are, or may be, two answers to one prompt."""
        return self.records in ("pairs", "ranked")

    @property
    def is_token_sum(self) -> bool:
        """Its loss is the mean over target tokens, for which the gradient is known in one pass over the head."""
        return False

    @property
    def is_on_policy(self) -> bool:
        """The model itself answers, in steps of its training."""
        return self.has_rollouts

    @property
    def rows(self) -> Rows:
        return "ends" if self.has_head else "targets"

    def columns(self, answers: Answers) -> Mapping[str, Column]:
        """The loss, in one part or several, and figures: each a sum over examples."""
        raise NotImplementedError

    def columns_of_scores(self, scores: Scores) -> Mapping[str, Column]:
        """`columns` of an objective with a head of its own over the last token."""
        raise NotImplementedError

    def columns_of_tags(self, tags: Tags) -> Mapping[str, Column]:
        """`columns` of an objective whose head is over tokens with labels."""
        raise NotImplementedError


def rewards(chosen_e: Tensor, rejected_e: Tensor) -> dict[str, Column]:
    """Figures of pairs: the share in which the chosen answer has the higher reward (ties count half), by how much, and
    the rewards."""
    chosen_e, rejected_e = chosen_e.detach(), rejected_e.detach()
    return {
        "accuracy": Column(share_above_0(chosen_e - rejected_e), "examples"),
        "margin": Column(chosen_e - rejected_e, "examples"),
        "reward_chosen": Column(chosen_e, "examples"),
        "reward_rejected": Column(rejected_e, "examples"),
    }


def share_above_0(each: Tensor) -> Tensor:
    return (each.sign() + 1) / 2


def pair_loss(margin_e: Tensor, loss: str, beta: float, label_smoothing: float) -> Tensor:
    """The loss of each pair by how much more likely its chosen answer is: the usual choices, as TRL defines them."""
    from torch.nn.functional import logsigmoid

    if loss == "hinge":
        return (1 - beta * margin_e).relu()
    if loss == "ipo":
        return (margin_e - 1 / (2 * beta)).square()
    right, wrong = -logsigmoid(beta * margin_e), -logsigmoid(-beta * margin_e)
    if loss == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def sft_column(answers: Answers, weight: float) -> dict[str, Column]:
    """The SFT loss of the chosen answers, beside that of the pairs."""
    if not weight:
        return {}
    chosen_e, _ = answers.pairs(answers.text_logps_d)
    return {"sft_loss": Column(-weight * chosen_e, "tokens", is_loss=True)}
