"""Mixing: several data sets with weights become one order per epoch, a pure function of (seed, epoch).

A weight of 2.5 shows every example twice per epoch and a different half of them once more: that half is the
next stretch of a fixed permutation which goes round and round, so two epochs together show everything. Random
numbers are the raw output of Philox, a published algorithm, not numpy's distributions, which may change with
its version: a run resumed after an upgrade sees the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

import numpy as np

_FRACTIONS, _EPOCHS = 0, 1  # streams of random numbers that must not meet


def epoch_order(
    counts: Sequence[int], weights: Sequence[float], seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Data set (int32) and example in it (int64) of everything seen in this epoch, in order."""
    chosen = [
        _chosen(source, count, weight, seed, epoch)
        for source, (count, weight) in enumerate(zip(counts, weights, strict=True))
    ]
    sources = np.repeat(np.arange(len(chosen), dtype=np.int32), [len(part) for part in chosen])
    indices = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    order = permutation(len(indices), seed, _EPOCHS, epoch)
    return sources[order], indices[order]


def permutation(size: int, seed: int, *stream: int) -> np.ndarray:
    """A random order of `range(size)`, the same for the same seed and (up to three) stream numbers."""
    counter = [0, *stream, 0, 0, 0][:4]
    keys = np.random.Philox(key=[seed, 0], counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable")


def exact(number: float) -> Fraction:
    """The decimal that was written, as a fraction: 0.1 is one tenth, so that no epoch is off by one."""
    return Fraction(repr(float(number)))


def _chosen(source: int, count: int, weight: float, seed: int, epoch: int) -> np.ndarray:
    whole = floor(weight)
    every = np.tile(np.arange(count, dtype=np.int64), whole)
    share = (exact(weight) - whole) * count
    if not share:
        return every
    begin, end = ceil(epoch * share), ceil((epoch + 1) * share)
    stretch = np.arange(begin, end, dtype=np.int64) % count
    return np.concatenate([every, permutation(count, seed, _FRACTIONS, source)[stretch]])
