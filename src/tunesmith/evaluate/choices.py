"""Multiple choice by log-likelihood, by lm-eval's rules, item by item.

Context and continuation are tokenized together and cut where the context alone ends; spaces at the end of the context
go to the continuation. `acc` takes the likeliest choice, `acc_norm` the likeliest for its characters. `choice_loss`,
the loss of the right choice among all, is not lm-eval's: it moves with every item, so that less change can be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tunesmith.data.types import RecordError
from tunesmith.evaluate.score import Scorer, Tree
from tunesmith.evaluate.tasks import Choices, Item


def scores(scorer: Scorer, tokenizer: Any, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each item with what it scored, batch by batch."""
    trees = [tree_of(tokenizer, item) for item in items]
    for place, found in scorer.choices(trees):
        content = items[place].content
        assert isinstance(content, Choices)
        yield items[place], score(content, found)


def score(choices: Choices, likelihoods: Sequence[float]) -> dict[str, Any]:
    each = [value / length for value, length in zip(likelihoods, choices.lengths, strict=True)]
    most = max(likelihoods)
    total = most + math.log(sum(math.exp(value - most) for value in likelihoods))
    return {
        "likelihoods": list(likelihoods),
        "acc": int(likelihoods.index(most) == choices.gold),
        "acc_norm": int(each.index(max(each)) == choices.gold),
        "choice_loss": total - likelihoods[choices.gold],
    }


def tree_of(tokenizer: Any, item: Item) -> Tree:
    content = item.content
    assert isinstance(content, Choices)
    pairs = [encode_pair(tokenizer, content.context, one) for one in content.continuations]
    if not all(continuation for _, continuation in pairs) or not pairs[0][0]:
        raise RecordError("no tokens", item.origin, "one of its choices has no tokens of its own after the question")
    return Tree(pairs[0][0], tuple(continuation for _, continuation in pairs))


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """As lm-eval does, token for token."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = _encode(tokenizer, context)
    return before, _encode(tokenizer, context + continuation)[len(before) :]


def _encode(tokenizer: Any, text: str) -> list[int]:
    """A text that begins with the tokenizer's own first token does not get another one."""
    bos = tokenizer.bos_token
    if bos and text.startswith(bos):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(text)
