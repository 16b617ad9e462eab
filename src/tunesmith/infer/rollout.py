"""Several answers to each of many prompts, decoded together from one key-value cache: what a model is trained on that
learns from its own answers.

A prompt is read once for all its answers. Each row draws numbers of its own, by a seed, so an answer does not depend on
what is decoded beside it (but for the last bits of the arithmetic). Rows that have ended leave when they are half of
all: each leaving copies the cache.

Legend: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.infer.attention import use_decoding_attention
from tunesmith.infer.cache import Row, regroup
from tunesmith.infer.call import Call
from tunesmith.infer.decoding import PLAIN, Decoding, History, processed
from tunesmith.model.forward import own_attention as own_attention_of
from tunesmith.model.lora import keep_lengths
from tunesmith.model.structure import set_attention

KEPT = 0.5
"""Share of the rows that are still going on, below which the others leave the cache."""


@dataclass(frozen=True)
class Sampled:
    ids: list[int]
    """Of the answer, the token that ended it included."""
    is_ended: bool
    """By the model itself; else it was cut off."""
    logps: list[float] | None = None
    """With which each token was drawn, where another engine has drawn them."""


@dataclass(frozen=True)
class Wanted:
    """One answer: to which of the prompts, and the seed of what it draws."""

    prompt: int
    seed: str


@dataclass
class _Row:
    wanted: Wanted
    length: int
    """Tokens in the cache."""
    draws: np.ndarray
    ids: list[int]
    is_ended: bool = False
    history: History | None = None

    def begin(self, decoding: Decoding, prompt: list[int], ends: frozenset[int], device: torch.device) -> None:
        self.history = History(decoding, prompt, ends=ends, most=len(self.draws), device=device)

    def push(self, token: int, ends: frozenset[int]) -> None:
        self.ids.append(token)
        self.is_ended = token in ends
        if self.history is not None:
            self.history.push(token)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[list[int]],
    wanted: Sequence[Wanted],
    *,
    max_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    rows: int,
    is_shared: bool,
    should_stop: Callable[[int], None] = lambda _: None,
    goes_on: Callable[[bool], bool] = bool,
    decoding: Decoding = PLAIN,
) -> list[Sampled]:
    """The answers that are wanted, so many `rows` at a time; a temperature of 0 takes the likeliest tokens, to which
    `decoding` applies: what is drawn is the model's own distribution, which training knows. The model must be in
    evaluation mode. `should_stop` is told how many answers are done, and may raise. `goes_on`: whether any
    rank still has something to do, where all must call the model as often."""
    assert temperature == 0 or decoding.is_plain
    call, done = Call(model, is_shared=is_shared, expected=max_tokens - 1), []
    rows = rows if is_shared else 1
    with own_attention(model):
        keep_lengths(model)
        try:
            for start in range(0, len(wanted), rows):
                some = [
                    _Row(one, len(prompts[one.prompt]), _draws(one.seed, max_tokens), [])
                    for one in wanted[start : start + rows]
                ]
                for row in some if not decoding.is_plain else ():
                    row.begin(decoding, prompts[row.wanted.prompt], stop_ids, call.device)
                should_stop(start)
                _decode(call, prompts, some, max_tokens, temperature, stop_ids, should_stop, start, goes_on)
                done += some
        finally:
            call.release()
            keep_lengths(model, False)
    return [Sampled(row.ids, row.is_ended) for row in done]


def _decode(
    call: Call,
    prompts: Sequence[list[int]],
    rows: list[_Row],
    max_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    should_stop: Callable[[int], None],
    done: int,
    goes_on: Callable[[bool], bool],
) -> None:
    logits_bv, cache = _begin(call, prompts, rows)
    live = list(rows)
    draws_bt = torch.tensor(np.stack([row.draws for row in rows]), device=logits_bv.device)
    for number in range(max_tokens):
        asked_bv = processed(logits_bv, [None if row.is_ended else row.history for row in live])
        for row, token in zip(live, _chosen(asked_bv, temperature, draws_bt[:, number]), strict=True):
            if not row.is_ended:
                row.push(token, stop_ids)
        should_stop(done)
        left = sum(not row.is_ended for row in live)
        if number + 1 == max_tokens or not goes_on(left > 0):
            return
        if 0 < left < KEPT * len(live):
            places = [place for place, row in enumerate(live) if not row.is_ended]
            cache = regroup([Row(cache, place, live[place].length) for place in places])
            live, draws_bt = [live[place] for place in places], draws_bt[places]
        last = [row.ids[-1] for row in live]  # of rows that have ended, anything will do
        logits_bv = call.go_on(cache, last, [row.length for row in live])
        for row in live:
            row.length += 1


def _begin(call: Call, prompts: Sequence[list[int]], rows: Sequence[_Row]):
    """The logits after each row's prompt, and a cache with a row for each."""
    if not call.is_shared:
        return call.read(prompts[rows[0].wanted.prompt])
    numbers = list(dict.fromkeys(row.wanted.prompt for row in rows))
    read_bv, cache = call.read_all([prompts[number] for number in numbers])
    places = [numbers.index(row.wanted.prompt) for row in rows]
    cache = regroup([Row(cache, place, row.length) for place, row in zip(places, rows, strict=True)])
    return read_bv[torch.tensor(places, device=read_bv.device)], cache


def _chosen(logits_bv: torch.Tensor, temperature: float, draws_b: torch.Tensor) -> list[int]:
    """The token at which the probabilities, in the order of the vocabulary, have reached each row's draw."""
    if temperature == 0:
        return logits_bv.argmax(-1).tolist()
    reached_bv = torch.softmax(logits_bv.float() / temperature, -1).double().cumsum(-1)
    wanted_b1 = draws_b[:, None] * reached_bv[:, -1:]
    at_b = torch.searchsorted(reached_bv, wanted_b1, right=True)[:, 0].clamp(max=logits_bv.shape[-1] - 1)
    chosen = at_b.where(reached_bv[:, -1].isfinite(), -1).tolist()  # the one time that the host waits for a GPU
    if -1 in chosen:
        raise UserError(
            "The model's probabilities are no finite numbers while it answers, so training stopped; a lower "
            "learning_rate or precision: fp32 usually helps."
        )
    return chosen


def _draws(seed: str, count: int) -> np.ndarray:
    """Uniform in [0, 1), by the raw output of a published algorithm, which no version changes."""
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "big")
    return (np.random.Philox(key=[key >> 64, key & (2**64 - 1)]).random_raw(count) >> np.uint64(11)) * 2.0**-53


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Rows of a cache are no packed documents: meanwhile the model has the attention it came with. Layers are run as
    they are: compiled ones would be compiled again for each length."""
    found = model.config._attn_implementation
    use_decoding_attention(model, own_attention_of(model))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        set_attention(model, found)
