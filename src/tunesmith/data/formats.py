"""The formats that records may have: which fields make one, and which formats an objective can be trained on.

`fields:` of a data set renames fields to those that are wanted here. Which format a data set has is the business of
`recognise`, what a record of it means that of `convert`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tunesmith.data.types import Record

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset
    from tunesmith.objectives.base import Records

WANTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation", "messages"),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt",), ("completion", "response")),
    "question_answer": (("question",), ("answer", "answers", "response")),
    "text": (("text",),),
    "preference": (("chosen",), ("rejected",)),
    "judged": (("label",), ("completion", "response", "messages", "conversations", "conversation")),
    "scored": (("score",), ("text", "completion", "response", "messages", "conversations", "conversation")),
    "labelled": (("label",), ("text", "completion", "response", "messages", "conversations", "conversation")),
    "labelled_pair": (
        ("label",),
        ("sentence1", "premise", "question1", "text1", "text_a", "question", "query"),
        ("sentence2", "hypothesis", "question2", "text2", "text_b", "sentence", "passage", "context", "answer"),
    ),
    "prompts": (
        ("prompt", "question", "messages", "conversations", "conversation", "instruction", "query", "problem"),
    ),
    "similar": (("sentence1", "anchor"), ("sentence2", "positive"), ("score", "similarity_score", "similarity")),
    "tagged": (
        ("tokens", "words"),
        ("tags", "ner_tags", "labels", "ner", "pos_tags", "pos", "upos", "chunk_tags"),
    ),
    "anchors": (
        ("anchor", "query", "question", "sentence1"),
        ("positive", "pos", "positives", "positive_passages", "answer", "answers", "document", "passage", "sentence2"),
    ),
}
"""The fields that a record must have, format by format in the order in which they are tried; alternatives in one
tuple."""
FORMATS: dict[Records, tuple[str, ...]] = {
    "texts": ("tokens", "messages", "sharegpt", "alpaca", "prompt_completion", "question_answer", "text"),
    "pairs": ("preference",),
    "judged": ("judged", "preference"),
    "ranked": ("preference", "scored"),
    "labelled": ("labelled", "labelled_pair"),
    "prompts": ("prompts",),
    "related": ("similar", "anchors"),
    "tagged": ("tagged",),
}
"""The formats of the records that an objective is trained on (`Objective.records`), in the order in which they are
tried."""
NEEDED: dict[Records, str] = {
    "texts": "texts or conversations",
    "pairs": "pairs of answers (`chosen` and `rejected`, with or without a `prompt`)",
    "judged": "answers with a `label` that is true or false, or pairs of answers (`chosen` and `rejected`)",
    "ranked": "pairs of answers (`chosen` and `rejected`), or answers with a `score`",
    "labelled": "texts, pairs of texts or conversations (`text`, `sentence1` and `sentence2`, or `messages`) with a "
    "`label`",
    "prompts": "prompts (`prompt`, `question` or `messages`), with an `answer` or what else rewards check answers by",
    "tagged": "words with a label each (`tokens` and `tags` or `ner_tags`, or `words` and `labels`)",
    "related": "texts that belong together (`anchor` and `positive`, or `query` and `pos`), or two with a `score`",
}
"""What records must be for an objective, in the words of a message."""
OPTIONAL = {
    "labels", "attention_mask", "tools", "functions", "system", "system_prompt", "input", "history", "context",
    "choices", "role", "content", "prompt", "answer", "tests", "entry_point", "negative", "negatives",
    "reasoning_content", "label_name",
}  # fmt: skip
"""Fields that are read where a record has them."""
PROMPTS = ("prompt", "conversations", "conversation", "messages", "question", "instruction", "query")
"""Fields that hold what an answer of the same record answers."""


def fields_of(record: Record, dataset: Dataset) -> dict[str, Any]:
    """The record's fields by the names that formats know: as they are, or as `fields:` of the data set renames them."""
    if not dataset.fields:
        return _with_prompt(record.fields)
    kept = {name: value for name, value in record.fields.items() if name not in dataset.fields.values()}
    held = {wanted: value_at(record.fields, name) for wanted, name in dataset.fields.items()}
    return {**kept, **{wanted: value[0] for wanted, value in held.items() if value}}


def _with_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with a source and a target, as records of encoder-decoders call them, as a prompt and its completion;
    but where there is more to learn from, a `source` is where a text is from, and stays."""
    if not ({"source", "target"} <= fields.keys()) or fields.keys() & _LEARNED:
        return fields
    others = {name: value for name, value in fields.items() if name not in ("source", "target")}
    return {**others, "prompt": fields["source"], "completion": fields["target"]}


def value_at(fields: dict[str, Any], name: str) -> tuple[Any] | tuple[()]:
    """The value of a field in a tuple, which is empty where there is none; `translation.en` is one within another."""
    if name in fields:
        return (fields[name],)
    outer, _, inner = name.partition(".")
    within = fields.get(outer)
    return value_at(within, inner) if inner and isinstance(within, dict) else ()


_LEARNED = frozenset(name for wanted in WANTED.values() for names in wanted for name in names)


def missing_field(fields: dict[str, Any], format: str) -> str:
    """The first field that the format wants and the record lacks, in the words of a message; "" where it fits."""
    for names in WANTED[format]:
        if not any(name in fields for name in names):
            return " or ".join(f"`{name}`" for name in names)
    return ""


_LIKE = {
    "text": r"(?<!label_)text|sentence|review|content|body|document|comment|tweet|utterance|question|query|prompt",
    "label": r"label|sentiment|intent|emotion|class|category|topic|stars|rating|target",
    "prompt": r"^(prompt|input|question|instruction|query|problem|request|user)",
    "chosen": r"chosen|accepted|better|(?<!dis)preferred|response_j$",
    "rejected": r"reject|worse|dispreferred|response_k$",
}


def field_like(name: str, fields: dict[str, Any]) -> str | None:
    """The name of a field that says by it that it is what a format calls `name`, and which holds what that can be."""
    kinds = {"text": (str,), "label": (str, int, list)}.get(name, (str, list, dict))
    likely = [field for field, value in fields.items() if isinstance(value, kinds)]
    return next((field for field in likely if is_like(name, field)), None)


def is_like(wanted: str, name: str) -> bool:
    """Whether a field of this name may hold what a format calls `wanted`."""
    pattern = _LIKE.get(wanted)
    return pattern is not None and re.search(pattern, name.lower()) is not None
