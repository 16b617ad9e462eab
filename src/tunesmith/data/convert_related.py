"""Records of texts that belong together, or are alike by so much, for embeddings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tunesmith.data.formats import WANTED
from tunesmith.data.types import (
    Origin,
    RecordError,
    Related,
)
from tunesmith.data.values import (
    as_number,
    as_text,
    first_of,
    present,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

_NEGATIVE = re.compile(r"(?:hard_?)?neg(?:atives?)?(?:_?\d+)?|negative_passages")


def convert_anchors(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Related:
    """A text with those that belong to it, and with hard negatives where the record has some."""
    anchor, name = first_of(fields, *WANTED["anchors"][0])
    anchors = _passages(anchor, name, origin)
    if "label" in fields:
        raise RecordError(
            "wrong label",
            origin,
            "a `label` beside two texts: keep the records whose texts belong together and remove it, or say `fields: "
            "{score: label}` where it is a similarity from -1 to 1",
        )
    if len(anchors) != 1:
        raise RecordError("wrong type", origin, f"`{name}` must be one text")
    positives = _passages(*first_of(fields, *WANTED["anchors"][1]), origin)
    if not positives:
        raise RecordError("no positive", origin, "there is no text that belongs to it")
    negatives = [text for field in _negatives(fields) for text in _passages(fields[field], field, origin)]
    return Related(anchors[0], tuple(positives), tuple(negatives))


def _negatives(fields: dict[str, Any]) -> list[str]:
    """Names of the fields with texts that do not belong to the anchor."""
    return [name for name in fields if _NEGATIVE.fullmatch(name) and present(fields[name])]


def convert_similar(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Related:
    """Two texts with a score that says how much they are alike, as a cosine."""
    both = [_passages(*first_of(fields, *names), origin) for names in WANTED["similar"][:2]]
    if any(len(texts) != 1 for texts in both):
        raise RecordError("wrong type", origin, "two texts with a score must each be one text")
    if negatives := _negatives(fields):
        reason = f"`{negatives[0]}` beside two texts with a score is not read; remove it, or the score"
        raise RecordError("wrong type", origin, reason)
    value, name = first_of(fields, *WANTED["similar"][2])
    score = as_number(value, name, origin)
    if not -1 <= score <= 1:
        reason = f"`{name}` is {score:g}, but a cosine lies from -1 to 1; divide the scores by their largest"
        raise RecordError("wrong number", origin, reason)
    return Related(both[0][0], (both[1][0],), score=score)


def _passages(value: Any, name: str, origin: Origin) -> list[str]:
    """The texts of a field: one or several, each as it is or as {"title": ..., "text": ...}; none where it has none."""
    texts = []
    for passage in value if isinstance(value, list) else [] if present(value) is None else [value]:
        if isinstance(passage, dict):
            parts = [passage.get("title"), first_of(passage, "text", "content", "passage")[0]]
            passage = " ".join(part for part in parts if isinstance(part, str) and part.strip())
        text = as_text(passage, name, origin)
        if not text.strip():
            raise RecordError("empty text", origin, f"`{name}` is empty, so there is nothing to embed")
        texts.append(text)
    return texts
