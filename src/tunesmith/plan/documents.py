"""What the data files tell before they are tokenized: about how many tokens there are, and how long documents are.

A plan is made before the tokenizer runs, so both are estimates from bytes. Attention costs by the length of the
documents, not of the sequences they are packed into; memory depends on neither.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import le
from pathlib import Path

import numpy as np

from tunesmith.config.schema import Dataset, Run
from tunesmith.disk import expanded
from tunesmith.plan.defaults import DataSize, held_out_records
from tunesmith.plan.facts import terms
from tunesmith.plan.plan import Plan

TOKEN_BYTES = 4.5
"""Bytes of text a token stands for, roughly, with the file's own syntax."""
SAMPLE = 1 << 20
"""Bytes of each data set that are looked at."""
START = 1 / 16
"""What a padded micro-batch costs beside its tokens, as a share of the tokens of a full one."""
LINES = (".jsonl", ".ndjson")
"""Files with a document a line; of others nobody knows where a document ends without reading them."""
SMALL = 16 << 20
"""Bytes of a list in JSON that may be read as a whole."""
PACKED_FILES, PACKED = (".gz", ".zst", ".parquet"), 3
"""Files that hold about so many times their own size."""
UNKNOWN_LENGTH = 250
"""Tokens of a document where nothing tells."""


def measure(run: Run) -> DataSize | None:
    """The size of the training data as its files tell it; None where they do not. Examples are counted where files have
    one a line, or are small."""
    tokens = examples = 0.0
    longest: int | None = 0
    for dataset in run.data:
        files = _files(dataset)
        if not files:
            return None
        size = sum((PACKED if file.suffix in PACKED_FILES else 1) * file.stat().st_size for file in files) / TOKEN_BYTES
        document_bytes = list(_sizes(files))
        lengths = [max(1, round(count / TOKEN_BYTES)) for count in document_bytes]
        mean = sum(document_bytes) / TOKEN_BYTES / len(document_bytes) if document_bytes else UNKNOWN_LENGTH
        count = size / mean
        if dataset.limit is not None and dataset.limit < count:
            size, count = dataset.limit * mean, dataset.limit
        tokens += size * dataset.weight
        examples += count * dataset.weight
        longest = max(longest, *lengths) if lengths and longest is not None else None
    if longest is not None:
        longest = min(longest, run.sequence_length)
    return DataSize(examples, tokens, longest)


def guess_held_out(run: Run, size: DataSize | None) -> int:
    """How many records will be held out, roughly."""
    if run.held_out is not None and run.held_out >= 1:
        return round(run.held_out)
    return held_out_records(run, [round(size.examples) if size else 0]) if run.held_out != 0 else 0


def total_tokens(run: Run, plan: Plan, size: DataSize | None) -> tuple[int, str] | None:
    """Tokens of the whole run and how that is known: its steps, or the size of its files, roughly."""
    if run.steps is not None:
        return run.steps * plan.sequences_per_step * plan.sequence_length, f"{run.steps:,} steps"
    if size is None:
        return None
    return round(size.tokens * plan.epochs), "counted" if size.is_exact else "the size of the files, roughly"


def sample_lengths(run: Run) -> tuple[int, ...]:
    """Tokens of some of the run's documents, roughly; none where the files do not tell."""
    lengths: list[int] = []
    for dataset in run.data:
        of_dataset = _lengths(_files(dataset))
        if not of_dataset:
            return ()
        lengths += of_dataset
    return tuple(lengths)


def missing(run: Run) -> list[str]:
    """Paths of the run's data at which there is nothing."""
    return [dataset.path for dataset in run.data if dataset.path is not None and not _files(dataset)]


def mean_length(lengths: Sequence[int], sequence_length: int) -> int:
    """Of the document that a token is in, on average over tokens; documents are cut at the sequence length."""
    cut = [min(length, sequence_length) for length in lengths]
    return round(sum(length**2 for length in cut) / sum(cut)) if cut else sequence_length


def like_lengths(
    lengths: Sequence[int] | Sequence[Sequence[int]],
    tokens: int,
    *,
    alone: int | None = None,
    most: tuple[int, int] | None = None,
) -> list[list[int]]:
    """Which documents share a padded micro-batch, longest first: no more than `tokens` with their padding (but one
    document always), above `alone` tokens each by itself, and as little padding and as few micro-batches as can be. A
    document may have several sides, each padded by itself: then its length is one number for each. `most`: tokens, and
    pairs of tokens in rows, that several documents may have together."""
    if not len(lengths):
        return []
    sides = np.array(lengths, dtype=np.int64).reshape(len(lengths), -1)
    keys = [*sides.T, sides.sum(axis=1)] if sides.shape[1] > 1 else [sides[:, 0]]
    orders = [np.lexsort((*-sides.T, -key)) for key in keys]
    parted = [_part(sides[order], tokens, alone, most) for order in orders]
    (_, ends), order = min(zip(parted, orders, strict=True), key=lambda parted_order: parted_order[0][0])
    return [order[start:end].tolist() for start, end in pairwise([0, *ends])]


def _part(sides: np.ndarray, tokens: int, alone: int | None, most: tuple[int, int] | None) -> tuple[float, list[int]]:
    """The cheapest way to cut these documents into micro-batches without another order: its cost, in tokens, and where
    each micro-batch ends."""
    count = len(sides)
    best, begins = np.zeros(count + 1), [0] * (count + 1)
    for end in range(1, count + 1):  # of the first so many, by how many of them the last micro-batch may have
        rows = np.arange(1, min(end, max(1, tokens // max(1, sides[end - 1].sum()))) + 1)
        wide = np.maximum.accumulate(sides[end - len(rows) : end][::-1])
        widest = wide.sum(axis=1)
        padded = rows * widest
        fits = padded <= (tokens if alone is None else np.where(widest <= alone, tokens, 0))
        if most is not None:  # of two sides, a pair of one with the other is one, too
            fits[1:] &= (padded <= most[0])[1:] & (rows * ((widest**2 + (wide**2).sum(axis=1)) // 2) <= most[1])[1:]
        fits[0] = True
        costs = np.where(fits, best[end - rows] + padded, np.inf)
        rest = int(costs.argmin())
        best[end], begins[end] = costs[rest] + START * tokens, end - int(rows[rest])
    ends, end = [], count
    while end:
        ends.append(end)
        end = begins[end]
    return float(best[count]), ends[::-1]


Shape = tuple[int, ...]
"""Of a padded micro-batch: its rows, and tokens of each side of a row."""


@dataclass(frozen=True, eq=False)
class Padded:
    """How examples whose documents are padded lie in steps: those of some steps, and what no other one of the run is
    longer than. Lengths have one number for each side, and are those of all rows of an example."""

    steps: tuple[np.ndarray, ...]
    """int64 [E, sides], of each step that was looked at."""
    longest: np.ndarray
    """int64 [L, sides]: any example of the run is no longer than one of these."""
    rows: int = 1
    """Of each example: several where it has two answers, which are padded to the longer one."""
    is_every: bool = False
    """These are all the steps of the run."""
    _known: dict[int, tuple[tuple[Shape, ...], ...]] = field(default_factory=dict)
    _means: dict[int, np.ndarray] = field(default_factory=dict)

    def shapes(self, tokens: int) -> tuple[tuple[Shape, ...], ...]:
        """The micro-batches of each step, where each may have so many tokens."""
        if tokens not in self._known:
            self._known[tokens] = tuple(
                tuple(self._shape(step[group]) for group in like_lengths(step.tolist(), tokens)) for step in self.steps
            )
        return self._known[tokens]

    def largest(self, tokens: int) -> tuple[Shape, ...]:
        """No micro-batch of so many tokens that keeps to `most`, and no example by itself, needs more memory than one
        of these."""
        shapes = {shape for step in self.shapes(tokens) for shape in step}
        shapes |= {self._shape(example[None]) for example in self.longest}
        if not self.steps:  # nothing is known: as many of the longest as there is room for
            shapes |= {
                self._shape(example[None], max(1, tokens // max(1, int(example.sum())))) for example in self.longest
            }
        if not self.is_every and (most := self.most(tokens)) is not None and all(most):
            # Steps that were not looked at: as many tokens and as many pairs at once, on either side.
            length, count = -(-most[1] // most[0]), -(-most[0] * most[0] // most[1])
            for side in range(self.longest.shape[1]):
                example = np.where(np.arange(self.longest.shape[1]) == side, length, 0)
                shapes.add(self._shape(example[None], count))
        sizes = {shape: [shape[0] * size for size in _sizes_of(shape[1:])] for shape in shapes}
        return tuple(
            shape
            for shape, own in sizes.items()
            if not any(own != other and all(map(le, own, other)) for other in sizes.values())
        )

    def most(self, tokens: int) -> tuple[int, int] | None:
        """Tokens, and pairs of tokens in rows, of the largest micro-batches of these steps: what those of other steps
        keep to."""
        if not self.steps:
            return None
        groups = [step[group] for step in self.steps for group in like_lengths(step.tolist(), tokens)]
        tokens_and_pairs = [_most_of(group) for group in groups if len(group) > 1] or [(0, 0)]
        return max(count for count, _ in tokens_and_pairs), max(pairs for _, pairs in tokens_and_pairs)

    def padding(self, tokens: int) -> float:
        """Tokens that are computed for each one of a document; 1 where the lengths are not known."""
        real = sum(int(step.sum()) for step in self.steps)
        return sum(rows * sum(sides) for step in self.shapes(tokens) for rows, *sides in step) / real if real else 1.0

    def micro_batches(self, tokens: int, ranks: int) -> float:
        """Micro-batches of a rank in a step, in the mean."""
        return sum(-(-len(step) // ranks) for step in self.shapes(tokens)) / len(self.steps)

    def mean(self, tokens: int) -> np.ndarray:
        """Over micro-batches, of what those of an encoder-decoder grow with, or of tokens."""
        if tokens not in self._means:
            shapes = [shape for step in self.shapes(tokens) for shape in step] or self.largest(tokens)
            is_paired = len(shapes[0]) == 3
            self._means[tokens] = np.mean(
                [terms(*shape) if is_paired else (shape[0] * shape[1],) for shape in shapes], axis=0
            )
        return self._means[tokens]

    def _shape(self, examples: np.ndarray, count: int | None = None) -> Shape:
        return self.rows * (count or len(examples)), *(-(-examples.max(axis=0) // self.rows)).tolist()


def outermost(lengths: np.ndarray) -> np.ndarray:
    """Of the lengths [N, sides] those that no other has on all of its sides, or more."""
    if lengths.shape[1] == 1:
        return lengths.max(axis=0, keepdims=True)
    order = np.lexsort((-lengths[:, 1], -lengths[:, 0]))
    best = np.maximum.accumulate(np.concatenate([[-1], lengths[order, 1][:-1]]))
    return lengths[order][lengths[order, 1] > best]


def guessed(lengths: Sequence[int], sequence_length: int, step: int, *, sides: int, rows: int = 1) -> Padded:
    """From some examples' lengths as files tell them, in steps of so many tokens. Which part of one is read and which
    is written, files do not tell: half is, in steps, and either all or nothing may be."""
    halves = [sequence_length // 2, sequence_length - sequence_length // 2]
    ends = [[sequence_length - 1, 1], halves, [1, sequence_length - 1]] if sides == 2 else [[rows * sequence_length]]
    steps, start = [], 0
    cut = [min(length, sequence_length) for length in lengths]
    while start < len(cut):
        end, total = start, 0
        while end < len(cut) and (end == start or total + cut[end] <= step):
            total += cut[end]
            end += 1
        part = np.array(cut[start:end], dtype=np.int64)
        steps.append(np.stack([part - part // 2, part // 2], axis=1) if sides == 2 else part[:, None])
        start = end
    return Padded(tuple(steps), np.array(ends, dtype=np.int64), rows)


def _sizes_of(sides: Sequence[int]) -> list[int]:
    """What memory of a row grows with."""
    return [*sides, *(side * other for side, other in itertools.combinations_with_replacement(sides, 2))]


def _most_of(examples: np.ndarray) -> tuple[int, int]:
    """Tokens, and pairs of tokens in rows, of examples in one micro-batch, as `like_lengths` counts them."""
    sides = examples.max(axis=0).tolist()
    pairs = sum(side * other for side, other in itertools.combinations_with_replacement(sides, 2))
    return len(examples) * sum(sides), len(examples) * pairs


def _files(dataset: Dataset) -> list[Path]:
    if dataset.path is None:
        return []
    path = expanded(dataset.path)
    names = [path] if path.is_file() else [*path.rglob("*")] if path.is_dir() else glob.glob(dataset.path)
    return sorted(Path(name) for name in names if Path(name).is_file())


def _lengths(files: list[Path]) -> list[int]:
    return [max(1, round(size / TOKEN_BYTES)) for size in _sizes(files)]


def _sizes(files: list[Path]) -> Iterator[int]:
    left = SAMPLE
    for file in files:
        if file.suffix == ".json" and file.stat().st_size <= SMALL:
            yield from _sizes_of_list(file)
        if file.suffix not in LINES:
            continue
        with file.open("rb") as stream:
            while left > 0 and (line := stream.readline(left)):
                left -= len(line)
                if line.strip():
                    yield len(line)


def _sizes_of_list(file: Path) -> Iterator[int]:
    """Bytes of each record of a JSON file that is a list; of another file none."""
    try:
        records = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return  # `train` will say what is wrong with it
    if isinstance(records, list):
        for record in records:
            yield len(json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass"))
