"""Documents as rows of tokens, for calibration and for perplexity: one a row, filled up to the right, so that nothing
of one is seen by another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tunesmith.data.store import TokenStore


@dataclass(frozen=True)
class Rows:
    """Legend: B rows, T places."""

    ids_bt: torch.Tensor
    weights_bt: torch.Tensor
    """How much each token counts as a target."""
    is_text_bt: torch.Tensor
    """Places that hold tokens of the document."""

    def __len__(self) -> int:
        return self.ids_bt.shape[0]

    @property
    def tokens(self) -> int:
        return int(self.is_text_bt.sum())

    def __getitem__(self, some: slice) -> Rows:
        return Rows(self.ids_bt[some], self.weights_bt[some], self.is_text_bt[some])

    def filled(self, length: int) -> Rows:
        """The same rows with so many places."""
        more = (0, length - self.ids_bt.shape[1])
        return Rows(*(torch.nn.functional.pad(one, more) for one in (self.ids_bt, self.weights_bt, self.is_text_bt)))


def rows_of(examples: Sequence[tuple[list[int], list[float]]]) -> Rows:
    longest = max((len(ids) for ids, _ in examples), default=1)
    ids_bt = torch.zeros(len(examples), longest, dtype=torch.long)
    weights_bt, is_text_bt = torch.zeros(len(examples), longest), torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, (ids, weights) in enumerate(examples):
        ids_bt[row, : len(ids)] = torch.tensor(ids)
        weights_bt[row, : len(ids)] = torch.tensor(weights)
        is_text_bt[row, : len(ids)] = True
    weights_bt[:, 0] = 0  # nothing comes before it
    return Rows(ids_bt, weights_bt, is_text_bt)


def examples_of(stores: Sequence[TokenStore], *, length: int) -> Iterator[tuple[list[int], list[float]]]:
    """Some of each data set in turn, the same ones each time; those without a target tell nothing."""
    for number in range(max((len(store) for store in stores), default=0)):
        for store in stores:
            if number < len(store):
                ids, weights = store.document(store.documents(number)[0])  # of a pair, the first
                ids, weights = ids[:length].tolist(), weights[:length].tolist()
                if len(ids) > 1 and any(weights[1:]):
                    yield ids, weights
