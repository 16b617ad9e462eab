"""Items -> examples, by the records that an objective is trained on: texts, pairs of answers, judged answers, prompts.

A pair is one example of two documents, so that whatever deals out examples (packing, mixing, holding out, cutting to
length) keeps its answers together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.build import store_of
from tunesmith.data.chat import Encoder
from tunesmith.data.messages import as_conversation, asked_as_turns
from tunesmith.data.store import TokenStore
from tunesmith.data.types import (
    Asked,
    Completion,
    Conversation,
    Document,
    Example,
    Judged,
    Labelled,
    Origin,
    Preference,
    RecordError,
    Related,
    Tagged,
    Tokens,
)
from tunesmith.errors import listed
from tunesmith.objectives.embed import RANKED
from tunesmith.objectives.head import padding_id

if TYPE_CHECKING:
    from tunesmith.objectives.base import Records

CHOSEN, REJECTED = 1.0, 0.0
"""What the data say of an answer (`Example.values`)."""


def encode(
    item: Any, encoder: Encoder, origin: Origin, records: Records
) -> tuple[list[Example], list[tuple[Any, Example]]]:
    """The examples of an item, and its documents one by one with what each is the tokens of."""
    if records in ("ranked", "labelled"):
        return _to_be_scored(item, encoder, origin)
    if records == "tagged":
        return _to_be_tagged(item, encoder, origin)
    if records == "related":
        return _to_be_embedded(item, encoder, origin)
    if records == "prompts":
        return _to_be_answered(item, encoder, origin)
    if records == "texts":
        made = encoder.encode_all(item, origin)
        return made, [(item, example) for example in made]
    documents = [(answer, value, _document(answer, encoder, origin)) for answer, value in _answers(item)]
    seen = [(answer, example) for answer, _, example in documents]
    if records == "judged":
        return [Example(one.ids, one.weights, origin, values=(value,)) for _, value, one in documents], seen
    joined = Example(
        np.concatenate([one.ids for _, _, one in documents]),
        np.concatenate([one.weights for _, _, one in documents]),
        origin,
        tuple(len(one.ids) for _, _, one in documents),
        tuple(value for _, value, _ in documents),
    )
    return [joined], seen


def _to_be_answered(item: Asked, encoder: Encoder, origin: Origin) -> tuple[list[Example], list[tuple[Any, Example]]]:
    """A prompt as the model is asked it, with what its record says besides."""
    messages = asked_as_turns(item.messages) if encoder.has_template else item.messages
    ids = np.array(encoder.prompt(messages, item.tools), dtype=np.int32)
    if not len(ids):
        raise RecordError("empty text", origin, "there is no token in the prompt")
    facts = json.dumps(item.facts, ensure_ascii=False, default=str)
    made = Example(ids, np.ones(len(ids), dtype=np.float32), origin, facts=facts, is_whole=True)
    return [made], [(Tokens(tuple(ids.tolist()), (True,) * len(ids)), made)]


def _to_be_embedded(item: Related, encoder: Encoder, origin: Origin) -> tuple[list[Example], list[tuple[Any, Example]]]:
    """An example for each text that belongs to the anchor: both, and what does not belong to it. Tokens are those that
    the tokenizer by itself gives, since sentence-transformers asks it so."""
    tokenizer = encoder.tokenizer
    made, seen = [], []
    for positive in item.positives:
        texts = [item.anchor, positive, *item.negatives]
        ids = [np.array(tokenizer(one, verbose=False)["input_ids"], dtype=np.int32) for one in texts]
        if not all(map(len, ids)):
            raise RecordError("empty text", origin, "there is no token in it")
        weights = [np.ones(len(one), dtype=np.float32) for one in ids]
        values = (RANKED if item.score is None else item.score,) * len(ids)
        sizes = tuple(map(len, ids))
        made.append(Example(np.concatenate(ids), np.concatenate(weights), origin, sizes, values, is_whole=True))
        seen += [
            (Tokens(tuple(one.tolist()), (True,) * len(one)), Example(one, some, origin))
            for one, some in zip(ids, weights, strict=True)
        ]
    return made, seen


def _to_be_tagged(item: Tagged, encoder: Encoder, origin: Origin) -> tuple[list[Example], list[tuple[Any, Example]]]:
    """The words as a text, with spaces between them, as the tokenizer by itself reads it; a label is at the first token
    of its word. A word without a token of its own, such as a joiner that the tokenizer drops, has none."""
    starts = np.cumsum([0, *(len(word) + 1 for word in item.words)]).tolist()
    encoded = encoder.tokenizer(" ".join(item.words), verbose=False)
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    weights = np.zeros(len(ids), dtype=np.float32)
    taken = set()
    for word, tag, start in zip(item.words, item.tags, starts[:-1], strict=True):
        found = (encoded.char_to_token(start + place) for place, char in enumerate(word) if not char.isspace())
        token = next((one for one in found if one is not None), None)
        if token is None or token in taken:  # part of the token of the word before
            continue
        taken.add(token)
        if tag is not None:
            weights[token] = 1 + _value_of(tag, encoder, origin, "a tag")
    if not len(ids):
        raise RecordError("empty text", origin, "there is no token in it")
    made = Example(ids, weights, origin, is_tagged=True)
    return [made], [(Tokens(tuple(ids.tolist()), tuple((weights > 0).tolist())), made)]


def _to_be_scored(
    item: Preference | Labelled, encoder: Encoder, origin: Origin
) -> tuple[list[Example], list[tuple[Any, Example]]]:
    """Documents whose last token is scored: of a pair both answers, with the margin as the first one's value."""
    if isinstance(item, Preference):
        ids = [_without_padding(_ids_of(one, encoder, origin), encoder) for one in (item.chosen, item.rejected)]
        values = (item.margin, 0.0)
    else:
        ids = [_without_padding(_ids_of(item.text, encoder, origin), encoder)]
        is_named = item.name is not None and item.name in encoder.labels
        values = (_value_of(item.name if is_named else item.label, encoder, origin),)
    if not all(map(len, ids)):
        raise RecordError("empty text", origin, "there is no token in it")
    weights = [np.ones(len(one), dtype=np.float32) for one in ids]
    sizes = tuple(map(len, ids)) if len(ids) > 1 else ()
    joined = Example(np.concatenate(ids), np.concatenate(weights), origin, sizes, values, is_whole=True)
    seen = [
        (Tokens(tuple(one.tolist()), (True,) * len(one)), Example(one, some, origin))
        for one, some in zip(ids, weights, strict=True)
    ]
    return [joined], seen


def _ids_of(text: Conversation | Document | Completion, encoder: Encoder, origin: Origin) -> np.ndarray:
    """The token ids of a text as whoever asks the model later gets them: from the tokenizer's chat template, or from
    the tokenizer alone."""
    if isinstance(text, Completion) and encoder.has_template:
        text = as_conversation(text)
    if isinstance(text, Conversation):
        return np.array(encoder.whole(text, origin), dtype=np.int32)
    made = encoder.encode(text, origin).ids
    end = len(made)
    while isinstance(text, Document) and end and int(made[end - 1]) in encoder.end_ids:
        end -= 1
    return made[:end]


def _without_padding(ids: np.ndarray, encoder: Encoder) -> np.ndarray:
    """transformers scores the last token that is not the padding token, so no document may end with that."""
    end, padding = len(ids), padding_id(encoder.tokenizer)
    while end and int(ids[end - 1]) == padding:
        end -= 1
    return np.asarray(ids[:end], dtype=np.int32)


def _value_of(label: str | float, encoder: Encoder, origin: Origin, name: str = "`label`") -> float:
    names = encoder.labels
    if not names:  # a score
        return float(label)
    if isinstance(label, str) and label in names:
        return float(names.index(label))
    is_number = not isinstance(label, str) or re.fullmatch("[0-9]{1,9}", label)  # columns of text hold numbers so
    if is_number and 0 <= float(label) < len(names):
        return float(label)
    known = f"`labels` ({listed(names, most=20)})"
    reason = f"{name} is {label!r}, which is not among {known}, where every class has to be"
    raise RecordError("unknown label", origin, reason)


def mismatched(store: TokenStore, sequence_length: int) -> TokenStore:
    """Every prompt of the store with the answer to another: the same one always, and far from it in the store, where
    neighbours may be answers to the same prompt."""
    count = len(store)
    shift = max(1, round(count * 0.618)) % count if count > 1 else 0
    made = []
    for index in range(count):
        (first, *_), (other, *_) = store.documents(index), store.documents((index - shift) % count)
        (ids, weights), (their_ids, their_weights) = store.document(first), store.document(other)
        begins, others_begin = (int((w[1:] > 0).argmax()) + 1 for w in (weights, their_weights))
        both = np.concatenate([ids[:begins], their_ids[others_begin:]])[:sequence_length]
        counted = np.concatenate([np.zeros(begins, np.float32), their_weights[others_begin:]])[:sequence_length]
        file, _, place = store.origin(index).rpartition(", ")
        unit, line = place.split(" ")
        made.append(Example(both, counted, Origin(file, int(line), unit)))
    return store_of(made, store.title)


def _answers(item: Preference | Judged) -> Iterator[tuple[Conversation | Completion, float]]:
    if isinstance(item, Preference):
        yield item.chosen, CHOSEN
        yield item.rejected, REJECTED
    else:
        yield item.answer, CHOSEN if item.is_desirable else REJECTED


def _document(answer: Conversation | Completion, encoder: Encoder, origin: Origin) -> Example:
    made = encoder.encode_all(answer, origin)
    if len(made) != 1:
        raise RecordError(
            "answer of several turns",
            origin,
            "the chat template writes the turns of this answer differently once they are not the last, so they cannot "
            "be compared as one; give answers of one turn",
        )
    if not (made[0].weights[1:] > 0).any():
        raise RecordError("no answer", origin, "an answer has no target token, so there is nothing to compare")
    return made[0]
