"""Speculative decoding: tokens proposed for a request, which the model then reads all at once.

Proposals come from the request's own text (prompt lookup: what followed the same few tokens before) or from a smaller
model. At each place the request chooses its token as ever, from the model's logits and with its own random number, and
what was proposed beyond the first other choice is dropped. So answers are those of decoding one by one, drawn ones as
well: a token that was proposed is taken as often as the model would have taken it, which for a proposal of one token is
what rejection sampling does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tunesmith.infer.cache import Row, regroup
from tunesmith.infer.call import Call

NGRAMS = (3, 2)
"""Tokens that must have come before in the same order, the longer ones first."""
MOST = 8
"""Tokens that are proposed at once."""
LONGEST_PAUSE = 64
"""Tokens for which a request whose proposals were wrong again and again has none."""
LONGEST_REST = 512
"""Steps for which a batch in which proposals cost more than they bring has none."""


class Lookup:
    """Proposals from what a request has read and written so far."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """The place after each run of tokens, where it came last; without the run at the very end."""
        self._size = MOST // 2
        self._pause = self._waits = 0
        self._has_proposed = False
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        for size in NGRAMS:
            if len(self.tokens) >= size:
                self._after[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)

    def propose(self, most: int) -> list[int]:
        self._has_proposed = False
        if self._waits > 0:
            self._waits -= 1
            return []
        for size in NGRAMS:
            begin = self._after.get(tuple(self.tokens[-size:])) if len(self.tokens) >= size else None
            if begin is not None:
                self._has_proposed = True
                period = len(self.tokens) - begin  # beyond the end of what there is, it repeats itself
                return [self.tokens[begin + place % period] for place in range(min(self._size, most))]
        return []

    def learn(self, proposed: int, accepted: int) -> None:
        """More at once after proposals that were right, and fewer, or none for a while, after wrong ones. What a draft
        model proposed teaches nothing of this."""
        if not self._has_proposed:
            return
        if accepted == proposed:
            self._size = min(2 * self._size, MOST)
        else:
            self._size = max(2, accepted)
        self._pause = 0 if accepted else min(max(2 * self._pause, 1), LONGEST_PAUSE)
        self._waits = self._pause


@dataclass
class Pace:
    """Whether steps with proposals make more tokens a second than steps without: by what both took lately, apart for
    batches of different sizes. Until steps without have been timed, there are none with."""

    plain: dict[int, float] = field(default_factory=dict)
    """Tokens a second."""
    wide: dict[int, float] = field(default_factory=dict)
    rest: dict[int, int] = field(default_factory=dict)
    """Steps until proposals are tried again."""
    doubled: dict[int, int] = field(default_factory=dict)

    def may_try(self, rows: int) -> bool:
        size = rows.bit_length()
        return size in self.plain and self.rest.get(size, 0) <= 0

    def note(self, rows: int, tokens: int, seconds: float, *, is_wide: bool) -> None:
        size, rate = rows.bit_length(), tokens / max(seconds, 1e-9)
        kept = self.wide if is_wide else self.plain
        kept[size] = 0.8 * kept[size] + 0.2 * rate if size in kept else rate
        if not is_wide:
            self.rest[size] = self.rest.get(size, 0) - 1
        elif self.wide[size] < self.plain.get(size, 0.0):
            self.doubled[size] = self.rest[size] = min(2 * self.doubled.get(size, 2), LONGEST_REST)
        else:
            self.doubled[size] = 2


@dataclass
class Drafted:
    """What a draft model has read of the requests of one batch, row by row. Legend: B rows."""

    owners: list[Any] = field(default_factory=list)
    fed: list[list[int]] = field(default_factory=list)
    cache: Any = None

    def keep(self, owners: Sequence[Any]) -> None:
        """Without the rows of those who have left."""
        kept = [place for place, owner in enumerate(self.owners) if owner in owners]
        if len(kept) == len(self.owners):
            return
        rows = [Row(self.cache, place, len(self.fed[place])) for place in kept]
        self.owners, self.fed = [self.owners[place] for place in kept], [self.fed[place] for place in kept]
        self.cache = regroup(rows) if rows else None


class Draft:
    """A smaller model with the same vocabulary, which proposes the tokens that it finds likeliest."""

    def __init__(self, model: nn.Module, vocabulary: int, limit: int | None):
        self._call, self._vocabulary = Call(model, is_shared=True), vocabulary
        self.limit = limit

    def propose(
        self, state: Drafted, owners: Sequence[Any], texts: Sequence[Sequence[int]], count: int
    ) -> list[list[int]]:
        """`count` tokens for each text, all of which has been read then but for its last proposal."""
        if not count or (self.limit is not None and max(map(len, texts)) + count > self.limit):
            return [[] for _ in texts]
        self._take_over(state, owners, texts)
        new = [list(text[len(fed) :]) for text, fed in zip(texts, state.fed, strict=True)]
        made: list[list[int]] = [[] for _ in texts]
        while True:
            logits_bwv = self._call.go_on_with(state.cache, new, [len(fed) for fed in state.fed])
            width = max(map(len, new))
            rows = []
            for place, tokens in enumerate(new):
                state.fed[place] = [*state.fed[place], *tokens]
                rows.append(Row(state.cache, place, len(state.fed[place]), width - len(tokens)))
                likeliest = logits_bwv[place, len(tokens) - 1, : self._vocabulary].argmax()
                made[place].append(int(likeliest))
            if any(row.beyond for row in rows):
                state.cache = regroup(rows)
            if len(made[0]) == count:
                return made
            new = [tokens[-1:] for tokens in made]

    def _take_over(self, state: Drafted, owners: Sequence[Any], texts: Sequence[Sequence[int]]) -> None:
        """A row for each text, with as much of it as has been read rightly, and at least one token to be read."""
        rows, fed = [], []
        for owner, text in zip(owners, texts, strict=True):
            if owner in state.owners:
                place = state.owners.index(owner)
                read = state.fed[place]
                right = _common(read, text[:-1])
                rows.append(Row(state.cache, place, right, len(read) - right))
                fed.append(read[:right])
            else:
                start = list(text[: max(1, len(text) - 1)])
                rows.append(Row(self._call.read(start)[1], 0, len(start)))
                fed.append(start)
        if list(owners) != state.owners or any(row.beyond for row in rows):
            state.cache = regroup(rows)
        state.owners, state.fed = list(owners), fed


def _common(read: Sequence[int], text: Sequence[int]) -> int:
    """Tokens from the first on that both have; they can differ only in what was proposed last."""
    place = max(0, min(len(read), len(text)) - 2 * MOST)
    while place < min(len(read), len(text)) and read[place] == text[place]:
        place += 1
    return place
