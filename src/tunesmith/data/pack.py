"""Packing: which documents share a sequence. Pure functions on lengths; nothing here knows tokens or files.

Best-fit decreasing: the longest documents are placed first, each into the fullest sequence that still has
room for it. The amounts of room on offer are the set bits of one integer, so the best fit is its lowest bit
above the length, and documents of equal length are placed together: a million documents take seconds.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Indices of the documents in each sequence: every document exactly once, no sequence over `capacity`.

    Depends on its arguments alone. Documents keep their order within a sequence.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return []
    if lengths.min() < 1:
        raise ValueError(f"document {lengths.argmin()} is empty; packing needs at least one token in each")
    if lengths.max() > capacity:
        raise ValueError(f"document {lengths.argmax()} has {lengths.max()} tokens; a sequence holds {capacity} at most")
    longest_first = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    sequence_of[longest_first] = _best_fit(lengths[longest_first], capacity)
    by_sequence = np.argsort(sequence_of, kind="stable")
    ends = np.cumsum(np.bincount(sequence_of)).tolist()
    return [by_sequence[start:end] for start, end in pairwise([0, *ends])]


def fill(tokens: int, sequences: int, capacity: int) -> float:
    """Share of the sequences' room that holds tokens: 1 is perfect packing."""
    return tokens / (sequences * capacity) if sequences else 0.0


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The sequence of each document; `lengths` are sorted, longest first."""
    sequences: list[int] = []
    counts: list[int] = []
    offers = 0  # bit r is set while some open sequence has room for exactly r more tokens
    open_with: dict[int, list[int]] = {}
    opened = 0
    distinct, first = np.unique(-lengths, return_index=True)
    ends = [*first[1:].tolist(), len(lengths)]
    for length, start, end in zip((-distinct).tolist(), first.tolist(), ends, strict=True):
        waiting = end - start
        while waiting:
            fitting = offers >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                candidates = open_with[room]
                sequence = candidates.pop()
                if not candidates:
                    offers ^= 1 << room
            else:
                room, sequence = capacity, opened
                opened += 1
            # After one document this sequence has the least room of all that fit, so the next goes there too.
            placed = min(waiting, room // length)
            waiting -= placed
            sequences.append(sequence)
            counts.append(placed)
            if left := room - placed * length:
                open_with.setdefault(left, []).append(sequence)
                offers |= 1 << left
    return np.repeat(sequences, counts)
