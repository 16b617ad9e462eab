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

AT_ONCE = 2048
"""Texts that are tokenized in one call, in bounded memory."""
ONLY_IDS = {"return_attention_mask": False, "return_token_type_ids": False}


def scores(scorer: Scorer, tokenizer: Any, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each item with what it scored, batch by batch; `cut` of one that lost its beginning is what the model sees."""
    trees = trees_of(tokenizer, items)
    cut = [_is_cut(item, tree, scorer.longest) for item, tree in zip(items, trees, strict=True)]
    for place, found in scorer.choices(trees):
        content = items[place].content
        assert isinstance(content, Choices)
        yield items[place], score(content, found) | ({"cut": scorer.longest} if cut[place] else {})


def _is_cut(item: Item, tree: Tree, longest: int) -> bool:
    """Whether the question is longer than the model sees, with a choice; a choice that is so by itself is refused."""
    most = max(map(len, tree.continuations))
    if most > longest:
        reason = f"one of its choices has {most:,} tokens, and the model sees {longest:,}; leave the item out"
        raise RecordError("too long", item.origin, reason)
    return len(tree.context) + most > longest + 1


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


def trees_of(tokenizer: Any, items: Sequence[Item]) -> list[Tree]:
    """Context and continuations of each item as tokens, cut token for token where lm-eval cuts them."""
    texts: list[str] = []
    for item in items:
        content = item.content
        assert isinstance(content, Choices)
        texts += [content.context.rstrip(), *(content.context + one for one in content.continuations)]
    rest = iter(encode(tokenizer, texts))
    return [_tree(item, next(rest), rest) for item in items]


def _tree(item: Item, context: list[int], whole: Iterator[list[int]]) -> Tree:
    assert isinstance(item.content, Choices)
    continuations = tuple(next(whole)[len(context) :] for _ in item.content.continuations)
    if not context or not all(continuations):
        raise RecordError("no tokens", item.origin, "one of its choices has no tokens of its own after the question")
    return Tree(context, continuations)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The texts as tokens, many in a call, which a fast tokenizer spreads over the cores: one by one they kept a GPU
    waiting for a quarter of the time. A text that begins with the tokenizer's own first token gets no other one."""
    bos = tokenizer.bos_token
    found: list[list[int]] = [[]] * len(texts)
    for has_bos in (False, True):
        places = [place for place, text in enumerate(texts) if bool(bos and text.startswith(bos)) == has_bos]
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            made = tokenizer([texts[place] for place in some], add_special_tokens=not has_bos, **ONLY_IDS)
            for place, ids in zip(some, made["input_ids"], strict=True):
                found[place] = ids
    return found
