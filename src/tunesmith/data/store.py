"""The token store: tokenized examples, memory-mapped, none over the sequence length.

What is on disk are whole examples, whatever their length (`token_files.py`). Cutting them to `sequence_length` happens
when a store is opened, on offsets alone: another sequence length costs no second tokenization.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from tunesmith.data.types import RecordError
from tunesmith.errors import UserError

TooLong = Literal["truncate", "split", "drop"]
SHARED = 8
"""Tokens that two answers must begin with together to have them once: fewer are not worth keys of their own."""
IN_ONE_PIECE = (
    "preference", "judged", "scored", "labelled", "labelled_pair", "tagged", "prompts", "anchors", "similar",
)  # fmt: skip
"""Formats whose examples are never split."""
TAGGED = "tagged"
"""The format in which a weight is the number of a token's own label and 1 more (`Example.is_tagged`)."""


@dataclass(frozen=True)
class Report:
    """What became of a data set's records. Lengths and tokens are those of the examples that are left."""

    format: str
    records: int
    bad: int
    """Records that cannot be trained on, and are left out."""
    examples: int
    truncated: int
    """Examples cut to the sequence length."""
    split: int
    """Examples split into pieces of the sequence length."""
    dropped_too_long: int
    dropped_targets_cut_off: int
    """Examples, or pieces, left without a target by truncating or splitting, and therefore dropped."""
    dropped_without_targets: int
    """Examples that had no target token to begin with."""
    tokens: int
    target_tokens: int
    shortest: int
    median: int
    p95: int
    longest: int
    longest_uncut: int

    @property
    def target_share(self) -> float:
        return self.target_tokens / self.tokens


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Examples ready for packing: none over the sequence length, each with something to learn from.

    Legend: N examples.
    """

    title: str
    fingerprint: str
    """Equal ones hold equal examples in equal order, wherever their files lie and whichever version made them."""
    report: Report
    lengths: np.ndarray
    """int64 [N]"""
    target_weights: np.ndarray
    """float64 [N]: sum of the weights that count; the first token is predicted by nothing and never does."""
    target_counts: np.ndarray
    """int64 [N]: tokens with such a weight"""
    warnings: tuple[str, ...]
    """What was noticed when the records were read."""
    _whole: Whole = field(repr=False)
    _owners: np.ndarray = field(repr=False)
    _firsts: np.ndarray = field(repr=False)
    """int64 [N+1]: the first of each example's documents, among all"""
    _starts: np.ndarray = field(repr=False)
    """int64 [D]: where each document begins in the files"""
    _sizes: np.ndarray = field(repr=False)
    """int64 [D]: its tokens"""
    _values: np.ndarray = field(repr=False)
    """float32 [D]: what the data say of it"""
    references: np.ndarray | None = field(default=None, repr=False)
    """float64 [D]: the log-probability that a reference gives its targets, once that is known"""
    is_paired: bool = False
    """Each example is a target and a source (`data.paired`)."""
    _shared: np.ndarray | None = field(default=None, repr=False)
    """int64 [D]: of each document, the tokens left out at its beginning, which its example's first one begins with"""

    def __len__(self) -> int:
        return len(self.lengths)

    def documents(self, i: int) -> range:
        """The numbers of an example's documents."""
        return range(int(self._firsts[i]), int(self._firsts[i + 1]))

    @property
    def is_tagged(self) -> bool:
        return self._whole.format == TAGGED

    @property
    def has_context(self) -> bool:
        """Whether any document begins with what is no target, such as a prompt. Its first token never is one."""
        whole, seconds = self._whole, self._starts[self._sizes > 1] + 1
        return bool((whole.weight_table[whole.codes[seconds]] == 0).any())

    @property
    def document_count(self) -> int:
        return len(self._sizes)

    def document(self, d: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and their weights (float32)."""
        at = slice(int(self._starts[d]), int(self._starts[d] + self._sizes[d]))
        return self._whole.tokens[at].astype(np.int32), self._whole.weight_table[self._whole.codes[at]]

    def shared(self, d: int) -> int:
        """How many tokens of its example's first document stand before those of this one."""
        return 0 if self._shared is None else int(self._shared[d])

    @property
    def shared_tokens(self) -> int:
        return 0 if self._shared is None else int(self._shared.sum())

    def sharing(self) -> TokenStore:
        """A store of the same pairs with their prompts once: of the second answer, what it begins with as the first one
        does is left out, up to the token that predicts its first target. Where only whole documents count, and every
        token is a target, up to its last token."""
        if self.document_count == len(self) or self._shared is not None:
            return self
        shared = np.zeros(self.document_count, dtype=np.int64)
        for i in np.flatnonzero(np.diff(self._firsts) == 2).tolist():
            first = int(self._firsts[i])
            shared[first + 1] = self._begins_alike(first, first + 1)
        starts, sizes = self._starts + shared, self._sizes - shared
        lengths = np.add.reduceat(sizes, self._firsts[:-1])
        fingerprint = f"{self.fingerprint}:shared" if shared.any() else self.fingerprint
        report = replace(self.report, **_lengths_of(lengths))
        said = {"fingerprint": fingerprint, "report": report, "lengths": lengths}
        return replace(self, **said, _starts=starts, _sizes=sizes, _shared=shared)

    def _begins_alike(self, first: int, second: int) -> int:
        (ids, _), (others, weights) = self.document(first), self.document(second)
        size = min(len(ids), len(others))
        differ = np.flatnonzero(ids[:size] != others[:size])
        alike = int(differ[0]) if len(differ) else size
        is_scored = bool((weights > 0).all())
        own = len(others) if is_scored else int((weights > 0).argmax())
        alike = min(alike, own - 1)
        return alike if alike >= SHARED else 0

    def value(self, d: int) -> float:
        return float(self._values[d])

    @property
    def values(self) -> np.ndarray:
        """float32 [D]: what the data say of each document."""
        return self._values

    @property
    def single_values(self) -> np.ndarray:
        """float32: what the data say of the documents that are an example by themselves."""
        firsts = self._firsts[:-1][np.diff(self._firsts) == 1]
        return self._values[firsts]

    def facts(self, i: int) -> dict[str, Any]:
        """What the record of a prompt says besides."""
        owner = int(self._owners[i])
        begin = int(self._whole.fact_ends[owner - 1]) if owner else 0
        return json.loads(self._whole.facts[begin : int(self._whole.fact_ends[owner])].tobytes() or b"{}")

    def owner(self, i: int) -> int:
        """The number of the whole example that it is, or is a piece of, whichever were chosen."""
        return int(self._owners[i])

    @property
    def key(self) -> str:
        """The key under which the token cache has the whole examples; "" where it has not."""
        return self._whole.key

    def origin(self, i: int) -> str:
        """The file and line or record that an example came from, for messages to people."""
        file, line = self._whole.origins[self._owners[i]].tolist()
        name, unit = self._whole.files[file]
        return f"{name}, {unit} {line}"

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Token ids (int32), their weights (float32), of all its documents, and where the example came from."""
        documents = [self.document(d) for d in self.documents(i)]
        ids, weights = (np.concatenate(some) if len(some) > 1 else some[0] for some in zip(*documents, strict=True))
        return ids, weights, self.origin(i)

    @cached_property
    def widths(self) -> np.ndarray:
        """int64 [N]: tokens of an example whose documents are padded to the longest of them; [N, 2] where it has two
        sides: tokens of its source and of its target."""
        if self.is_paired:
            return np.stack([self.lengths - 1 - self.target_counts, self.target_counts], axis=1)
        if self.document_count == len(self):
            return self.lengths
        return np.maximum.reduceat(self._sizes, self._firsts[:-1]) * np.diff(self._firsts)

    def referred(self, references: np.ndarray) -> TokenStore:
        """The same store with what a reference thinks of each document."""
        assert references.shape == self._sizes.shape
        return replace(self, references=references)

    @property
    def bad(self) -> tuple[RecordError, ...]:
        """Records that were left out."""
        return self._whole.bad

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [N]: of the whole example each one belongs to, for finding the same example elsewhere."""
        return self._whole.hashes[self._owners]

    @property
    def records(self) -> np.ndarray:
        """int64 [N]: the record each one came from, as a number of its own."""
        file, line = self._whole.origins[self._owners].T.astype(np.int64)
        return (file << 32) + line

    @property
    def record_count(self) -> int:
        return len(np.unique(self.records))

    def part(self, chosen: np.ndarray, title: str) -> TokenStore:
        """A store of the examples that are `chosen` (bool [N]). Its report tells what was cut and dropped of them
        all."""
        lengths, owners = self.lengths[chosen], self._owners[chosen]
        counts = np.diff(self._firsts)
        documents = np.repeat(chosen, counts)
        made = TokenStore(
            title,
            f"{self.fingerprint}:{sha256(np.flatnonzero(chosen).tobytes()).hexdigest()[:16]}",
            self.report,
            lengths,
            self.target_weights[chosen],
            self.target_counts[chosen],
            self.warnings,
            self._whole,
            owners,
            _firsts_of(counts[chosen]),
            self._starts[documents],
            self._sizes[documents],
            self._values[documents],
            None if self.references is None else self.references[documents],
            self.is_paired,
            None if self._shared is None else self._shared[documents],
        )
        report = replace(
            self.report,
            records=made.record_count,
            examples=len(lengths),
            **_lengths_of(lengths),
            target_tokens=int(made.target_counts.sum()),
        )
        return replace(made, report=report)


@dataclass(frozen=True, eq=False)
class Whole:
    """Whole examples, memory-mapped. Legend: N examples, T tokens of all of them."""

    content: str
    """Fingerprint of the tokens and weights, whatever they were made from and by."""
    format: str
    records: int
    bad: tuple[RecordError, ...]
    """The records that cannot be trained on; no example is from them."""
    warnings: tuple[str, ...]
    files: list[tuple[str, str]]
    """Name and unit (line, record) of each file that examples came from."""
    weight_table: np.ndarray
    """float32: the distinct weights, by code"""
    tokens: np.ndarray
    """uint16 or int32 [T]"""
    codes: np.ndarray
    """uint16 [T]"""
    offsets: np.ndarray
    """int64 [N+1]"""
    sums: np.ndarray
    """float64 [N]: target weight, first token left out"""
    targets: np.ndarray
    """int64 [N]: target tokens, first token left out"""
    origins: np.ndarray
    """int32 [N, 2]: file and line"""
    hashes: np.ndarray
    """uint64 [N]"""
    counts: np.ndarray
    """int32 [N]: documents of each example"""
    sizes: np.ndarray
    """int64: tokens of each document"""
    values: np.ndarray
    """float32: what the data say of each document"""
    facts: np.ndarray
    """uint8: what the records of prompts say besides, as JSON, end to end"""
    fact_ends: np.ndarray
    """int64 [N]: where those of each example end"""
    key: str = ""
    """Under which the token cache has them."""

    def origin(self, i: int) -> tuple[str, str, int]:
        """File, unit (line, record) and number of what an example was made from."""
        file, line = self.origins[i].tolist()
        return (*self.files[file], line)


def cut(whole: Whole, title: str, *, sequence_length: int, too_long: TooLong) -> TokenStore:
    """The examples in lengths that fit; those with nothing to learn from are left out, and all are counted."""
    if len(whole.sizes) > len(whole.counts):
        return _cut_groups(whole, title, sequence_length=sequence_length, too_long=too_long)
    lengths = np.diff(whole.offsets)
    owners = np.arange(len(lengths))
    starts = whole.offsets[:-1].copy()
    sums, targets = whole.sums.copy(), whole.targets.copy()
    is_long = lengths > sequence_length
    longest_uncut = int(lengths.max())
    long_examples = np.flatnonzero(is_long)

    had_targets = sums > 0
    dropped_too_long = 0
    if too_long == "drop":
        keep = ~is_long
        dropped_too_long = len(long_examples)
    else:
        keep = np.ones(len(lengths), dtype=bool)
        if too_long == "split" and len(long_examples):
            starts, lengths, owners = _pieces(starts, lengths, sequence_length)
            sums, targets, is_long, had_targets = (a[owners] for a in (sums, targets, is_long, had_targets))
            keep = np.ones(len(lengths), dtype=bool)
        lengths = np.minimum(lengths, sequence_length)
        for i in np.flatnonzero(is_long):
            first = starts[i] if whole.format == TAGGED else starts[i] + 1
            weights = whole.weight_table[whole.codes[first : starts[i] + lengths[i]]]
            targets[i] = np.count_nonzero(weights)
            sums[i] = targets[i] if whole.format == TAGGED else weights.sum(dtype=np.float64)
    without_targets = len(np.unique(owners[keep & ~had_targets]))
    cut_off = int((keep & had_targets & (sums == 0)).sum())
    keep &= sums > 0
    if not keep.any():
        raise UserError(_nothing_left(title, whole, sequence_length, dropped_too_long, cut_off, longest_uncut))
    lengths, sums, targets, starts, owners = (a[keep] for a in (lengths, sums, targets, starts, owners))
    report = Report(
        format=whole.format,
        records=whole.records,
        bad=len(whole.bad),
        examples=len(lengths),
        truncated=int((is_long & keep).sum()) if too_long == "truncate" else 0,
        split=len(long_examples) if too_long == "split" else 0,
        dropped_too_long=dropped_too_long,
        dropped_targets_cut_off=cut_off,
        dropped_without_targets=without_targets,
        target_tokens=int(targets.sum()),
        **_lengths_of(lengths),
        longest_uncut=longest_uncut,
    )
    matters = f":{too_long}:{sequence_length}" if len(long_examples) else ""
    firsts, values = np.arange(len(lengths) + 1), np.asarray(whole.values)[owners]
    said = (title, whole.content + matters, report, lengths, sums, targets, whole.warnings, whole)
    return TokenStore(*said, owners, firsts, starts, lengths, values)


def _cut_groups(whole: Whole, title: str, *, sequence_length: int, too_long: TooLong) -> TokenStore:
    """`cut` for examples of several documents, such as pairs, which are never torn apart: where one is too long, the
    ends of its longest documents go, as much of each as makes it fit."""
    counts, sizes = np.asarray(whole.counts, dtype=np.int64), np.array(whole.sizes)
    firsts = _firsts_of(counts)
    starts = np.cumsum(sizes) - sizes
    lengths = np.add.reduceat(sizes, firsts[:-1])
    is_long = lengths > sequence_length
    longest_uncut = int(lengths.max())
    keep = whole.sums > 0
    without_targets = int((~keep).sum())
    dropped_too_long = int((is_long & keep).sum()) if too_long == "drop" else 0
    sums, targets = whole.sums.copy(), whole.targets.copy()
    cut_off = 0
    if too_long == "drop":
        keep &= ~is_long
    for i in np.flatnonzero(is_long & keep):
        of = slice(firsts[i], firsts[i + 1])
        sizes[of] = shortened(sizes[of], sequence_length)
        parts = [whole.weight_table[whole.codes[s + 1 : s + n]] for s, n in zip(starts[of], sizes[of], strict=True)]
        sums[i], targets[i] = sum(w.sum(dtype=np.float64) for w in parts), sum(np.count_nonzero(w) for w in parts)
        if not all(w.any() for w in parts):
            keep[i] = False
            cut_off += 1
    if not keep.any():
        raise UserError(_nothing_left(title, whole, sequence_length, dropped_too_long, cut_off, longest_uncut))
    documents, owners = np.repeat(keep, counts), np.flatnonzero(keep)
    sizes, lengths = sizes[documents], np.add.reduceat(sizes, firsts[:-1])[keep]
    report = Report(
        format=whole.format,
        records=whole.records,
        bad=len(whole.bad),
        examples=len(lengths),
        truncated=int((is_long & keep).sum()),
        split=0,
        dropped_too_long=dropped_too_long,
        dropped_targets_cut_off=cut_off,
        dropped_without_targets=without_targets,
        target_tokens=int(targets[keep].sum()),
        **_lengths_of(lengths),
        longest_uncut=longest_uncut,
    )
    matters = f":{too_long}:{sequence_length}" if is_long.any() else ""
    said = (title, whole.content + matters, report, lengths, sums[keep], targets[keep], whole.warnings, whole)
    kept = (_firsts_of(counts[keep]), starts[documents], sizes, np.asarray(whole.values)[documents])
    return TokenStore(*said, owners, *kept)


def shortened(sizes: np.ndarray, room: int) -> np.ndarray:
    """The sizes that fit into the room together: short ones stay as they are, long ones become alike."""
    made = np.array(sizes, dtype=np.int64)
    left = room
    order = np.argsort(made, kind="stable")
    for place, index in enumerate(order):
        made[index] = min(made[index], left // (len(order) - place))
        left -= made[index]
    return made


def _firsts_of(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _lengths_of(lengths: np.ndarray) -> dict[str, int]:
    return {
        "tokens": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "p95": int(np.percentile(lengths, 95)),
        "longest": int(lengths.max()),
    }


def _pieces(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, lengths and owners of the pieces of all examples; those that fit are their only piece.

    A piece begins with the last token of the one before it: a first token is predicted by nothing, so without
    this overlap one target would be lost at each cut.
    """
    stride = size - 1
    counts = np.where(lengths > size, -(-(lengths - 1) // stride), 1)
    owners = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return (
        starts[owners] + number * stride,
        np.minimum(lengths[owners] - number * stride, size),
        owners,
    )


def _nothing_left(title: str, whole: Whole, size: int, dropped: int, cut_off: int, longest: int) -> str:
    n = len(whole.sums)
    if dropped:
        return (
            f"{title}: no example is left, since {dropped} of {n} are longer than sequence_length {size} and "
            f"too_long is drop; raise sequence_length (the longest has {longest} tokens) or set too_long: "
            "truncate."
        )
    if cut_off:
        return (
            f"{title}: no example is left, since the targets of {cut_off} of {n} begin beyond sequence_length "
            f"{size} and are cut off; raise sequence_length (the longest example has {longest} tokens)"
            + ("." if whole.format in IN_ONE_PIECE else " or set too_long: split.")
        )
    return (
        f"{title}: none of its {n} examples has a target token, so there is nothing to learn from; check the "
        "format, the weights of the messages and train_on."
    )
