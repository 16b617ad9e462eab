"""Records -> tokenized examples on disk, made here or by a pool of processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.guard import example_hash
from tunesmith.data.store import TokenStore, TooLong, Whole, cut
from tunesmith.data.token_cache import disk_errors, install, remove_old, tokens_folder
from tunesmith.data.token_files import Chunk, Writer, plain_error, read_folder
from tunesmith.data.types import Example, Record, RecordError
from tunesmith.errors import UserError, UserErrors
from tunesmith.plan.hardware import usable_cores

PARALLEL_FROM = 2000
"""Records from which on a pool of processes pays for its start."""
CHUNK = 256
"""Records that travel to a worker at a time."""
CHUNK_BYTES, PARALLEL_FROM_BYTES = 1 << 22, 1 << 24
"""`CHUNK` and `PARALLEL_FROM` for records that are long: so many bytes of them in their files, but one at least."""

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how far it is, and out of how much (None: not known)."""
Encode = Callable[[list[Record]], tuple[list[Example], Any]]
"""Records to examples (none, one or several each), in order, and what was noticed on the way."""


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
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_old(root)
        partial_folder = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
    try:
        writer = Writer(partial_folder, vocab_size)
        for chunk, noticed in _encoded(records, encode, workers, title):
            notice(noticed)
            with disk_errors(root):
                writer.add(chunk)
            if progress:
                progress(f"Tokenizing {title}", writer.records, None)
        facts = {"format": format, "warnings": list(warnings()), "bad": [plain_error(error) for error in bad()]}
        if not writer.examples:
            raise UserError(f"{title}: its {writer.records} records hold no examples; check its path and format.")
        with disk_errors(root):
            writer.finish(facts)
            install(partial_folder, root / key)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return read_folder(root / key)


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
        writer = Writer(Path(folder), vocab_size)
        examples = list(examples)
        writer.add(_chunk(examples, len(examples)))
        writer.finish({"format": "tokens", "warnings": [], "bad": []})
        whole = read_folder(Path(folder), mapped=False)
    return cut(whole, title, sequence_length=sequence_length, too_long=too_long)


def _encode_chunk(encode: Encode, records: list[Record]) -> tuple[Chunk, Any] | list[str]:
    """Errors of several messages come back as a list, since pickling would flatten them."""
    try:
        examples, noticed = encode(records)
    except UserErrors as errors:
        return errors.messages
    return _chunk(examples, len(records)), noticed


def _chunk(examples: list[Example], records: int) -> Chunk:
    ids = [np.asarray(example.ids, dtype=np.int32) for example in examples]
    weights = [np.asarray(example.weights, dtype=np.float32) for example in examples]
    for example, i, w in zip(examples, ids, weights, strict=True):
        assert len(i) == len(w), f"{example.origin}: {len(i)} tokens, {len(w)} weights"
        assert (np.isfinite(w) & (w >= 0)).all(), f"{example.origin}: weights below 0 or not finite"
    predicted = [_predicted(example) for example in examples]
    counted = [w > 0 if example.is_tagged else w for example, w in zip(examples, weights, strict=True)]
    return Chunk(
        records,
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(weights) if weights else np.empty(0, np.float32),
        [len(i) for i in ids],
        [float(w[at].sum(dtype=np.float64)) for w, at in zip(counted, predicted, strict=True)],
        [int(np.count_nonzero(w[at])) for w, at in zip(counted, predicted, strict=True)],
        [example_hash(example) for example in examples],
        [example.origin for example in examples],
        [max(1, len(example.sizes)) for example in examples],
        [size for example in examples for size in example.sizes or (len(example.ids),)],
        [value for example in examples for value in example.values or (1.0,) * max(1, len(example.sizes))],
        [example.facts.encode(errors="replace") for example in examples],
    )


def _predicted(example: Example) -> np.ndarray | slice:
    """Which tokens count: all that something predicts, which are all but the first of each document, or have labels.
    Where documents count as wholes and have but one token each, that one does."""
    if example.is_tagged or (example.is_whole and len(example.ids) == max(1, len(example.sizes))):
        return slice(None)
    if not example.sizes:
        return slice(1, None)
    assert sum(example.sizes) == len(example.ids)
    predicted = np.ones(len(example.ids), dtype=bool)
    predicted[np.cumsum([0, *example.sizes[:-1]])] = False
    return predicted


def _encoded(records: Iterable[Record], encode: Encode, workers: int | None, title: str) -> Iterator[tuple[Chunk, Any]]:
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
    workers = workers or min(usable_cores(), 32)
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
