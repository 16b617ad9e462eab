"""The next token of each row of a batch, and the log-probabilities that were asked for.

A request draws one number of its own for each token; it seeds a noise for each token of the vocabulary, and the token
with the largest probability over noise is taken (exponential noise: the Gumbel-max trick), which is each as often as it
is likely. So what is drawn depends on the request's seed alone, never on what else is in the batch: logits that differ
in their last bits, as those of other batches do, choose another token only where the first two are that close.

Legend: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float | None = None
    """Of the model itself: before temperature and top_p."""
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

    @property
    def is_likeliest(self) -> bool:
        """Whether it is the token with the largest logit, of which nothing else is told."""
        return self.temperature <= 0 and self.top is None and self.allowed_v is None


def choose(
    logits_bv: torch.Tensor, choices: Sequence[Choice], likeliest: Callable[[], list[int]] | None = None
) -> list[Token | None]:
    """A token for each row; None where the logits are no numbers. `likeliest`: gives the tokens with the largest
    logits, -1 for None, where that is known already."""
    if likeliest is not None and all(choice.is_likeliest for choice in choices):
        return [None if token < 0 else Token(token) for token in likeliest()]
    logits_bv = logits_bv.float()
    open_bv = _masked(logits_bv, choices)
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


def _masked(logits_bv: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    bound = [place for place, choice in enumerate(choices) if choice.allowed_v is not None]
    if not bound:
        return logits_bv
    masked_bv = logits_bv.clone()
    for place in bound:
        allowed_v = choices[place].allowed_v.to(logits_bv.device)
        known = min(len(allowed_v), logits_bv.shape[-1])  # an output head may have rows beyond the tokenizer's tokens
        masked_bv[place, :known].masked_fill_(~allowed_v[:known], float("-inf"))
        masked_bv[place, known:] = float("-inf")
    return masked_bv


def _drawn(logits_bv: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits_bv.device)[:, None]

    temperatures = column([max(choice.temperature, 1e-4) for choice in choices])
    probabilities_bv = torch.softmax(logits_bv / temperatures, -1)
    if any(choice.top_p < 1 for choice in choices):
        sorted_bv, order_bv = probabilities_bv.sort(dim=-1, descending=True, stable=True)
        kept_bv = (sorted_bv.cumsum(-1) - sorted_bv) < column([choice.top_p for choice in choices])
        kept_bv[:, 0] = True  # the likeliest one may always be taken
        probabilities_bv = probabilities_bv * torch.zeros_like(kept_bv).scatter_(-1, order_bv, kept_bv)
    noise_bv = torch.stack([_noise(choice.drawn, logits_bv) for choice in choices])
    return (probabilities_bv / noise_bv).argmax(-1)


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
