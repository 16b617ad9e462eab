"""The loader of prompts: step s -> the prompts that the model answers in it, on all ranks.

As with `loader`, what makes up step s is a pure function of (data, seed, s): the mixed orders of all epochs stand in
one row, of which step s takes the next prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np

from tunesmith.data.loader import MOST_EPOCHS
from tunesmith.data.mix import epoch_order, exact
from tunesmith.data.store import TokenStore
from tunesmith.errors import UserError


class Prompt(NamedTuple):
    ids: np.ndarray
    source: int
    """The data set it came from."""
    origin: str
    facts: dict[str, Any]
    """What its record says besides."""


@dataclass(frozen=True)
class PromptBatch:
    """What a step begins with."""

    step: int
    epoch: float
    prompts: tuple[Prompt, ...]


class PromptLoader:
    """Stands in the place of `loader.Loader` where the model itself gives the answers."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        *,
        seed: int,
        prompts: int,
        epochs: float = 1.0,
        steps: int | None = None,
    ):
        if not any(len(store) for store in stores):
            raise UserError("The training data holds no prompts; check the paths under `data`.")
        self._stores, self._weights, self._seed, self._per_step = tuple(stores), tuple(weights), seed, prompts
        self._recent: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        counts: list[int] = []
        wanted = None if steps is None else steps * prompts
        while len(counts) < ceil(exact(epochs)) if wanted is None else sum(counts) < wanted:
            counts.append(len(self._epoch(len(counts))[0]))
            if len(counts) > MOST_EPOCHS or (wanted is not None and wanted > MOST_EPOCHS * max(1, counts[0])):
                raise UserError("steps asks for more passes over the data than can be meant; lower it.")
        self._ends = np.cumsum(counts)
        self.total = int(self._ends[-1]) if wanted is None else wanted
        whole = len(counts) if wanted is not None else floor(exact(epochs))
        if wanted is None and whole < len(counts):
            self.total -= floor((1 - (exact(epochs) - whole)) * counts[-1])
        self.total_steps = ceil(self.total / prompts)
        ends = self._ends[:whole]
        self.epoch_ends = tuple(np.unique(-(-ends[ends <= self.total] // prompts)).tolist())

    def step(self, s: int) -> PromptBatch:
        if not 0 <= s < self.total_steps:
            raise IndexError(f"step {s} of {self.total_steps}")
        places = range(s * self._per_step, min((s + 1) * self._per_step, self.total))
        return PromptBatch(s, self.epoch_of(s), tuple(self._prompt(place) for place in places))

    def iterate(self, start: int = 0) -> Iterator[PromptBatch]:
        return (self.step(s) for s in range(start, self.total_steps))

    def epoch_of(self, s: int) -> float:
        """Passes over the data when step `s` is done."""
        done = min((s + 1) * self._per_step, self.total)
        number = int(np.searchsorted(self._ends, done))
        begin = int(self._ends[number - 1]) if number else 0
        return number + (done - begin) / (int(self._ends[number]) - begin)

    def _prompt(self, place: int) -> Prompt:
        number = int(np.searchsorted(self._ends, place, side="right"))
        sources, indices = self._epoch(number)
        at = place - (int(self._ends[number - 1]) if number else 0)
        return prompt_of(self._stores[int(sources[at])], int(indices[at]), int(sources[at]))

    def _epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._recent:
            counts = [len(store) for store in self._stores]
            self._recent[number] = epoch_order(counts, self._weights, self._seed, number)
            if len(self._recent) > 2:
                self._recent.popitem(last=False)
        return self._recent[number]


def prompt_of(store: TokenStore, index: int, source: int = 0) -> Prompt:
    ids, _ = store.document(store.documents(index)[0])
    return Prompt(ids, source, store.origin(index), store.facts(index))
