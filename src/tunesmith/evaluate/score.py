"""Log-likelihoods of many short texts: batched by length, in bounded memory, shared beginnings computed once.

A question with its choices is one row: the context, then each choice as a branch of its own, with positions that go on
from the context and attention that sees the context and the branch's own tokens (tree attention). Four choices cost the
context once, not four times. Whether a model computes such a row as it computes the texts one by one is tried first;
one that does not (linear attention, positions by other means), or whose attention has a window that the row exceeds,
gets each choice as a document.

Legend: B rows, T tokens of a row, N target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.model import attention, load
from tunesmith.model.forward import Inputs, body, confirm_forward_spec, losses_of_hidden, own_attention, token_losses
from tunesmith.plan.plan import ForwardSpec

TOKENS = {"cpu": 1024, "cuda": 16384}
"""Of a batch, padding included."""
PAIRS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Queries times keys of a batch of trees: what their mask has entries."""
LONGEST = 8192
"""Tokens of a text, where the model's files name no limit."""


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
    def size(self) -> int:
        """Of its row; the last token of a continuation predicts nothing that is asked for."""
        return len(self.context) + sum(len(one) - 1 for one in self.continuations)

    @property
    def longest(self) -> int:
        return len(self.context) + max(len(one) for one in self.continuations) - 1


class Scorer:
    """Scores texts by a model in evaluation mode. `known`: how it is called, where a probe has found that out."""

    def __init__(self, model: nn.Module, *, known: ForwardSpec | None = None):
        attention.register()
        self.model, self.device = model, next(model.parameters()).device
        config: Any = model.config
        self.own_attention = own_attention(model)
        vocabulary = load.vocabulary_size(config)
        self.spec, self.why_slow = confirm_forward_spec(model, vocabulary=vocabulary, known=known)
        self._packed_attention = attention.NAME if self.spec.layout == "packed" else self.own_attention
        self.longest = min(load.max_positions(config) or LONGEST, 1 << 20)
        self.tokens = max(TOKENS[self.device.type], 1)
        self._window = _window(config)
        self.shares_contexts = self._tries_trees(vocabulary)

    def as_it_was(self) -> None:
        """The model with its own attention, for generation."""
        self.model.set_attn_implementation(self.own_attention)

    # Documents

    @torch.no_grad()
    def losses(self, documents: Sequence[Document]) -> Iterator[tuple[int, float]]:
        """The place of each document and the weighted sum of its tokens' losses, batch by batch. What is longer than
        the model can see is cut into windows; each token is predicted once."""
        self.model.set_attn_implementation(self._packed_attention)
        pieces = [(place, *ends) for place, one in enumerate(documents) for ends in self._windows(one)]
        left = dict.fromkeys(range(len(documents)), 0)
        for place, *_ in pieces:
            left[place] += 1
        sums = dict.fromkeys(left, 0.0)
        yield from ((place, 0.0) for place, count in left.items() if not count)
        pieces.sort(key=lambda piece: piece[1] - piece[2])
        for batch in self._batches(pieces):
            for (place, *_), loss in zip(batch, self._piece_losses(documents, batch), strict=True):
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
        """Of pieces that are sorted, the longest first."""
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

    def _piece_losses(self, documents: Sequence[Document], batch: Sequence[tuple[int, int, int]]) -> list[float]:
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
            tokens=torch.tensor(tokens, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            boundaries=torch.tensor(bounds, dtype=torch.int32, device=self.device),
            longest=max(end - start for _, start, end in batch),
            rows=torch.from_numpy(rows).to(self.device),
            labels=torch.tensor(np.asarray(labels)[rows], device=self.device),
            weights=torch.from_numpy(counts[rows]).to(self.device),
        )
        losses_n = token_losses(self.model, inputs, self.spec)[1].double() * inputs.weights
        owners_n = torch.tensor(np.asarray(owners)[rows], device=self.device)
        return (
            torch.zeros(len(batch), dtype=torch.float64, device=self.device).index_add(0, owners_n, losses_n).tolist()
        )

    # Trees

    @torch.no_grad()
    def choices(self, trees: Sequence[Tree]) -> Iterator[tuple[int, list[float]]]:
        """The place of each tree and the log-likelihood of each of its continuations, batch by batch. A context that
        is too long for the model loses its beginning, as in lm-eval."""
        whole = [place for place, tree in enumerate(trees) if self._fits(tree)]
        apart = [place for place, tree in enumerate(trees) if not self._fits(tree)]
        if whole:
            self.model.set_attn_implementation(self.own_attention)
        for batch in self._tree_batches(trees, sorted(whole, key=lambda place: -trees[place].size)):
            yield from zip(batch, self._tree_losses([trees[place] for place in batch]), strict=True)
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
        if not self.shares_contexts or tree.longest > self.longest:
            return False
        return self._window is None or tree.size <= self._window

    def _tree_batches(self, trees: Sequence[Tree], places: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for place in places:
            longest = trees[batch[0]].size if batch else trees[place].size
            rows = len(batch) + 1
            if batch and (rows * longest > self.tokens or rows * longest**2 > PAIRS[self.device.type]):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _tree_losses(self, trees: Sequence[Tree]) -> list[list[float]]:
        longest = max(tree.size for tree in trees)
        tokens = np.zeros((len(trees), longest), dtype=np.int64)
        positions = np.zeros_like(tokens)
        branches = np.zeros_like(tokens)
        rows, labels, owners, counts = [], [], [], []
        for number, tree in enumerate(trees):
            size = len(tree.context)
            tokens[number, :size] = tree.context
            positions[number, :size] = np.arange(size)
            at = size
            for branch, one in enumerate(tree.continuations, start=1):
                more = len(one) - 1
                tokens[number, at : at + more] = one[:-1]
                positions[number, at : at + more] = np.arange(size, size + more)
                branches[number, at : at + more] = branch
                rows += [number * longest + place for place in (size - 1, *range(at, at + more))]
                labels += one
                owners += [sum(counts) + branch - 1] * len(one)
                at += more
            branches[number, at:] = -1
            counts.append(len(tree.continuations))
        hidden_bth = self._tree_hidden(tokens, positions, branches)
        inputs = Inputs(
            tokens=torch.empty(0), positions=torch.empty(0), boundaries=torch.empty(0), longest=longest,
            rows=torch.tensor(rows, device=self.device),
            labels=torch.tensor(labels, device=self.device),
            weights=torch.ones(len(rows), device=self.device),
        )  # fmt: skip
        hidden_th = hidden_bth.reshape(len(trees) * longest, -1)
        losses_n = losses_of_hidden(self.model, hidden_th, inputs, self.spec)[1].double()
        owners_n = torch.tensor(owners, device=self.device)
        sums = torch.zeros(sum(counts), dtype=torch.float64, device=self.device).index_add(0, owners_n, -losses_n)
        flat = [_checked(value) for value in sums.tolist()]
        ends = np.cumsum(counts).tolist()
        return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _tree_hidden(self, tokens: np.ndarray, positions: np.ndarray, branches: np.ndarray) -> torch.Tensor:
        """[B, T, H]. Without branches a row is causal and its padding comes last, so no mask is needed."""
        tokens_bt, positions_bt, branch_bt = (
            torch.from_numpy(one).to(self.device) for one in (tokens, positions, branches)
        )
        options = {}
        if (branches > 0).any():
            length = tokens.shape[1]
            is_past = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
            keys, queries = branch_bt[:, None, :], branch_bt[:, :, None]
            is_seen_btt = is_past & ((keys == 0) | (keys == queries))
            dtype = next(self.model.parameters()).dtype
            dtype = dtype if dtype.is_floating_point else torch.float32
            mask = torch.zeros(is_seen_btt.shape, dtype=dtype, device=self.device)
            mask.masked_fill_(~is_seen_btt, torch.finfo(dtype).min)
            options = {"attention_mask": mask[:, None]}
        return body(self.model)(input_ids=tokens_bt, position_ids=positions_bt, use_cache=False, **options)[0]

    @torch.no_grad()
    def _tries_trees(self, vocabulary: int) -> bool:
        """Whether a row with branches gives what its texts give one by one, and no branch sees another."""
        drawn = np.random.default_rng(0).integers(vocabulary, size=24).tolist()
        trees = [
            Tree(drawn[:9], (drawn[9:13], drawn[13:14], drawn[14:20])),
            Tree(drawn[:5], (drawn[20:22], drawn[22:24])),
        ]
        changed = replace(trees[0], continuations=([*drawn[10:13], drawn[9]], *trees[0].continuations[1:]))
        is_exact = next(self.model.parameters()).dtype == torch.float32
        self.model.set_attn_implementation(self.own_attention)
        try:
            expected = [[self._own(tree.context, one) for one in tree.continuations] for tree in trees]
            found = self._tree_losses(trees)
            others = self._tree_losses([changed, trees[1]])[0]
        except UserError:
            raise
        except Exception:  # the model's own code, called as it may not expect
            return False
        finally:
            self.model.set_attn_implementation(self._packed_attention)
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


def _checked(value: float) -> float:
    if not math.isfinite(value):
        raise UserError("The model gives no numbers (NaN or infinite losses); its weights are damaged, or it diverged.")
    return value
