"""Conversations and texts -> token ids and which of them are targets, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.data.types import Completion, Conversation, Document, Example, Message, Origin, Tokens


def read_template(path: str) -> str:
    """The text of a chat template file (`chat_template:` of the run), for `Encoder(template=...)`."""
    raise NotImplementedError


class Encoder:
    """Tokenizer + chat template + `train_on` -> examples. Picklable. `template` is the template's text."""

    fingerprint: str
    has_template: bool
    end_ids: frozenset[int]
    """Tokens that end an assistant's turn (or a document)."""

    def __init__(self, tokenizer: Any, *, template: str | None, train_on: str):
        raise NotImplementedError

    def encode(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> Example:
        """One example; turns that the template rewrites once they are not the last are not targets in it."""
        raise NotImplementedError

    def encode_all(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> list[Example]:
        """`encode`, plus one example for each turn that the template rewrites once it is not the last (reasoning
        models drop earlier reasoning), so that every turn is trained as it is generated. The one to use."""
        raise NotImplementedError

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """What the model is given to answer these messages: for chat and generation."""
        raise NotImplementedError
