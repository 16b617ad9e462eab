"""Records -> conversations, documents, completions or tokens, in the formats people have."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.config.schema import Dataset, FormatName
from tunesmith.data.types import Completion, Conversation, Document, Record, Tokens

Item = Conversation | Document | Completion | Tokens


def recognise(sample: Sequence[Record], dataset: Dataset) -> FormatName:
    """The format of these records."""
    raise NotImplementedError


def convert(record: Record, format: FormatName, dataset: Dataset) -> Item:
    """What the record means."""
    raise NotImplementedError
