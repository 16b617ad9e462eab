"""Log-likelihoods of many short texts: packed, in bounded memory, shared beginnings computed once.

Questions with their choices are a tree: what several texts begin with (the instructions of all questions, examples, the
question of four choices) is one node, and what follows in each is a node of its own, with positions that go on and
attention that sees its ancestors' keys and its own (tree attention). All nodes of a batch lie end to end in one row, so
nothing is padded either. Whether a model computes such a row as it computes the texts one by one is tried first; one
that does not (linear attention, positions by other means), or whose attention has a window that a text exceeds, gets
each choice as a document.

Legend: T tokens of a row, N target tokens, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.model import attention, load
from tunesmith.model.forward import Inputs, own_attention, token_losses
from tunesmith.model.forward_spec import confirm_forward_spec
from tunesmith.model.norms import FusedNorms
from tunesmith.model.structure import set_attention
from tunesmith.plan.plan import ForwardSpec

TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens of a batch, padding included."""
SHARED = 8
"""Tokens that texts must begin with together to be computed once: less is not worth a node of its own."""
KEYS = 16
"""Keys of a batch of trees, for each of its tokens, at most: nodes have those of their ancestors."""
LONGEST = 8192
"""Tokens of a text, where the model's files name no limit."""
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Document:
    """Tokens, and how much the prediction of each counts."""

    ids: Sequence[int]
    weights: Sequence[float]


@dataclass(frozen=True)
class Tree:
    """A context and its continuations, as tokens."""

    context: Sequence[int]
    continuations: tuple[Sequence[int], ...]

    @property
    def branches(self) -> int:
        """Tokens besides the context; the last one of a continuation predicts nothing that is asked for."""
        return sum(len(one) - 1 for one in self.continuations)

    @property
    def longest(self) -> int:
        return len(self.context) + max(len(one) for one in self.continuations) - 1


@dataclass(frozen=True)
class Node:
    """Tokens of one text, or those that several have in common, after the tokens of `parent` and its ancestors."""

    tokens: Sequence[int]
    start: int
    """The position of the first of them."""
    at: int
    """Their place in the row."""
    parent: int | None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Scorer:
    """Scores texts by a model in evaluation mode. `known`: how it is called, where a probe has found that out."""

    def __init__(self, model: nn.Module, *, known: ForwardSpec | None = None):
        attention.register()
        self.model, self.device = model, next(model.parameters()).device
        config: Any = model.config
        self.own_attention = own_attention(model)
        vocabulary = load.vocabulary_size(config)
        self.spec, _ = confirm_forward_spec(model, vocabulary=vocabulary, known=known)
        self._packed_attention = attention.NAME if self.spec.layout == "packed" else self.own_attention
        self.longest = min(load.max_positions(config) or LONGEST, 1 << 20)
        self.tokens = max(TOKENS[self.device.type], 1)
        self._window = _window(config)
        self._norms = FusedNorms(model) if self.device.type == "cuda" else None
        self.shares_contexts = self._tries_trees(vocabulary)

    def as_it_was(self) -> None:
        """The model with its own attention, for generation."""
        set_attention(self.model, self.own_attention)

    def _fast(self) -> AbstractContextManager[Any]:
        """The norms of a model that is not compiled make several passes over memory each, which is what a GPU waits
        for."""
        return self._norms.swapped() if self._norms is not None else nullcontext()

    def _moved(self, values: Any, dtype: Any = None) -> torch.Tensor:
        """On the device, by a copy that does not wait for what is computed there (as one of pageable memory does)."""
        made = torch.from_numpy(np.asarray(values, dtype=dtype))
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made

    # Documents

    @torch.no_grad()
    def losses(self, documents: Sequence[Document]) -> Iterator[tuple[int, float]]:
        """The place of each document and the weighted sum of its tokens' losses, batch by batch. What is longer than
        the model can see is cut into windows; each token is predicted once."""
        set_attention(self.model, self._packed_attention)
        pieces = [(place, *ends) for place, one in enumerate(documents) for ends in self._windows(one)]
        left = dict.fromkeys(range(len(documents)), 0)
        for place, *_ in pieces:
            left[place] += 1
        sums = dict.fromkeys(left, 0.0)
        yield from ((place, 0.0) for place, count in left.items() if not count)
        pieces.sort(key=lambda piece: piece[1] - piece[2])
        under_way = ((batch, self._piece_losses(documents, batch)) for batch in self._batches(pieces))
        for batch, losses in one_ahead(under_way):
            for (place, *_), loss in zip(batch, losses.tolist(), strict=True):
                sums[place] += loss
                left[place] -= 1
                if not left[place]:
                    yield place, _checked(sums[place])

    def _windows(self, document: Document) -> list[tuple[int, int]]:
        """Begin and end of the tokens that predict the next ones; those without a target are left out."""
        count = len(document.ids) - 1
        ends = [(start, min(start + self.longest, count)) for start in range(0, count, self.longest)]
        return [(start, end) for start, end in ends if any(document.weights[start + 1 : end + 1])]

    def _batches(self, pieces: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Batches of pieces that are sorted, the longest first."""
        batch: list[tuple[int, int, int]] = []
        tokens = 0
        for piece in pieces:
            size = piece[2] - piece[1]
            is_alone = self.spec.switch is not None and size > self.spec.switch
            if self.spec.layout == "padded" and batch:
                size = batch[0][2] - batch[0][1]
            if batch and (is_alone or tokens + size > self.tokens):
                yield batch
                batch, tokens = [], 0
                size = piece[2] - piece[1]
            batch.append(piece)
            tokens += self.tokens if is_alone else size
        if batch:
            yield batch

    def _piece_losses(self, documents: Sequence[Document], batch: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        tokens, labels, weights, positions, owners, bounds = [], [], [], [], [], [0]
        for number, (place, start, end) in enumerate(batch):
            one = documents[place]
            tokens += one.ids[start:end]
            labels += one.ids[start + 1 : end + 1]
            weights += one.weights[start + 1 : end + 1]
            positions += range(end - start)
            owners += [number] * (end - start)
            bounds.append(bounds[-1] + end - start)
        counts = np.asarray(weights, dtype=np.float32)
        rows = np.flatnonzero(counts)
        inputs = Inputs(
            tokens=self._moved(tokens),
            positions=self._moved(positions),
            boundaries=self._moved(bounds, np.int32),
            longest=max(end - start for _, start, end in batch),
            rows=self._moved(rows),
            labels=self._moved(np.asarray(labels)[rows]),
            weights=self._moved(counts[rows]),
        )
        owners_n = self._moved(np.asarray(owners)[rows])
        with self._fast():
            losses_n = token_losses(self.model, inputs, self.spec)[1].double() * inputs.weights
        return torch.zeros(len(batch), dtype=torch.float64, device=self.device).index_add(0, owners_n, losses_n)

    # Trees

    @torch.no_grad()
    def choices(self, trees: Sequence[Tree]) -> Iterator[tuple[int, list[float]]]:
        """The place of each tree and the log-likelihood of each of its continuations, batch by batch. A context that
        is too long for the model loses its beginning, as in lm-eval."""
        whole = [place for place, tree in enumerate(trees) if self._fits(tree)]
        apart = [place for place, tree in enumerate(trees) if not self._fits(tree)]
        if whole:
            set_attention(self.model, self._packed_attention)
        batches = self._tree_batches(trees, sorted(whole, key=lambda place: list(trees[place].context)))
        for batch, sums in one_ahead((batch, self._tree_sums([trees[place] for place in batch])) for batch in batches):
            yield from zip(batch, _by_tree([trees[place] for place in batch], sums), strict=True)
        documents, owners = [], []
        for place in apart:
            for one in trees[place].continuations:
                ids = [*trees[place].context, *one][-(self.longest + 1) :]
                counted = min(len(one), len(ids) - 1)
                documents.append(Document(ids, [0.0] * (len(ids) - counted) + [1.0] * counted))
                owners.append(place)
        first = {place: owners.index(place) for place in apart}
        found: dict[int, dict[int, float]] = {place: {} for place in apart}
        for number, loss in self.losses(documents):
            place = owners[number]
            found[place][number - first[place]] = -loss
            if len(found[place]) == len(trees[place].continuations):
                yield place, [found[place][number] for number in range(len(found[place]))]

    def _fits(self, tree: Tree) -> bool:
        return self.shares_contexts and tree.longest <= min(self.longest, self._window or self.longest)

    def _tree_batches(self, trees: Sequence[Tree], places: Sequence[int]) -> Iterator[list[int]]:
        """Batches of trees that are sorted by their contexts, so that those with a common beginning lie together."""
        batch: list[int] = []
        tokens = keys = 0
        for place in places:
            tree = trees[place]
            known = common(trees[batch[-1]].context, tree.context) if batch else 0
            more = len(tree.context) + tree.branches - (known if known >= SHARED else 0)
            seen = tree.longest * (1 + len(tree.continuations))
            if batch and (tokens + more > self.tokens or keys + seen > KEYS * self.tokens):
                yield batch
                batch, tokens, keys, more = [], 0, 0, len(tree.context) + tree.branches
            batch.append(place)
            tokens, keys = tokens + more, keys + seen
        if batch:
            yield batch

    def _tree_sums(self, trees: Sequence[Tree]) -> torch.Tensor:
        """The log-likelihoods of all continuations, one after the other, on the device."""
        texts = [[*tree.context, *one[:-1]] for tree in trees for one in tree.continuations]
        nodes, ends = nodes_of(texts)
        rows, labels, owners = [], [], []
        pairs = [(tree, one) for tree in trees for one in tree.continuations]
        for owner, (tree, one) in enumerate(pairs):
            last, found = nodes[ends[owner]], []
            for position in range(len(texts[owner]) - 1, len(tree.context) - 2, -1):
                while position < last.start:
                    assert last.parent is not None
                    last = nodes[last.parent]
                found.append(last.at + position - last.start)
            rows += reversed(found)
            labels += one
            owners += [owner] * len(one)
        keys = keys_of(nodes)
        bounds, key_bounds = (np.cumsum([0, *map(len, some)]) for some in ((node.tokens for node in nodes), keys))
        inputs = Inputs(
            tokens=self._moved([token for node in nodes for token in node.tokens]),
            positions=self._moved([position for node in nodes for position in range(node.start, node.end)]),
            boundaries=self._moved(bounds, np.int32),
            keys=self._moved(key_bounds, np.int32),
            places=self._moved(np.concatenate(keys)),
            longest=max(node.end for node in nodes),
            rows=self._moved(rows),
            labels=self._moved(labels),
            weights=torch.ones(len(rows), device=self.device),
        )
        owners_n = self._moved(owners)
        with self._fast():
            losses_n = token_losses(self.model, inputs, self.spec)[1].double()
        return torch.zeros(len(texts), dtype=torch.float64, device=self.device).index_add(0, owners_n, -losses_n)

    @torch.no_grad()
    def _tries_trees(self, vocabulary: int) -> bool:
        """Whether a row with branches gives what its texts give one by one, and no branch sees another."""
        if self.spec.layout != "packed":
            return False
        drawn = np.random.default_rng(0).integers(vocabulary, size=32).tolist()
        trees = [
            Tree(drawn[:12], (drawn[12:16], drawn[16:17], drawn[17:23])),
            Tree([*drawn[:9], *drawn[28:32]], (drawn[23:25], drawn[25:27])),
            Tree(drawn[3:6], (drawn[23:25], drawn[27:28])),
        ]
        changed = replace(trees[0], continuations=([*drawn[13:16], drawn[12]], *trees[0].continuations[1:]))
        is_exact = next(self.model.parameters()).dtype == torch.float32
        set_attention(self.model, self.own_attention)
        try:
            expected = [[self._own(tree.context, one) for one in tree.continuations] for tree in trees]
            set_attention(self.model, self._packed_attention)
            found = _by_tree(trees, self._tree_sums(trees))
            changed_trees = [changed, *trees[1:]]
            others = _by_tree(changed_trees, self._tree_sums(changed_trees))[0]
        except UserError:
            raise
        except Exception:  # the model's own code, called as it may not expect
            return False
        finally:
            set_attention(self.model, self._packed_attention)
        pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
        bound = (1e-4 if is_exact else 0.05) * max(1.0, max(abs(value) for value, _ in pairs))
        leak = (1e-5 if is_exact else 0.005) * max(1.0, max(abs(value) for value, _ in pairs))
        is_same = max(abs(a - b) for a, b in pairs) <= bound
        return is_same and max(abs(a - b) for a, b in zip(others[1:], found[0][1:], strict=True)) <= leak

    @torch.no_grad()
    def _own(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        ids = torch.tensor([[*context, *continuation]], device=self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].float()
        return float(logits.log_softmax(-1).gather(1, ids[0, len(context) :, None]).double().sum())


def one_ahead(under_way: Iterator[Batch]) -> Iterator[Batch]:
    """Each of them once the next has been started, so that the host prepares one batch while a GPU computes another."""
    last = next(under_way, None)
    if last is None:
        return
    for started in under_way:
        yield last
        last = started
    yield last


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def nodes_of(texts: Sequence[list[int]]) -> tuple[list[Node], list[int]]:
    """The texts as a radix tree, parents first, and the node that each text ends with."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    nodes: list[Node] = []
    ends = [0] * len(texts)

    def add(tokens: Sequence[int], start: int, parent: int | None) -> int:
        nodes.append(Node(tokens, start, nodes[-1].at + len(nodes[-1].tokens) if nodes else 0, parent))
        return len(nodes) - 1

    waiting: list[tuple[int, int, int, int | None]] = [(0, len(order), 0, None)]
    while waiting:  # texts from low to high, which agree up to `start` and are in the tree as far as that
        low, high, start, parent = waiting.pop()
        first, last = texts[order[low]], texts[order[high - 1]]
        until = common(first, last)
        here = parent
        if until > start and (until - start >= SHARED or until == len(last)):
            here = parent = add(first[start:until], start, parent)
            start = until
        elif len(first) == until > start:  # a text that others go on from, too short to be shared
            here = add(first[start:until], start, parent)
        while low < high and len(texts[order[low]]) == until:
            assert here is not None
            ends[order[low]] = here
            low += 1
        while low < high:
            end = low + 1
            while end < high and texts[order[end]][until] == texts[order[low]][until]:
                end += 1
            waiting.append((low, end, start, parent))
            low = end
    return nodes, ends


def keys_of(nodes: Sequence[Node]) -> list[np.ndarray]:
    """The places in the row of all tokens that the last token of each node sees."""
    found: list[np.ndarray] = []
    for node in nodes:
        own = np.arange(node.at, node.at + len(node.tokens))
        found.append(own if node.parent is None else np.concatenate([found[node.parent], own]))
    return found


def _window(config: Any) -> int | None:
    """The fewest tokens back that some layer's attention sees, where that is limited."""
    text = config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "window_size", "local_attention", "attention_window_size")
    layers = getattr(text, "per_layer_config", None)  # some configs say it layer by layer, and refuse to elsewhere
    places = list(layers.values() if isinstance(layers, dict) else layers) if layers else [text]
    values = [getattr(place, name, None) for place in places for name in names]
    found = [value for value in values if isinstance(value, int) and value > 0]
    if getattr(text, "use_sliding_window", True) is False:
        found = []
    return min(found, default=None)


def _by_tree(trees: Sequence[Tree], sums: torch.Tensor) -> list[list[float]]:
    rest = iter([_checked(value) for value in sums.tolist()])
    return [[next(rest) for _ in tree.continuations] for tree in trees]


def _checked(value: float) -> float:
    if not math.isfinite(value):
        raise UserError("The model gives no numbers (NaN or infinite losses); its weights are damaged, or it diverged.")
    return value
