"""From a point of the loss to its records: the documents of a step, worst first, with what the model saw of them.

Texts are decoded from the token cache of this machine, by the tokenizer that lies beside the run. A run names what it
trained on by keys of that cache, never by paths; what is not there any more is listed without its text.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data import excluded
from tunesmith.data.store import Whole
from tunesmith.data.token_cache import stored
from tunesmith.errors import UserError
from tunesmith.run.branch import checkpoint_before
from tunesmith.train.documents import read, read_sets
from tunesmith.ui.read import compact, text
from tunesmith.ui.samples import read_tokenizer, shown

SHOWN, OUTLIERS = 40, 20
"""Documents of a step, and of the whole run, that are listed."""
TOKENS = 400
"""Tokens of each document that are shown."""
PLACES = 12
"""Other places and steps of each document that are shown."""
FAR = 6.0
"""Times the usual spread around the other documents of its step, from which on a document stands out."""


class Documents:
    """The documents of the runs that were looked at last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: OrderedDict[str, Whole | None] = OrderedDict()
        self._tokenizers: OrderedDict[Path, Any] = OrderedDict()

    def of_step(self, folder: Path, step: int) -> dict[str, Any]:
        """The documents of a step, and those that stand out in any step."""
        with self._lock:
            kept = read(folder)
            if step not in kept:
                raise UserError(_why_none(kept, step))
            rows = kept[step]
            order = np.argsort(-rows["loss"].astype(np.float64), kind="stable")[:SHOWN]
            keys = [(int(row["source"]), int(row["record"])) for row in rows[order]]
            far = outliers(kept)
            seen = _sightings(kept, {*keys, *(key for key, _ in far)})
            each = _Shown(self, folder, seen)
            return {
                "step": step,
                "count": len(rows),
                "median": compact(float(np.median(rows["loss"].astype(np.float64)))),
                "documents": [each(key, float(loss)) for key, loss in zip(keys, rows["loss"][order], strict=True)],
                "outliers": [each(key, dict(seen[key])[at], at) for key, at in far],
                "checkpoint": _checkpoint(folder, step),
                "excluded": excluded_hashes(folder),
            }

    def samples(self, folder: Path) -> dict[str, Any]:
        """What is shown of each evaluation."""
        with self._lock:
            return shown(folder, self.tokenizer(folder))

    def exclude(self, folder: Path, records: Sequence[str], step: int) -> dict[str, Any]:
        """Mark records (`SET-NUMBER`) as bad: write them into the run's file."""
        with self._lock:
            sets, named = read_sets(folder), []
            for one in records:
                found = re.fullmatch(r"(\d{1,5})-(\d{1,10})", one)
                whole = self.store(sets[int(found[1])][1]) if found and int(found[1]) < len(sets) else None
                if found is None or whole is None or int(found[2]) >= len(whole.hashes):
                    raise UserError("These records are not in the token cache any more, so they cannot be marked.")
                file, unit, line = whole.origin(int(found[2]))
                title = sets[int(found[1])][0]
                named.append({"hash": hash_of(whole, int(found[2])), "data": title, "file": file, unit: line})
            path = folder / excluded.FILE
            count = excluded.add(path, named)
        new = folder.with_name(f"{folder.name}-without")
        command = f"tunesmith branch {folder} --before {step} --output {new} --exclude {path}"
        return {
            "said": f"{path} names {count} records now.",
            "command": command if _checkpoint(folder, step) is not None else f"exclude: {path}",
            "excluded": excluded_hashes(folder),
        }

    def store(self, key: str) -> Whole | None:
        if not re.fullmatch("[0-9a-f]{64}", key):
            return None
        if key not in self._stores:
            self._stores[key] = stored(key, is_checked=False)
            while len(self._stores) > 8:
                self._stores.popitem(last=False)
        return self._stores[key]

    def tokenizer(self, folder: Path) -> Any:
        if folder not in self._tokenizers:
            self._tokenizers[folder] = read_tokenizer(folder)
            while len(self._tokenizers) > 4:
                self._tokenizers.popitem(last=False)
        return self._tokenizers[folder]


Key = tuple[int, int]
"""Data set, and number of the whole example in it."""


class _Shown:
    """What a page shows of a document."""

    def __init__(self, kept: Documents, folder: Path, seen: dict[Key, list[tuple[int, float]]]):
        self._kept, self._folder, self._seen, self._sets = kept, folder, seen, read_sets(folder)

    def __call__(self, key: Key, loss: float, step: int | None = None) -> dict[str, Any]:
        source, number = key
        title, cached = self._sets[source] if source < len(self._sets) else ("", "")
        made: dict[str, Any] = {
            "id": f"{source}-{number}",
            "data": text(title),
            "loss": compact(loss),
            "step": step,
            "seen": [[at, compact(one)] for at, one in self._seen.get(key, [])][-PLACES:],
        }
        whole = self._kept.store(cached)
        if whole is None or number >= len(whole.hashes):
            return made | {"where": "", "text": None, "hash": None, "elsewhere": []}
        file, unit, line = whole.origin(number)
        return made | {
            "where": text(f"{file}, {unit} {line}"),
            "hash": hash_of(whole, number),
            "elsewhere": list(self._elsewhere(whole.hashes[number], key))[:PLACES],
            **self._text(whole, number),
        }

    def _text(self, whole: Whole, number: int) -> dict[str, Any]:
        begin, end = int(whole.offsets[number]), int(whole.offsets[number + 1])
        tokenizer = self._kept.tokenizer(self._folder)
        if tokenizer is None:
            return {"text": None, "tokens": end - begin}
        ids = whole.tokens[begin : min(end, begin + TOKENS)].astype(int).tolist()
        return {"text": text(tokenizer.decode(ids, skip_special_tokens=False)), "tokens": end - begin}

    def _elsewhere(self, wanted: Any, key: Key) -> Iterable[str]:
        """Other places of the data that have the same tokens."""
        for source, (title, cached) in enumerate(self._sets):
            whole = self._kept.store(cached)
            if whole is None:
                continue
            for number in np.flatnonzero(whole.hashes == wanted)[: PLACES + 1].tolist():
                if (source, number) != key:
                    file, unit, line = whole.origin(number)
                    yield text(f"{title}: {file}, {unit} {line}")


def outliers(kept: dict[int, np.ndarray]) -> list[tuple[Key, int]]:
    """Documents whose losses stand out among those of their steps, farthest first, with the step in which each did
    most."""
    parts = [rows for rows in kept.values() if len(rows) > 2]
    if not parts:
        return []
    losses = [rows["loss"].astype(np.float64) for rows in parts]
    excess = np.concatenate([one - np.median(one) for one in losses])
    keys = np.concatenate([(rows["source"].astype(np.int64) << 32) + rows["record"] for rows in parts])
    steps = np.concatenate([np.full(len(rows), step) for step, rows in kept.items() if len(rows) > 2])
    spread = 1.4826 * float(np.median(np.abs(excess)))
    order = np.argsort(-excess, kind="stable")
    order = order[excess[order] > max(FAR * spread, 1e-3)]
    _, first = np.unique(keys[order], return_index=True)
    chosen = order[np.sort(first)][:OUTLIERS]
    return [((int(keys[at]) >> 32, int(keys[at]) & 0xFFFFFFFF), int(steps[at])) for at in chosen]


def _sightings(kept: dict[int, np.ndarray], wanted: set[Key]) -> dict[Key, list[tuple[int, float]]]:
    """The steps in which documents were seen, and their losses then."""
    keys = np.array([(source << 32) + record for source, record in wanted], dtype=np.int64)
    found: dict[Key, list[tuple[int, float]]] = {key: [] for key in wanted}
    for step, rows in kept.items():
        here = (rows["source"].astype(np.int64) << 32) + rows["record"]
        for row in rows[np.isin(here, keys)]:
            found[int(row["source"]), int(row["record"])].append((step, float(row["loss"])))
    return found


def hash_of(whole: Whole, number: int) -> str:
    return f"{int(whole.hashes[number]):016x}"


def excluded_hashes(folder: Path) -> list[str]:
    path = folder / excluded.FILE
    return [f"{one:016x}" for one in excluded.read(path).tolist()] if path.exists() else []


def _checkpoint(folder: Path, step: int) -> int | None:
    try:
        return checkpoint_before(folder, step)
    except UserError:
        return None


def _why_none(kept: dict[int, np.ndarray], step: int) -> str:
    if not kept:
        return (
            "This run has kept no losses of documents: it was of an earlier version, or its objective's loss is no sum "
            "over tokens."
        )
    return f"The losses of the documents of step {step} are not kept; those of steps {min(kept)} to {max(kept)} are."
