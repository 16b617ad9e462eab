"""The next token of each row of a batch, and the log-probabilities that were asked for.

A request draws one number of its own for each token; it seeds a noise for each token of the vocabulary, and the token
with the largest probability over noise is taken (exponential noise: the Gumbel-max trick), which is each as often as it
is likely. So what is drawn depends on the request's seed alone, never on what else is in the batch: logits that differ
in their last bits, as those of other batches do, choose another token only where the first two are that close.

Legend: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tunesmith.infer.decoding import FIRST, LAST, History, processed


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float | None = None
    """Of the model itself: before penalties, temperature and whatever else is asked of decoding."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row chooses."""

    temperature: float
    top_p: float
    drawn: float
    """Uniform in [0, 1)."""
    top: int | None
    """So many of the likeliest tokens are told, with log-probabilities; None tells none."""
    allowed_v: torch.Tensor | None = None
    """Tokens that may be chosen (bool); None: all of them."""

    history: History | None = None
    """The tokens so far, where more is asked of decoding; None: nothing."""

    @property
    def is_likeliest(self) -> bool:
        """Whether it is the token with the largest logit, of which nothing else is told."""
        return self.temperature <= 0 and self.top is None and self.allowed_v is None and self.history is None


def choose(
    logits_bv: torch.Tensor, choices: Sequence[Choice], likeliest: Callable[[], list[int]] | None = None
) -> list[Token | None]:
    """A token for each row; None where the logits are no numbers. `likeliest`: gives the tokens with the largest
    logits, -1 for None, where that is known already."""
    if likeliest is not None and all(choice.is_likeliest for choice in choices):
        return [None if token < 0 else Token(token) for token in likeliest()]
    logits_bv = logits_bv.float()
    open_bv = _masked(processed(logits_bv, [choice.history for choice in choices]), logits_bv, choices)
    chosen_b = open_bv.argmax(-1)
    drawing = [place for place, choice in enumerate(choices) if choice.temperature > 0]
    if drawing:
        at = torch.tensor(drawing, device=logits_bv.device)
        chosen_b[at] = _drawn(open_bv[at], [choices[place] for place in drawing])
    broken = logits_bv.isnan().any(-1).tolist()
    ids = chosen_b.tolist()
    told = _told(logits_bv, chosen_b, choices) if any(choice.top is not None for choice in choices) else {}
    return [
        None if broken[place] else told.get(place, Token(ids[place])) for place in range(len(choices))
    ]  # fmt: skip


def _masked(open_bv: torch.Tensor, logits_bv: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """`open_bv`: the logits with what is asked of decoding. Where that leaves none of the tokens that may be chosen,
    the model's own logits count."""
    bound = [place for place, choice in enumerate(choices) if choice.allowed_v is not None]
    if not bound:
        return open_bv
    masked_bv = open_bv.clone()
    for place in bound:
        allowed_v = choices[place].allowed_v.to(logits_bv.device)
        known = min(len(allowed_v), logits_bv.shape[-1])  # an output head may have rows beyond the tokenizer's tokens
        forbidden_v = torch.ones(logits_bv.shape[-1], dtype=torch.bool, device=logits_bv.device)
        forbidden_v[:known] = ~allowed_v[:known]
        masked_bv[place].masked_fill_(forbidden_v, float("-inf"))
        if choices[place].history is not None:
            own_v = logits_bv[place].masked_fill(forbidden_v, float("-inf"))
            masked_bv[place] = torch.where((masked_bv[place] == float("-inf")).all(), own_v, masked_bv[place])
    return masked_bv


def _drawn(logits_bv: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits_bv.device)[:, None]

    asked = {place: choice.history for place, choice in enumerate(choices) if choice.history is not None}
    logits_bv = logits_bv / column([max(choice.temperature, 1e-4) for choice in choices])
    for place, history in asked.items():
        logits_bv[place] = history.process(FIRST, logits_bv[place])
    if any(history.decoding.top_k for history in asked.values()):
        logits_bv = _of_top_k(logits_bv, {place: one.decoding.top_k for place, one in asked.items()})
    probabilities_bv = torch.softmax(logits_bv, -1)
    if any(choice.top_p < 1 for choice in choices):
        sorted_bv, order_bv = probabilities_bv.sort(dim=-1, descending=True, stable=True)
        kept_bv = (sorted_bv.cumsum(-1) - sorted_bv) < column([choice.top_p for choice in choices])
        kept_bv[:, 0] = True  # the likeliest one may always be taken
        probabilities_bv = probabilities_bv * torch.zeros_like(kept_bv).scatter_(-1, order_bv, kept_bv)
    if any(history.decoding.min_p for history in asked.values()):
        shares = [asked[place].decoding.min_p if place in asked else 0.0 for place in range(len(choices))]
        least_b1 = column(shares) * probabilities_bv.amax(-1, keepdim=True)
        probabilities_bv = probabilities_bv.masked_fill(probabilities_bv < least_b1, 0.0)
    for place, history in asked.items():
        if not LAST.keys().isdisjoint(history.decoding.others):
            left_v = history.process(LAST, probabilities_bv[place].log())
            probabilities_bv[place] = probabilities_bv[place].masked_fill(left_v == float("-inf"), 0.0)
    noise_bv = torch.stack([_noise(choice.drawn, logits_bv) for choice in choices])
    return (probabilities_bv / noise_bv).argmax(-1)


def _of_top_k(logits_bv: torch.Tensor, counts: Mapping[int, int]) -> torch.Tensor:
    """Rows whose count is 0 have all of their tokens."""
    size = logits_bv.shape[-1]
    counts = {place: min(count, size) for place, count in counts.items() if count}
    rows = torch.tensor(list(counts), device=logits_bv.device)
    lasts_b1 = torch.tensor(list(counts.values()), device=logits_bv.device)[:, None] - 1
    least_b1 = logits_bv[rows].topk(max(counts.values()), -1).values.gather(-1, lasts_b1)
    logits_bv[rows] = logits_bv[rows].masked_fill(logits_bv[rows] < least_b1, float("-inf"))
    return logits_bv


def _noise(drawn: float, like_bv: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(like_bv.device).manual_seed(int(drawn * 2**53))
    noise_v = torch.empty(like_bv.shape[-1], device=like_bv.device)
    return noise_v.exponential_(generator=generator).clamp_(min=1e-30)


def _told(logits_bv: torch.Tensor, chosen_b: torch.Tensor, choices: Sequence[Choice]) -> dict[int, Token]:
    rows = [place for place, choice in enumerate(choices) if choice.top is not None]
    at = torch.tensor(rows, device=logits_bv.device)
    logprobs = torch.log_softmax(logits_bv[at], -1)
    own = logprobs.gather(-1, chosen_b[at, None])[:, 0].tolist()
    most = min(max(choices[place].top or 0 for place in rows), logits_bv.shape[-1])
    values, ids = logprobs.topk(max(most, 1), -1)
    made = {}
    for number, place in enumerate(rows):
        count = choices[place].top or 0
        top = tuple(zip(ids[number, :count].tolist(), values[number, :count].tolist(), strict=True))
        made[place] = Token(int(chosen_b[place]), own[number], top)
    return made
