"""The token store: tokenized examples on disk, memory-mapped, cached by content.

What is on disk are whole examples, whatever their length, in a folder named by a key that covers everything
they were made from. Cutting them to `sequence_length` happens when a store is opened, on offsets alone: another
sequence length costs no second tokenization. A folder is written beside its place, synced and renamed, so it is
whole or not there; two processes that build the same one do not disturb each other. Every byte is checked when a
folder is opened, and a damaged one is rebuilt.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b, sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tunesmith import disk
from tunesmith.cache import cache_folder
from tunesmith.data.guard import example_hash
from tunesmith.data.types import Example, Origin, Record, RecordError
from tunesmith.errors import UserError, UserErrors

log = logging.getLogger(__name__)

LAYOUT = 2
PARALLEL_FROM = 2000
"""Records from which on a pool of processes pays for its start."""
CHUNK = 256
"""Records that travel to a worker at a time."""
CHUNK_BYTES, PARALLEL_FROM_BYTES = 1 << 22, 1 << 24
"""The same for records that are long: so many bytes of them in their files, but one at least."""
HASHED_BYTES = 1 << 26
"""Of a file that are hashed together, so that threads can check a large one."""
KEPT_DAYS, ABANDONED_DAYS = 60, 1
"""After which tokens that nobody opened, or that were never finished, are removed."""

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how far it is, and out of how much (None: not known)."""
Encode = Callable[[list[Record]], tuple[list[Example], Any]]
"""Records to examples (none, one or several each), in order, and what was noticed on the way."""
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


def tokens_folder() -> Path:
    return cache_folder() / "tokens"


def stored(key: str) -> Whole | None:
    """The whole examples kept under this key; None when there are none or they are damaged."""
    folder = tokens_folder() / key
    if not os.path.exists(folder):  # Path.exists raises where a parent may not be read
        return None
    try:
        found = _open(folder)
        with suppress(OSError):  # a cache that others own may be read all the same
            os.utime(folder)
        return found
    except _Damaged as damage:
        log.warning("The token cache %s is damaged (%s); it is made again.", folder, damage)
        return None


def build(
    key: str,
    title: str,
    records: Iterable[Record],
    encode: Encode,
    *,
    format: str,
    vocab_size: int,
    notice: Callable[[Any], None] = lambda noticed: None,
    warnings: Callable[[], Iterable[str]] = tuple,
    bad: Callable[[], Iterable[RecordError]] = tuple,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Whole:
    """Tokenize the records and keep the result under `key`.

    `encode` must be picklable; from `PARALLEL_FROM` records on it runs in `workers` processes. What it noticed
    goes to `notice`, in the records' order; `warnings` is asked at the end and may still refuse the data. `bad` then
    gives the records that were left out: those that were read, and those that could not be.
    """
    root = tokens_folder()
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        _remove_old(root)
        partial_folder = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
    try:
        writer = _Writer(partial_folder, vocab_size)
        for chunk, noticed in _encoded(records, encode, workers, title):
            notice(noticed)
            with _disk_errors(root):
                writer.add(chunk)
            if progress:
                progress(f"Tokenizing {title}", writer.records, None)
        facts = {"format": format, "warnings": list(warnings()), "bad": [_plain_error(error) for error in bad()]}
        if not writer.examples:
            raise UserError(f"{title}: its {writer.records} records hold no examples; check its path and format.")
        with _disk_errors(root):
            writer.finish(facts)
            _install(partial_folder, root / key)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return _open(root / key)


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


def store_of(
    examples: Iterable[Example],
    title: str = "data",
    *,
    sequence_length: int = 2**31 - 1,
    too_long: TooLong = "truncate",
    vocab_size: int = 2**31 - 1,
) -> TokenStore:
    """A store of examples that are in memory already; nothing is kept on disk."""
    with tempfile.TemporaryDirectory() as folder:
        writer = _Writer(Path(folder), vocab_size)
        examples = list(examples)
        writer.add(_chunk(examples, len(examples)))
        writer.finish({"format": "tokens", "warnings": [], "bad": []})
        whole = _open(Path(folder), mapped=False)
    return cut(whole, title, sequence_length=sequence_length, too_long=too_long)


# Cutting


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


# Encoding, here or in a pool of processes


@dataclass(frozen=True)
class _Chunk:
    """Examples on their way from a worker to the files."""

    records: int
    ids: np.ndarray
    weights: np.ndarray
    lengths: list[int]
    sums: list[float]
    targets: list[int]
    hashes: list[int]
    origins: list[Origin]


def _encode_chunk(encode: Encode, records: list[Record]) -> tuple[_Chunk, Any] | list[str]:
    """Errors of several messages come back as a list, since pickling would flatten them."""
    try:
        examples, noticed = encode(records)
    except UserErrors as errors:
        return errors.messages
    return _chunk(examples, len(records)), noticed


def _chunk(examples: list[Example], records: int) -> _Chunk:
    ids = [np.asarray(example.ids, dtype=np.int32) for example in examples]
    weights = [np.asarray(example.weights, dtype=np.float32) for example in examples]
    for example, i, w in zip(examples, ids, weights, strict=True):
        assert len(i) == len(w), f"{example.origin}: {len(i)} tokens, {len(w)} weights"
        assert (np.isfinite(w) & (w >= 0)).all(), f"{example.origin}: weights below 0 or not finite"
    return _Chunk(
        records,
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(weights) if weights else np.empty(0, np.float32),
        [len(i) for i in ids],
        [float(w[1:].sum(dtype=np.float64)) for w in weights],
        [int(np.count_nonzero(w[1:])) for w in weights],
        [example_hash(example) for example in examples],
        [example.origin for example in examples],
    )


def _encoded(
    records: Iterable[Record], encode: Encode, workers: int | None, title: str
) -> Iterator[tuple[_Chunk, Any]]:
    chunks = _chunks(iter(records))
    head, count, size = [], 0, 0
    for some in chunks:
        head.append(some)
        count, size = count + len(some), size + sum(record.size for record in some)
        if is_much := count >= PARALLEL_FROM or size >= PARALLEL_FROM_BYTES:
            break
    else:
        is_much = False
    chunks = chain(head, chunks)
    head = []
    workers = workers or min(_cpus(), 32)
    work = partial(_encode_chunk, encode)
    if workers == 1 or not is_much:
        results = map(work, chunks)
    else:
        results = _in_pool(work, chunks, workers, title)
    for result in results:
        if isinstance(result, list):
            raise UserErrors(result)
        yield result


def _chunks(records: Iterator[Record]) -> Iterator[list[Record]]:
    some: list[Record] = []
    size = 0
    for record in records:
        some.append(record)
        size += record.size
        if len(some) == CHUNK or size >= CHUNK_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _in_pool(work: Callable, items: Iterator, workers: int, title: str) -> Iterator:
    """Like `map`, over processes: in order, with a bounded number of items under way."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Forking is instant where spawning imports everything again; tokenizers only wants to be told beforehand.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with (
        _environment("TOKENIZERS_PARALLELISM", "false"),
        ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(work,)) as pool,
    ):
        under_way = deque(pool.submit(_work, item) for item in islice(items, 3 * workers))
        try:
            while under_way:
                result = under_way.popleft().result()
                under_way.extend(pool.submit(_work, item) for item in islice(items, 1))
                yield result
        except BrokenProcessPool:
            raise UserError(
                f"{title}: a process that was tokenizing it was killed, most likely for lack of memory; free "
                "some memory and start again."
            ) from None
        finally:
            for future in under_way:
                future.cancel()


_worker_function: Callable[[Any], Any]


def _start_worker(work: Callable) -> None:
    global _worker_function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _worker_function = work


def _work(item: Any) -> Any:
    return _worker_function(item)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Files


_COLUMNS = {
    "codes": np.dtype(np.uint16),
    "offsets": np.dtype(np.int64),
    "sums": np.dtype(np.float64),
    "targets": np.dtype(np.int64),
    "origins": np.dtype(np.int32),
    "hashes": np.dtype(np.uint64),
}


class _Damaged(Exception):
    pass


class _Writer:
    def __init__(self, folder: Path, vocab_size: int):
        self.records = self.examples = 0
        self._folder = folder
        self._vocab_size = vocab_size
        self._token_type = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._tokens = 0
        self._files: dict[tuple[str, str], int] = {}
        self._weights: dict[float, int] = {}
        self._content = [sha256(), sha256(), sha256()]
        self._digests = {name: _Digests() for name in ("tokens", *_COLUMNS)}
        self._columns = {name: _path(folder, name).open("wb") for name in ("tokens", *_COLUMNS)}
        self._write("offsets", [0])

    def add(self, chunk: _Chunk) -> None:
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
        self._tokens += len(chunk.ids)
        self.records += chunk.records
        self.examples += len(chunk.lengths)

    def finish(self, facts: dict[str, Any]) -> None:
        for file in self._columns.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        meta = {
            **facts,
            "layout": LAYOUT,
            "content": sha256(b"".join(digest.digest() for digest in self._content)).hexdigest(),
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
        _sync_folder(self._folder)

    def _write(self, name: str, values: Any) -> None:
        # Not ndarray.tofile: it hides the reason when the disk is full.
        dtype = _COLUMNS.get(name, self._token_type)
        data = np.ascontiguousarray(values, dtype=dtype).tobytes()
        self._digests[name].update(data)
        self._columns[name].write(data)


class _Digests:
    """Of a file as it is written: one for every `HASHED_BYTES` of it."""

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
    """In threads, since hashing takes 2.4 s a GiB on a slow core."""
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

    with ThreadPoolExecutor(min(_cpus(), 16, len(places))) as pool:
        for (name, *_), right in zip(places, pool.map(is_right, places), strict=True):
            if not right:
                raise _Damaged(f"{name}.bin is not what was written")


def _seal(meta: dict[str, Any]) -> str:
    kept = {name: value for name, value in meta.items() if name != "seal"}
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _plain_error(error: RecordError) -> tuple[str, dict[str, Any], str, bool]:
    return error.kind, asdict(error.origin), error.reason, error.is_read


def _open(folder: Path, mapped: bool = True) -> Whole:
    """Check every byte; raise _Damaged when one is not what was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["layout"] != LAYOUT:
            raise _Damaged(f"layout {meta['layout']}, not {LAYOUT}")
        if meta["seal"] != _seal(meta):
            raise _Damaged("meta.json is not what was written")
        n, tokens, token_type = meta["examples"], meta["tokens"], np.dtype(meta["token_type"])
        shapes = {"offsets": (n + 1,), "codes": (tokens,), "origins": (n, 2)}
        columns = {"tokens": _column(folder, "tokens", token_type, (tokens,), mapped)}
        for name, dtype in _COLUMNS.items():
            columns[name] = _column(folder, name, dtype, shapes.get(name, (n,)), mapped)
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
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
    if whole.offsets[0] != 0 or whole.offsets[-1] != tokens or (np.diff(whole.offsets) < 0).any():
        raise _Damaged("offsets.bin is not what was written")
    return whole


def _column(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...], mapped: bool) -> np.ndarray:
    path = _path(folder, name)
    found, wanted = path.stat().st_size, int(np.prod(shape)) * dtype.itemsize
    if found != wanted:
        raise _Damaged(f"{path.name} has {found} bytes, not {wanted}")
    if mapped and wanted:
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)
    return np.fromfile(path, dtype=dtype).reshape(shape)


def _install(partial_folder: Path, folder: Path) -> None:
    while True:
        try:
            partial_folder.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            _open(folder)  # another process was faster; what it made is the same
            break
        except _Damaged:
            aside = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
            with suppress(FileNotFoundError):
                folder.rename(aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(folder.parent)


def _remove_old(root: Path) -> None:
    """What nobody has opened for long, and what killed processes left behind; a living one writes more often than once
    a day. A process that still reads removed tokens keeps them until it ends."""
    for folder in root.iterdir():
        days = ABANDONED_DAYS if folder.name.startswith("partial-") else KEPT_DAYS
        with suppress(FileNotFoundError, NotADirectoryError):
            newest = max(path.stat().st_mtime for path in [folder, *folder.glob("*")])
            if newest < time.time() - days * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (reason := disk.reason(error)) is None:
            raise
        raise UserError(
            f"The token cache {root} cannot be written: {reason}; make room there or set TUNESMITH_CACHE to a "
            "folder elsewhere."
        ) from error
