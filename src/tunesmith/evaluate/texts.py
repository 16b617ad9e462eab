"""Losses of records, one by one, with the number of their target tokens and of the bytes that these stand for.

Records become tokens and targets as in training (`data.chat`). Sums are kept, not means, so that any set of records has
its loss, its perplexity and its bits per byte; bits per byte can be compared between models with other tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tunesmith.config.schema import Dataset
from tunesmith.data.chat import Encoder
from tunesmith.data.convert import convert
from tunesmith.evaluate.score import Document, Scorer
from tunesmith.evaluate.tasks import Item, Text

AT_ONCE = 512
"""Records whose tokens are held at a time."""


def scores(
    scorer: Scorer, encoder: Encoder, items: Sequence[Item], dataset: Dataset
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each record with the sum of its targets' losses, in nats, their number and their bytes."""
    for start in range(0, len(items), AT_ONCE):
        yield from _scores(scorer, encoder, items[start : start + AT_ONCE], dataset)


def _scores(
    scorer: Scorer, encoder: Encoder, items: Sequence[Item], dataset: Dataset
) -> Iterator[tuple[Item, dict[str, Any]]]:
    documents, owners = [], []
    sizes = {place: [0.0, 0] for place in range(len(items))}
    left = dict.fromkeys(sizes, 0)
    for place, item in enumerate(items):
        content = item.content
        assert isinstance(content, Text)
        made = convert(content.record, content.format, dataset)
        for example in encoder.encode_all(made, item.origin):
            weights = example.weights.copy()
            weights[:1] = 0  # nothing predicts the first token
            documents.append(Document(example.ids.tolist(), weights.tolist()))
            owners.append(place)
            left[place] += 1
            sizes[place][0] += float(weights.sum())
            sizes[place][1] += _bytes_of(encoder, example.ids[weights > 0])
    sums = dict.fromkeys(sizes, 0.0)
    for number, loss in scorer.losses(documents):
        place = owners[number]
        sums[place] += loss
        left[place] -= 1
        if not left[place]:
            yield items[place], _result(sums[place], *sizes[place])
    yield from ((item, _result(0.0, 0.0, 0)) for place, item in enumerate(items) if place not in set(owners))


def _result(loss: float, tokens: float, count: float) -> dict[str, Any]:
    return {"loss_sum": loss, "target_tokens": tokens, "target_bytes": int(count)}


def _bytes_of(encoder: Encoder, ids: np.ndarray) -> int:
    text = encoder.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode(errors="replace"))
