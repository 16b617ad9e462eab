"""Which training records are held out where no other data are given for evaluation, and which held-out examples are
evaluated while a run trains. Pure functions of the records and of how much is trained.

Records are chosen by a hash of their tokens, so the choice does not depend on their order, on seeds or on settings of
training, and the losses of runs can be compared. Records that share an example stand on the same side, in whatever data
set they are: nothing that is held out is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.data.store import TokenStore
from tunesmith.plan.defaults import EVALUATED_LEAST, EVALUATED_TOKENS, HELD_OUT_FROM, SAMPLED_TOKENS


def split(stores: Sequence[TokenStore], count: int) -> tuple[list[TokenStore], list[TokenStore]]:
    """The stores without about `count` records, and those records, by store. Small data sets give none where there are
    larger ones, and no data set gives all it has."""
    if not count:
        return list(stores), []
    owner = np.repeat(np.arange(len(stores)), [len(store) for store in stores])
    records = np.concatenate([store.records for store in stores])
    _, record = np.unique(np.stack([owner, records]), axis=1, return_inverse=True)
    key = _keys(np.concatenate([store.hashes for store in stores]), record.ravel())
    is_small = np.array([store.record_count < HELD_OUT_FROM for store in stores])
    may = ~np.isin(key, key[is_small[owner]]) if not is_small.all() else np.ones(len(key), dtype=bool)
    taken = _first(key[may], record.ravel()[may], count)
    for index in range(len(stores)):
        if np.isin(own := key[owner == index], taken).all():
            taken = np.setdiff1d(taken, own)
    is_held = np.isin(key, taken)
    kept, held = [], []
    for index, store in enumerate(stores):
        mine = is_held[owner == index]
        kept.append(store.part(~mine, store.title) if mine.any() else store)
        if mine.any():
            held.append(store.part(mine, f"{store.title} (held out)"))
    return kept, held


def in_proportion(stores: Sequence[TokenStore], trained_tokens: int) -> list[TokenStore]:
    """What of the held-out examples is evaluated by a run that trains on so many tokens: all, or where that would take
    too long the same share of each data set, whenever it is asked for."""
    tokens, examples = sum(int(store.lengths.sum()) for store in stores), sum(len(store) for store in stores)
    if tokens <= EVALUATED_TOKENS * trained_tokens or examples <= EVALUATED_LEAST:
        return list(stores)
    share = SAMPLED_TOKENS * trained_tokens / tokens
    chosen = []
    for store in stores:
        # Multiples of the golden ratio: spread over the whole set, and blind to any order in it.
        order = np.argsort(np.arange(len(store), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        within = int(np.searchsorted(np.cumsum(store.lengths[order]), share * store.lengths.sum(), side="right"))
        least = -(-EVALUATED_LEAST * len(store) // examples)
        is_taken = np.zeros(len(store), dtype=bool)
        is_taken[order[: max(within, least)]] = True
        chosen.append(store.part(is_taken, store.title))
    return chosen


def _keys(hashes: np.ndarray, record: np.ndarray) -> np.ndarray:
    """uint64 for each example: the same for those of one record, and of records that share an example."""
    _, example = np.unique(hashes, return_inverse=True)
    key = hashes
    while True:
        before = key
        for group in (example, record):
            least = np.full(int(group.max()) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
            np.minimum.at(least, group, key)
            key = least[group]
        if (key == before).all():
            return key


def _first(key: np.ndarray, record: np.ndarray, count: int) -> np.ndarray:
    """The smallest keys that stand for `count` records together."""
    _, at = np.unique(record, return_index=True)
    ordered, sizes = np.unique(key[at], return_counts=True)
    return ordered[: int(np.searchsorted(np.cumsum(sizes), count)) + 1]
