"""Refuse data that would train silently wrong, and warn about what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.data.chat import Encoder
from tunesmith.data.types import Completion, Conversation, Document, Example, Record, Tokens


def check_encoder(encoder: Encoder, tokenizer: Any, vocab_size: int) -> list[str]:
    """Before any data is read: tokenizer, template and model fit together. Raises UserError; gives warnings."""
    raise NotImplementedError


@dataclass
class Watch:
    """What was seen while a data set was tokenized. Small, picklable; workers' watches are merged in order."""

    end_ids: frozenset[int]
    """`Encoder.end_ids`."""
    vocab_size: int

    def see(
        self, record: Record, item: Conversation | Document | Completion | Tokens, example: Example
    ) -> None:
        """Look at one example before it is cut to length; raises UserError for an id out of the vocabulary."""
        raise NotImplementedError

    def merge(self, other: Watch) -> None:
        """Add what another watch saw in later records of the same data set."""
        raise NotImplementedError

    def warnings(self) -> list[str]:
        raise NotImplementedError


def check_dataset(title: str, watch: Watch) -> None:
    """Raises UserError when the data set has no examples, no targets or never an end-of-turn target."""
    raise NotImplementedError


def example_hash(example: Example) -> int:
    """64 bits that identify the example's tokens."""
    raise NotImplementedError


def overlap_warnings(train: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray]) -> list[str]:
    """Data set title -> uint64 example hashes, for training and held-out data: what is in both."""
    raise NotImplementedError
