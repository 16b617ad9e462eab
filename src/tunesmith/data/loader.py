"""The loader: step s -> the micro-batches of this rank.

Which documents make up step s is a pure function of (data, seed, s): per epoch the mixed order is packed into
sequences, those are shuffled, and the sequences of all epochs stand in one row, of which step s takes the next
`sequences_per_step`. Ranks and micro-batches only deal out what the step holds; so a run resumes by asking for
step s, on the same or another number of devices.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from math import ceil, floor, fsum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tunesmith.data.mix import epoch_order, exact, permutation
from tunesmith.data.pack import pack
from tunesmith.data.store import TokenStore
from tunesmith.data.types import MicroBatch, StepBatch
from tunesmith.errors import UserError
from tunesmith.plan.documents import like_lengths

if TYPE_CHECKING:
    from tunesmith.objectives.base import Objective, Rows

WINDOW = 256
"""Sequences packed together: enough to fill them well, few enough to keep the order random."""
MOST_EPOCHS = 10_000_000
"""Passes over the data beyond which `steps` or `batch_tokens` is a slip of the keyboard."""
AHEAD = 2
"""Steps prepared in advance."""
_SHUFFLED_SEQUENCES = 2  # stream of random numbers; mix.py has 0 and 1


Sequenced = tuple[np.ndarray, np.ndarray]
"""A packed sequence: of each example the data set, and its number in that."""
Lengths = tuple[bool, int | None]
"""How documents are batched: whether those of a micro-batch are of like length, and above how many tokens one is by
itself."""


class PackedDocument(NamedTuple):
    """One document on its way into a micro-batch."""

    ids: np.ndarray
    weights: np.ndarray
    source: int
    origin: str
    part: int = 0
    """Its number within its example; -1 where it counts nothing."""
    value: float = 1.0
    """What the data say of it (`Example.values`)."""
    reference: float = 0.0
    """The log-probability that the reference gives its targets."""
    number: int = 0
    """Within its data set."""
    record: int = 0
    """The number of the whole example that it is of (`TokenStore.owner`)."""
    shared: int = 0
    """Tokens before its own: so many of its example's first document, which stands before it."""


class Loader:
    """Training data of one rank, by step.

    All ranks get the same number of micro-batches in a step, and at least one, since their collectives must
    meet: a rank that has nothing left to do gets a micro-batch of two tokens whose weights are all 0.
    """

    total_steps: int
    total_sequences: int
    epoch_ends: tuple[int, ...]
    """Numbers of finished steps at which one more whole pass over the data is complete."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float],
        *,
        seed: int,
        sequence_length: int,
        sequences_per_step: int,
        epochs: float = 1.0,
        steps: int | None = None,
        micro_batch: int = 1,
        rank: int = 0,
        ranks: int = 1,
        lengths: Lengths | None = None,
        most_padded: tuple[int, int] | None = None,
        objective: Objective | None = None,
    ):
        """`steps`, when given, overrides `epochs`; `micro_batch` counts sequences; `lengths` is for models that must
        have documents by their lengths: what a step holds stays the same, its micro-batches are others, of no more than
        `most_padded` (`plan.documents.like_lengths`)."""
        if not any(len(store) for store in stores):
            raise UserError("The training data holds no examples; check the paths under `data`.")
        assert sequences_per_step >= 1
        assert micro_batch >= 1
        assert 0 <= rank < ranks
        self._stores, self._weights, self._seed = tuple(stores), tuple(weights), seed
        self._capacity, self._per_step, self._micro_batch = sequence_length, sequences_per_step, micro_batch
        self._rank, self._ranks = rank, ranks
        self._by_length, self._most_padded = lengths, most_padded
        self._counts_prompts = objective is not None and objective.counts_prompts
        self._rows: Rows = "targets" if objective is None else objective.rows
        self._divides = objective is not None and objective.records != "texts"
        self._mismatched: tuple[TokenStore, ...] = ()
        """Prompts of the stores with other answers, example by example, where the objective has a baseline."""
        self._recent: OrderedDict[int, _Epoch] = OrderedDict()
        self._lock = threading.Lock()

        self._counts = self._sequences_by_epoch(epochs, steps and steps * sequences_per_step)
        self._ends = np.cumsum(self._counts)
        whole_epochs = len(self._counts) if steps else floor(exact(epochs))
        self.total_sequences = int(self._ends[-1])
        if steps:
            self.total_sequences = steps * sequences_per_step
        elif whole_epochs < len(self._counts):
            unused = (1 - (exact(epochs) - whole_epochs)) * int(self._counts[-1])
            self.total_sequences -= floor(unused)
        self.total_steps = ceil(self.total_sequences / sequences_per_step)
        ends = self._ends[:whole_epochs]
        self.epoch_ends = tuple(np.unique(-(-ends[ends <= self.total_sequences] // sequences_per_step)).tolist())

    def step(self, s: int) -> StepBatch:
        """What this rank computes in step `s`; the same whenever and in whatever order it is asked for."""
        sequences = self._sequences_of(s)
        sources = np.concatenate([sources for sources, _ in sequences])
        indices = np.concatenate([indices for _, indices in sequences])
        return StepBatch(
            step=s,
            epoch=self.epoch_of(s),
            micro_batches=self._micro_batches(sequences, self._stores),
            divisors=self._divisors(sources, indices) if self._divides else {},
            mismatched=self._micro_batches(self._packed_anew(sources, indices), self._mismatched)
            if self._mismatched
            else (),
            target_weight=fsum(
                weight
                for source, store in enumerate(self._stores)
                for weight in store.target_weights[indices[sources == source]].tolist()
            ),
            tokens=sum(
                int(store.lengths[indices[sources == source]].sum()) for source, store in enumerate(self._stores)
            ),
        )

    def widths(self, s: int) -> np.ndarray:
        """int64 [E], or [E, 2] where they have two sides: tokens of the examples of step `s` as they are padded."""
        return np.concatenate([_widths_of(one, self._stores) for one in self._sequences_of(s)])

    def seen(self) -> list[np.ndarray]:
        """bool [N] for each data set: the examples that the steps of this run have."""
        if self.total_sequences >= int(self._ends[0]):
            return [np.ones(len(store), dtype=bool) for store in self._stores]
        found = [np.zeros(len(store), dtype=bool) for store in self._stores]
        for sources, indices in (self._epoch(0).sequence(i) for i in range(self.total_sequences)):
            for source in np.unique(sources).tolist():
                found[source][indices[sources == source]] = True
        return found

    def refer(self, stores: Sequence[TokenStore], mismatched: Sequence[TokenStore]) -> None:
        """From now on the same examples, with what a reference thinks of them, and with what they are compared."""
        assert [len(store) for store in stores] == [len(store) for store in self._stores]
        self._stores, self._mismatched = tuple(stores), tuple(mismatched)

    def _micro_batches(self, sequences: list[Sequenced], stores: Sequence[TokenStore]) -> tuple[MicroBatch, ...]:
        """What of the sequences of a step this rank computes."""
        if self._by_length is not None:
            parts = self._parts_by_length(sequences, self._by_length, stores)
        else:
            mine = sequences[self._rank :: self._ranks]
            count = ceil(ceil(len(sequences) / self._ranks) / self._micro_batch)
            parts = [mine[len(mine) * i // count : len(mine) * (i + 1) // count] for i in range(count)]
        source, index = (int(some[0]) for some in sequences[0])
        idle_one = partial(idle, documents_of(stores[source], index, source)[0])
        return tuple(self._laid_out(part, stores) if part else micro_batch_of([idle_one()]) for part in parts)

    def _divisors(self, sources: np.ndarray, indices: np.ndarray) -> dict[str, float]:
        """What a step has in all: examples, and tokens of the answers that are wanted."""
        tokens = (
            weight
            for source, index in zip(sources.tolist(), indices.tolist(), strict=True)
            for weight in wanted_weights(self._stores[source], index, self._counts_prompts)
        )
        return {"examples": float(len(indices)), "tokens": fsum(tokens)}

    def _packed_anew(self, sources: np.ndarray, indices: np.ndarray) -> list[Sequenced]:
        """The mismatched examples of a step, which have other lengths than those they are made from."""
        pairs = zip(sources.tolist(), indices.tolist(), strict=True)
        lengths = np.array([self._mismatched[source].lengths[index] for source, index in pairs])
        return [(sources[some], indices[some]) for some in pack(lengths, self._capacity)]

    def _parts_by_length(
        self, sequences: list[Sequenced], lengths: Lengths, stores: Sequence[TokenStore]
    ) -> list[list[Sequenced]]:
        """The step's documents of this rank, a micro-batch at a time; as many on all ranks, some without any."""
        found = [_widths_of(one, stores) for one in sequences]
        groups = by_length(found, self._micro_batch, self._capacity, lengths, self._most_padded)
        sources, indices = (np.concatenate([one[at] for one in sequences]) for at in (0, 1))
        dealt = [[(sources[group], indices[group])] for group in groups[self._rank :: self._ranks]]
        return dealt + [[]] * (ceil(len(groups) / self._ranks) - len(dealt))

    def iterate(self, start: int = 0) -> Iterator[StepBatch]:
        """The steps from `start` to the end; the next ones are prepared by a thread meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            steps = iter(range(start, self.total_steps))
            ahead = deque(thread.submit(self.step, s) for s in islice(steps, AHEAD))
            try:
                while ahead:
                    batch = ahead.popleft().result()
                    ahead.extend(thread.submit(self.step, s) for s in islice(steps, 1))
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()

    def epoch_of(self, s: int) -> float:
        """Passes over the data when step `s` is done."""
        done = min((s + 1) * self._per_step, self.total_sequences)
        epoch = int(np.searchsorted(self._ends, done))
        return epoch + 1 - int(self._ends[epoch] - done) / int(self._counts[epoch])

    def _laid_out(self, sequences: list[Sequenced], stores: Sequence[TokenStore]) -> MicroBatch:
        documents = [
            document
            for sources, indices in sequences
            for source, index in zip(sources.tolist(), indices.tolist(), strict=True)
            for document in documents_of(stores[source], index, source)
        ]
        return micro_batch_of(documents, counts_prompts=self._counts_prompts, rows=self._rows)

    # Which sequences

    def _sequences_of(self, s: int) -> list[Sequenced]:
        """Sources and indices of the documents in each sequence of step `s`, over all ranks."""
        if not 0 <= s < self.total_steps:
            raise IndexError(f"step {s} of {self.total_steps}")
        at, end = s * self._per_step, min((s + 1) * self._per_step, self.total_sequences)
        sequences = []
        while at < end:
            number = int(np.searchsorted(self._ends, at, side="right"))
            epoch = self._epoch(number)
            first = at - int(self._ends[number] - self._counts[number])
            last = min(first + end - at, len(epoch))
            sequences += [epoch.sequence(i) for i in range(first, last)]
            at += last - first
        return sequences

    def _sequences_by_epoch(self, epochs: float, at_least: int | None) -> np.ndarray:
        """int64: how many sequences each epoch packs into, for all epochs that are needed."""
        needed = ceil(exact(epochs)) if at_least is None else None
        if at_least is not None and at_least > MOST_EPOCHS * max(1, len(self._epoch(0))):
            raise UserError(
                f"steps and batch_tokens ask for {at_least:,} sequences, which is more than {MOST_EPOCHS:,} passes "
                "over the data; lower one of them."
            )
        if self._is_one_window:  # best fit decreasing sees the same lengths every time
            count = len(self._epoch(0))
            return np.full(needed or ceil(at_least / count), count, dtype=np.int64)
        counts: list[int] = []
        total = 0
        while len(counts) < needed if needed else total < at_least:
            counts.append(len(self._epoch(len(counts))))
            total += counts[-1]
        return np.array(counts, dtype=np.int64)

    @property
    def _is_one_window(self) -> bool:
        """Every epoch has the same documents, and packs them all together."""
        if any(weight != floor(weight) for weight in self._weights):
            return False
        pairs = zip(self._stores, self._weights, strict=True)
        return _windows(sum(int(store.lengths.sum() * weight) for store, weight in pairs), self._capacity) == 1

    def _epoch(self, number: int) -> _Epoch:
        with self._lock:
            if number not in self._recent:
                self._recent[number] = self._packed(number)
                if len(self._recent) > 2:
                    self._recent.popitem(last=False)
            self._recent.move_to_end(number)
            return self._recent[number]

    def _packed(self, number: int) -> _Epoch:
        counts = [len(store) for store in self._stores]
        sources, indices = epoch_order(counts, self._weights, self._seed, number)
        lengths = np.empty(len(sources), dtype=np.int64)
        for source, store in enumerate(self._stores):
            is_here = sources == source
            lengths[is_here] = store.lengths[indices[is_here]]
        sequences = list(pack_in_windows(lengths, self._capacity))
        order = permutation(len(sequences), self._seed, _SHUFFLED_SEQUENCES, number)
        sequences = [sequences[i] for i in order.tolist()]
        bounds = np.cumsum([0, *(len(sequence) for sequence in sequences)])
        flat = np.concatenate(sequences) if sequences else np.empty(0, dtype=np.int64)
        return _Epoch(sources[flat], indices[flat], bounds)


def documents_of(store: TokenStore, index: int, source: int) -> list[PackedDocument]:
    """The documents of an example."""
    origin, references, owner = store.origin(index), store.references, store.owner(index)
    return [
        PackedDocument(
            *store.document(number),
            source,
            origin,
            part,
            store.value(number),
            0.0 if references is None else float(references[number]),
            number,
            owner,
            store.shared(number),
        )
        for part, number in enumerate(store.documents(index))
    ]


def idle(taken: PackedDocument) -> PackedDocument:
    """Two tokens that do not count, for a rank that must take part all the same."""
    return taken._replace(ids=taken.ids[:2], weights=np.zeros_like(taken.weights[:2]), part=-1, shared=0)


def wanted_weights(store: TokenStore, index: int, counts_prompts: bool) -> list[float]:
    """The target weight of each of an example's answers that is wanted; with its prompt's tokens, where these count."""
    if store.is_tagged:
        return [float(store.target_weights[index])]
    found = []
    for number in store.documents(index):
        if store.value(number) > 0:
            weights = store.document(number)[1]
            weights = _with_prompt(weights) if counts_prompts else weights
            found.append(float(weights[1:].sum(dtype=np.float64)))
    return found


def _with_prompt(weights: np.ndarray) -> np.ndarray:
    return np.where(weights > 0, weights, np.float32(1.0))


def micro_batch_of(
    documents: Sequence[PackedDocument], *, counts_prompts: bool = False, rows: Rows = "targets"
) -> MicroBatch:
    """Documents laid end to end, labels shifted by one within each. The only place where this is done. Where prompts
    count, those of answers that are wanted do. `rows`: which tokens count, in place of those that predict a target."""
    import torch

    lengths = np.array([len(d.ids) for d in documents], dtype=np.int64)
    assert lengths.min() >= 1
    tokens = np.concatenate([d.ids for d in documents]).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    weights = answers = _shifted([d.weights for d in documents], bounds)
    if counts_prompts:
        is_counted = [d.value > 0 and d.part >= 0 for d in documents]
        pairs = zip(documents, is_counted, strict=True)
        weights = _shifted([_with_prompt(d.weights) if counted else d.weights for d, counted in pairs], bounds)
    if rows in ("ends", "all"):
        counts_d = np.array([d.part >= 0 for d in documents], dtype=np.float32)
        weights = answers = np.repeat(counts_d, lengths) if rows == "all" else np.zeros(len(tokens), dtype=np.float32)
        weights[bounds[1:] - 1] = counts_d
    labels = np.roll(tokens, -1)
    if rows == "tagged":
        labels = np.concatenate([d.weights for d in documents]).astype(np.int64) - 1
        weights = answers = (labels >= 0).astype(np.float32)
    labels[weights == 0] = 0
    shared = np.array([d.shared for d in documents], dtype=np.int64)
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1] - shared, lengths)
    tensor = torch.from_numpy
    keys = key_places = None
    if shared.any():
        firsts = np.maximum.accumulate(np.where(shared == 0, np.arange(len(documents)), 0))
        ranges = [
            np.arange(start, start + size)
            for first, own, length, size in zip(firsts, bounds[:-1], lengths, shared, strict=True)
            for start, size in ((bounds[first], size), (own, length))
        ]
        key_places = tensor(np.concatenate(ranges))
        keys = tensor(np.concatenate([[0], np.cumsum(shared + lengths)]).astype(np.int32))
    return MicroBatch(
        tokens=tensor(tokens),
        labels=tensor(labels),
        weights=tensor(weights),
        positions=tensor(positions),
        boundaries=tensor(bounds.astype(np.int32)),
        longest=int((shared + lengths).max()),
        sources=tensor(np.array([d.source for d in documents], dtype=np.int64)),
        origins=tuple(d.origin for d in documents),
        parts=tensor(np.array([d.part for d in documents], dtype=np.int64)),
        values=tensor(np.array([d.value for d in documents], dtype=np.float64)),
        references=tensor(np.array([d.reference for d in documents], dtype=np.float64)),
        numbers=tensor(np.array([d.number for d in documents], dtype=np.int64)),
        records=tensor(np.array([d.record for d in documents], dtype=np.int64)),
        answers=tensor(answers) if counts_prompts else None,
        keys=keys,
        key_places=key_places,
    )


def _shifted(weights: Sequence[np.ndarray], bounds: np.ndarray) -> np.ndarray:
    """How much each position's prediction counts."""
    shifted = np.roll(np.concatenate(weights).astype(np.float32), -1)
    shifted[bounds[1:] - 1] = 0  # the next token is another document's
    return shifted


def deal(
    documents: Sequence[PackedDocument],
    *,
    sequence_length: int,
    micro_batch: int,
    lengths: Lengths | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[MicroBatch, ...]:
    """The micro-batches of this rank of documents that are no store's, packed as those of a step are: as many on all
    ranks, some with nothing that counts."""
    sizes = np.array([len(document.ids) for document in documents], dtype=np.int64)
    sequences = pack(sizes, sequence_length)
    if lengths is not None:
        flat = np.concatenate(sequences)
        groups = [
            flat[one] for one in by_length([sizes[one] for one in sequences], micro_batch, sequence_length, lengths)
        ]
        parts = groups[rank::ranks]
        parts += [np.empty(0, dtype=np.int64)] * (ceil(len(groups) / ranks) - len(parts))
    else:
        mine, count = sequences[rank::ranks], ceil(ceil(len(sequences) / ranks) / micro_batch)
        ends = [len(mine) * i // count for i in range(count + 1)]
        parts = [np.concatenate([np.empty(0, dtype=np.int64), *mine[a:b]]) for a, b in pairwise(ends)]
    return tuple(
        micro_batch_of([documents[i] for i in part.tolist()] if len(part) else [idle(documents[0])]) for part in parts
    )


def _widths_of(sequence: Sequenced, stores: Sequence[TokenStore]) -> np.ndarray:
    pairs = zip(*(one.tolist() for one in sequence), strict=True)
    return np.array([stores[source].widths[index] for source, index in pairs])


def by_length(
    sequences: Sequence[np.ndarray],
    micro_batch: int,
    sequence_length: int,
    lengths: Lengths,
    most: tuple[int, int] | None = None,
) -> list[np.ndarray]:
    """Micro-batches of the documents in these sequences, whose lengths are given, as indices into all of them: of like
    length, or as they are packed, but for those that must be by themselves. None is larger than planned."""
    is_padded, alone = lengths
    flat = np.concatenate(sequences)
    if is_padded:
        groups = like_lengths(flat.tolist(), micro_batch * sequence_length, alone=alone, most=most)
        return [np.array(group) for group in groups]
    assert alone is not None
    starts = np.cumsum([0, *(len(one) for one in sequences)])
    short = [np.arange(a, b)[flat[a:b] <= alone] for a, b in pairwise(starts)]
    short = [one for one in short if len(one)]
    joined = [np.concatenate(short[i : i + micro_batch]) for i in range(0, len(short), micro_batch)]
    return [*joined, *(np.array([index]) for index in np.flatnonzero(flat > alone))]


def evaluation_batches(
    store: TokenStore,
    *,
    sequence_length: int,
    micro_batch: int,
    lengths: Lengths | None = None,
    source: int = 0,
    rank: int = 0,
    ranks: int = 1,
    counts_prompts: bool = False,
    rows: Rows = "targets",
) -> Iterator[MicroBatch]:
    """Every example once, packed, in a fixed order, a micro-batch at a time.

    Ranks take micro-batches in turn, as many each: where nothing is left for one, it gets two tokens that count 0.
    """
    sizes = {"sequence_length": sequence_length, "micro_batch": micro_batch, "lengths": lengths}
    for indices in evaluation_indices(store, **sizes, rank=rank, ranks=ranks):
        if indices is None:
            yield micro_batch_of([idle(documents_of(store, 0, source)[0])])
        else:
            documents = [one for index in indices for one in documents_of(store, index, source)]
            yield micro_batch_of(documents, counts_prompts=counts_prompts, rows=rows)


def evaluation_indices(
    store: TokenStore, *, sequence_length: int, micro_batch: int, lengths: Lengths | None, rank: int, ranks: int
) -> Iterator[list[int] | None]:
    """The examples of each micro-batch of `evaluation_batches`; None where there are none left for this rank."""
    sequences = pack_in_windows(store.lengths, sequence_length)
    while round_of_all := list(islice(sequences, micro_batch * ranks)):
        if lengths is not None:
            groups = by_length([store.widths[one] for one in round_of_all], micro_batch, sequence_length, lengths)
            indices = np.concatenate(round_of_all)
            for at in range(0, len(groups), ranks):
                yield indices[groups[at + rank]].tolist() if at + rank < len(groups) else None
            continue
        mine = round_of_all[rank * micro_batch : (rank + 1) * micro_batch]
        yield np.concatenate(mine).tolist() if mine else None


def pack_in_windows(lengths: np.ndarray, capacity: int) -> Iterator[np.ndarray]:
    """Pack neighbours: stretches of about `WINDOW` sequences' worth of documents, each on its own.

    Packing an epoch as a whole would sort it by length, and short documents would only ever meet short ones.
    """
    total = int(lengths.sum())
    windows = _windows(total, capacity)
    begins = np.cumsum(lengths) - lengths
    bounds = np.searchsorted(begins, [total * w // windows for w in range(windows + 1)])
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for sequence in pack(lengths[first:last], capacity):
            yield sequence + first


def _windows(tokens: int, capacity: int) -> int:
    return max(1, tokens // (WINDOW * capacity))


@dataclass(frozen=True)
class _Epoch:
    """An epoch's documents, sequence after sequence."""

    sources: np.ndarray
    indices: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sequence(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        at = slice(self.bounds[i], self.bounds[i + 1])
        return self.sources[at], self.indices[at]
