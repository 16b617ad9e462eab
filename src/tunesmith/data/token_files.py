"""The files of tokenized examples: one folder, written once, every byte checked when it is opened.

A column of numbers a file, and `meta.json` with the digests of them all. Where such folders lie and when they go,
`token_cache.py` knows.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.store import Whole
from tunesmith.data.types import Origin, RecordError
from tunesmith.disk import sync_folder
from tunesmith.errors import UserError
from tunesmith.plan.hardware import usable_cores

LAYOUT = 4
HASHED_BYTES = 1 << 26
"""Bytes of a file that are hashed together, so that threads can check a large one."""


@dataclass(frozen=True)
class Chunk:
    """Examples on their way from a worker to the files."""

    records: int
    ids: np.ndarray
    weights: np.ndarray
    lengths: list[int]
    sums: list[float]
    targets: list[int]
    hashes: list[int]
    origins: list[Origin]
    counts: list[int]
    """Documents of each example."""
    sizes: list[int]
    """Tokens of each document."""
    values: list[float]
    """What the record says of each document (`Example.values`)."""
    facts: list[bytes]
    """What the record of each example says besides; as JSON."""


class Damaged(Exception):
    pass


class Writer:
    def __init__(self, folder: Path, vocab_size: int):
        self.records = self.examples = 0
        self._folder = folder
        self._vocab_size = vocab_size
        self._token_type = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._tokens = 0
        self._files: dict[tuple[str, str], int] = {}
        self._weights: dict[float, int] = {}
        self._content = [sha256(), sha256(), sha256()]
        self._grouped = sha256()
        self._said = sha256()
        self._fact_bytes = 0
        self._is_grouped = False
        self._documents = 0
        self._digests = {name: _Digests() for name in ("tokens", *_COLUMNS)}
        self._columns = {name: _path(folder, name).open("wb") for name in ("tokens", *_COLUMNS)}
        self._write("offsets", [0])

    def add(self, chunk: Chunk) -> None:
        assert not len(chunk.ids) or 0 <= chunk.ids.min() <= chunk.ids.max() < self._vocab_size
        self._write("tokens", chunk.ids)
        for start in range(0, len(chunk.weights), 1 << 20):  # sorting takes many times the memory of what is sorted
            distinct, inverse = np.unique(chunk.weights[start : start + (1 << 20)], return_inverse=True)
            codes = [self._weights.setdefault(value, len(self._weights)) for value in distinct.tolist()]
            if len(self._weights) > 2**16:
                raise UserError(
                    f"{chunk.origins[0].file}: more than {2**16} different message weights; round them to fewer."
                )
            self._write("codes", np.array(codes, dtype=np.uint16)[inverse])
        self._write("offsets", self._tokens + np.cumsum(chunk.lengths))
        self._write("sums", chunk.sums)
        self._write("targets", chunk.targets)
        self._write("hashes", chunk.hashes)
        self._write(
            "origins",
            [(self._files.setdefault((o.file, o.unit), len(self._files)), o.line) for o in chunk.origins],
        )
        for digest, values in zip(self._content, (chunk.ids, chunk.weights, chunk.lengths), strict=True):
            digest.update(np.asarray(values).tobytes())
        self._write("counts", chunk.counts)
        self._write("sizes", chunk.sizes)
        self._write("values", chunk.values)
        self._grouped.update(np.asarray([*chunk.counts, *chunk.sizes, *chunk.values], dtype=np.float64).tobytes())
        self._is_grouped |= any(count != 1 for count in chunk.counts) or any(value != 1 for value in chunk.values)
        self._write("facts", np.frombuffer(b"".join(chunk.facts), dtype=np.uint8))
        ends = self._fact_bytes + np.cumsum([len(one) for one in chunk.facts], dtype=np.int64)
        self._write("fact_ends", ends)
        self._fact_bytes = int(ends[-1]) if len(ends) else self._fact_bytes
        for one in chunk.facts:
            self._said.update(len(one).to_bytes(8, "little") + one)
        self._documents += len(chunk.sizes)
        self._tokens += len(chunk.ids)
        self.records += chunk.records
        self.examples += len(chunk.lengths)

    def finish(self, facts: dict[str, Any]) -> None:
        for file in self._columns.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        # Plain documents are known by what they always were known by: runs that were begun with them go on.
        content = [*self._content, *([self._grouped] if self._is_grouped else [])]
        content += [self._said] if self._fact_bytes else []
        meta = {
            **facts,
            "layout": LAYOUT,
            "content": sha256(b"".join(digest.digest() for digest in content)).hexdigest(),
            "documents": self._documents,
            "fact_bytes": self._fact_bytes,
            "records": self.records,
            "examples": self.examples,
            "tokens": self._tokens,
            "token_type": self._token_type.name,
            "files": list(self._files),
            "weights": list(self._weights),
            "digests": {name: digests.finish() for name, digests in self._digests.items()},
        }
        meta["records"] += sum(not is_read for *_, is_read in meta["bad"])
        meta["seal"] = _seal(meta)
        with (self._folder / "meta.json").open("w", encoding="utf-8") as file:
            json.dump(meta, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def _write(self, name: str, values: Any) -> None:
        # Not ndarray.tofile: it hides the reason when the disk is full.
        dtype = _COLUMNS.get(name, self._token_type)
        data = np.ascontiguousarray(values, dtype=dtype).tobytes()
        self._digests[name].update(data)
        self._columns[name].write(data)


def read_folder(folder: Path, mapped: bool = True, *, is_checked: bool = True) -> Whole:
    """Check every byte, unless told otherwise; raise Damaged when one is not what was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["layout"] != LAYOUT:
            raise Damaged(f"layout {meta['layout']}, not {LAYOUT}")
        if meta["seal"] != _seal(meta):
            raise Damaged("meta.json is not what was written")
        n, tokens, token_type = meta["examples"], meta["tokens"], np.dtype(meta["token_type"])
        documents = (meta["documents"],)
        shapes = {"offsets": (n + 1,), "codes": (tokens,), "origins": (n, 2), "sizes": documents, "values": documents}
        shapes |= {"facts": (meta["fact_bytes"],)}
        columns = {"tokens": _column(folder, "tokens", token_type, (tokens,), mapped)}
        for name, dtype in _COLUMNS.items():
            columns[name] = _column(folder, name, dtype, shapes.get(name, (n,)), mapped)
        if is_checked:
            _check_digests(folder, meta["digests"])
        whole = Whole(
            content=meta["content"],
            format=meta["format"],
            records=meta["records"],
            bad=tuple(RecordError(kind, Origin(**origin), reason) for kind, origin, reason, _ in meta["bad"]),
            warnings=tuple(meta["warnings"]),
            files=[(name, unit) for name, unit in meta["files"]],
            weight_table=np.array(meta["weights"], dtype=np.float32),
            **columns,
            key=folder.name if mapped else "",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    if whole.offsets[0] != 0 or whole.offsets[-1] != tokens or (np.diff(whole.offsets) < 0).any():
        raise Damaged("offsets.bin is not what was written")
    if whole.counts.sum() != len(whole.sizes) or whole.sizes.sum() != tokens:
        raise Damaged("sizes.bin is not what was written")
    return whole


def plain_error(error: RecordError) -> tuple[str, dict[str, Any], str, bool]:
    return error.kind, asdict(error.origin), error.reason, error.is_read


_COLUMNS = {
    "codes": np.dtype(np.uint16),
    "offsets": np.dtype(np.int64),
    "sums": np.dtype(np.float64),
    "targets": np.dtype(np.int64),
    "origins": np.dtype(np.int32),
    "hashes": np.dtype(np.uint64),
    "counts": np.dtype(np.int32),
    "sizes": np.dtype(np.int64),
    "values": np.dtype(np.float32),
    "facts": np.dtype(np.uint8),
    "fact_ends": np.dtype(np.int64),
}


class _Digests:
    """The hashes of a file as it is written: one for every `HASHED_BYTES` of it."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash, self._room = blake2b(digest_size=16), HASHED_BYTES

    def update(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view) >= self._room:
            self._hash.update(view[: self._room])
            view = view[self._room :]
            self._done.append(self._hash.hexdigest())
            self._hash, self._room = blake2b(digest_size=16), HASHED_BYTES
        self._hash.update(view)
        self._room -= len(view)

    def finish(self) -> list[str]:
        return [*self._done, self._hash.hexdigest()]


def _check_digests(folder: Path, digests: dict[str, list[str]]) -> None:
    """Raises `Damaged` where a file's bytes are not those that were written. In threads, since hashing takes 2.4 s a
    GiB on a slow core."""
    places = [(name, n, wanted) for name, all_of_it in digests.items() for n, wanted in enumerate(all_of_it)]

    def is_right(place: tuple[str, int, str]) -> bool:
        name, number, wanted = place
        digest = blake2b(digest_size=16)
        with _path(folder, name).open("rb") as file:
            file.seek(number * HASHED_BYTES)
            left = HASHED_BYTES
            while left and (data := file.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
        return digest.hexdigest() == wanted

    with ThreadPoolExecutor(min(usable_cores(), 16, len(places))) as pool:
        for (name, *_), right in zip(places, pool.map(is_right, places), strict=True):
            if not right:
                raise Damaged(f"{name}.bin is not what was written")


def _seal(meta: dict[str, Any]) -> str:
    kept = {name: value for name, value in meta.items() if name != "seal"}
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _column(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...], mapped: bool) -> np.ndarray:
    path = _path(folder, name)
    found, wanted = path.stat().st_size, int(np.prod(shape)) * dtype.itemsize
    if found != wanted:
        raise Damaged(f"{path.name} has {found} bytes, not {wanted}")
    if mapped and wanted:
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)
    return np.fromfile(path, dtype=dtype).reshape(shape)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"
