"""The token store: tokenized examples, memory-mapped, none over the sequence length.

What is on disk are whole examples, whatever their length (`token_files.py`). Cutting them to `sequence_length` happens
when a store is opened, on offsets alone: another sequence length costs no second tokenization.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

import numpy as np

from tunesmith.data.types import RecordError
from tunesmith.errors import UserError

TooLong = Literal["truncate", "split", "drop"]


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
    _starts: np.ndarray = field(repr=False)
    _owners: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Token ids (int32), their weights (float32) and where the example came from."""
        whole, owner = self._whole, self._owners[i]
        at = slice(int(self._starts[i]), int(self._starts[i] + self.lengths[i]))
        file, line = whole.origins[owner].tolist()
        name, unit = whole.files[file]
        ids = whole.tokens[at].astype(np.int32)
        return ids, whole.weight_table[whole.codes[at]], f"{name}, {unit} {line}"

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
        """Those of the examples that are `chosen` (bool [N]). Its report tells what was cut and dropped of them all."""
        lengths, owners = self.lengths[chosen], self._owners[chosen]
        made = TokenStore(
            title,
            f"{self.fingerprint}:{sha256(np.flatnonzero(chosen).tobytes()).hexdigest()[:16]}",
            self.report,
            lengths,
            self.target_weights[chosen],
            self.target_counts[chosen],
            self.warnings,
            self._whole,
            self._starts[chosen],
            owners,
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
    """Of the records, those that cannot be trained on; no example is from them."""
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


def cut(whole: Whole, title: str, *, sequence_length: int, too_long: TooLong) -> TokenStore:
    """The examples in lengths that fit; those with nothing to learn from are left out, and all are counted."""
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
            weights = whole.weight_table[whole.codes[starts[i] + 1 : starts[i] + lengths[i]]]
            sums[i], targets[i] = weights.sum(dtype=np.float64), np.count_nonzero(weights)
    without_targets = len(np.unique(owners[keep & ~had_targets]))
    cut_off = int((keep & had_targets & (sums == 0)).sum())
    keep &= sums > 0
    if not keep.any():
        raise UserError(
            _nothing_left(title, whole, too_long, sequence_length, dropped_too_long, cut_off, longest_uncut)
        )
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
    return TokenStore(
        title, whole.content + matters, report, lengths, sums, targets, whole.warnings, whole, starts, owners
    )


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


def _nothing_left(
    title: str, whole: Whole, too_long: TooLong, size: int, dropped: int, cut_off: int, longest: int
) -> str:
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
            f"{size} and are cut off; raise sequence_length (the longest example has {longest} tokens) or set "
            "too_long: split."
        )
    return (
        f"{title}: none of its {n} examples has a target token, so there is nothing to learn from; check the "
        "format, the weights of the messages and train_on."
    )
