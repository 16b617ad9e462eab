"""The result of a run over several ranks, written by all of them into one folder: no rank ever has more than its part.

Where each tensor lies in which safetensors file is known from names, shapes and precision alone. The first rank makes
the files, with their headers and at their full size; each rank writes the rows that it holds at their place; when all
have synced theirs, the first one moves the folder into place, whole. The bytes are those that one process would write;
of small files, those of the safetensors library.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith import disk
from tunesmith.checkpoint.codec import DTYPES, ShardSlice
from tunesmith.checkpoint.direct import MEMORY_BYTES, PIECE_BYTES
from tunesmith.checkpoint.store import Together
from tunesmith.disk import BLOCK_BYTES, DIRECT_BYTES, REFUSED, set_direct
from tunesmith.model.files import Held, Stack
from tunesmith.model.save import LARGEST_FILE, whole_folder

LARGE_FILE = 1 << 26
"""Bytes from which the tensors of a file begin at blocks of the disk. Smaller ones are as the library has them."""
WRITE_BACK = 1 << 26
"""Bytes of a file that the disk is told to begin with."""
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Of tensors, by name: shape and precision."""


@dataclass(frozen=True)
class Place:
    """Of a tensor in a file."""

    file: str
    start: int
    """Its first byte."""
    dtype: torch.dtype


def write_on_all_ranks(
    target: Path,
    shapes: Shapes,
    parts: Iterable[tuple[str, ShardSlice]],
    together: Together,
    *,
    pattern: str,
    describe: Callable[[Path], None],
) -> None:
    """Write `parts` of tensors of these `shapes`, all that this rank knows, into files called by `pattern`; the first
    rank adds the rest of the folder by `describe`. OSError, on every rank, where one of them could not write."""
    headers, places, index = _lay_out(_of_all(shapes, together), pattern)
    problem = ""
    try:
        with ExitStack() as stack:
            partial = None
            try:
                if together.is_first:
                    partial = stack.enter_context(whole_folder(target))
                    describe(partial)
                    _make_files(partial, headers, index, pattern)
            except Exception as error:  # others wait for a word
                if not isinstance(error, OSError) and disk.reason(error) is None:
                    raise
                problem = _words(error)
            name = together.gather(partial.name if partial and not problem else "")[0]
            try:
                # Also a rank that cannot write asks for its parts, since others may need it for theirs.
                _write_rows(target.parent / name if name else None, parts, places)
            except OSError as error:
                problem = _words(error)
            if problem := next(filter(None, together.gather(problem)), ""):
                raise _error(problem)
    except OSError as error:
        problem = _words(error)
    if problem := next(filter(None, together.gather(problem)), ""):
        raise _error(problem)


def stored_parts(name: str, rows: ShardSlice, held: Mapping[str, Held]) -> list[tuple[str, ShardSlice]]:
    """What a rank has of a tensor, as the model's own files hold it: under their name, and experts one by one."""
    stack = held.get(name)
    if not isinstance(stack, Stack):
        return [(stack.name if stack is not None else name, rows)]
    found = []
    for expert, whole in enumerate(rows.tensor, rows.start):
        matrices = stack.experts[expert]
        for matrix, part in zip(matrices, whole.chunk(len(matrices)), strict=True):
            found.append((matrix.name, ShardSlice(part, 0, part.shape[0])))
    return found


def stored_shapes(shapes: Shapes, held: Mapping[str, Held]) -> Shapes:
    """The shapes of what `stored_parts` gives."""
    found = {}
    for name, (shape, dtype) in shapes.items():
        stack = held.get(name)
        if not isinstance(stack, Stack):
            found[stack.name if stack is not None else name] = (shape, dtype)
            continue
        for matrices in stack.experts:
            for matrix in matrices:
                found[matrix.name] = ((shape[1] // len(matrices), *shape[2:]), dtype)
    return found


def _of_all(mine: Shapes, together: Together) -> Shapes:
    """The tensors that the ranks have between them."""
    said = json.dumps({name: [shape, str(dtype).removeprefix("torch.")] for name, (shape, dtype) in mine.items()})
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for theirs in map(json.loads, together.gather(said)):
        for name, (shape, dtype) in theirs.items():
            found.setdefault(name, (tuple(shape), getattr(torch, dtype)))
    return found


def _make_files(
    folder: Path, headers: Mapping[str, tuple[bytes, int]], index: dict[str, Any] | None, pattern: str
) -> None:
    for file, (header, size) in headers.items():
        (folder / file).write_bytes(header)
        os.truncate(folder / file, size)
    if index is not None:
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{pattern.format(suffix='')}.index.json").write_text(text)


def _words(error: Exception) -> str:
    """What is told to other ranks: the error's number, where it has one, and its words."""
    return f"{getattr(error, 'errno', None) or 0} {getattr(error, 'strerror', None) or error}"


def _error(problem: str) -> OSError:
    number, _, words = problem.partition(" ")
    return OSError(int(number), words) if int(number) else OSError(words)


def _write_rows(folder: Path | None, parts: Iterable[tuple[str, ShardSlice]], places: Mapping[str, Place]) -> None:
    opened: dict[str, _File] = {}
    problem: OSError | None = None
    behind = _WriteBack()
    try:
        for name, rows in parts:
            if folder is None or problem is not None:
                continue
            place = places[name]
            value = rows.tensor.detach().to("cpu", place.dtype).contiguous()
            row_bytes = value.nbytes // value.shape[0] if value.ndim else value.nbytes
            try:
                if place.file not in opened:
                    opened[place.file] = _File(folder / place.file)
                cached = _write_at(opened[place.file], value, place.start + rows.start * row_bytes)
                behind.wrote(opened[place.file].cached, cached)
            except OSError as error:
                problem = error
            del value, rows
        behind.finish()
        for file in opened.values():
            os.fsync(file.cached)
    finally:
        behind.end()
        for file in opened.values():
            file.close()
    if problem is not None:
        raise problem


class _WriteBack:
    """Has the disk begin with what was written while more of it is made: by itself the system waits for a tenth of the
    memory to fill up, and a disk that has rested then has all of it to write at the end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._underway: Future[None] | None = None
        self._written: Counter[int] = Counter()

    def wrote(self, file: int, size: int) -> None:
        """OSError where the disk could not take what was written before."""
        self._written[file] += size
        if self._underway is not None and self._underway.done():
            self._underway.result()
            self._underway = None
        most = max(self._written, key=lambda one: self._written[one])
        if self._underway is None and self._written[most] >= WRITE_BACK:
            self._written[most] = 0
            self._underway = self._thread.submit(getattr(os, "fdatasync", os.fsync), most)

    def finish(self) -> None:
        """The same for what is under way. The rest is for the caller to sync."""
        if self._underway is not None:
            self._underway.result()

    def end(self) -> None:
        """Files may be closed now."""
        self._thread.shutdown(wait=True)


class _File:
    """A file open for writing: through the page cache, and past it, which takes half the time (`direct` says why)."""

    def __init__(self, path: Path):
        self.cached = os.open(path, os.O_WRONLY)
        self._direct = os.open(path, os.O_WRONLY)
        self._is_direct = set_direct(self._direct, True)
        self._room: np.ndarray | None = None

    def write_direct(self, source: np.ndarray, start: int) -> int:
        """Bytes from the beginning of `source` that have gone past the cache: its whole blocks, or none."""
        blocks = len(source) - len(source) % BLOCK_BYTES
        if not self._is_direct or start % BLOCK_BYTES or blocks < DIRECT_BYTES:
            return 0
        lies_well, done = source.ctypes.data % MEMORY_BYTES == 0, 0
        while done < blocks:
            piece = source[done : min(done + PIECE_BYTES, blocks)]
            if not lies_well:
                self._room = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8) if self._room is None else self._room
                np.copyto(self._room[: len(piece)], piece)
                piece = self._room[: len(piece)]
            try:
                written = os.pwrite(self._direct, memoryview(piece), start + done)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._is_direct = False
                break
            done += written
            if written % BLOCK_BYTES:
                break
        return done

    def close(self) -> None:
        os.close(self.cached)
        os.close(self._direct)


def _write_at(file: _File, value: torch.Tensor, start: int) -> int:
    """Bytes of it that are in the page cache now."""
    source = value.reshape(-1).view(torch.uint8).numpy()
    done = file.write_direct(source, start)
    view, start = memoryview(source)[done:], start + done
    while len(view):
        written = os.pwrite(file.cached, view, start)
        view, start = view[written:], start + written
    return len(source) - done


def _lay_out(
    shapes: Shapes, pattern: str
) -> tuple[dict[str, tuple[bytes, int]], dict[str, Place], dict[str, Any] | None]:
    """By file its header and size, by tensor its place, and the index of several files."""
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    files = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=LARGEST_FILE)
    headers, places = {}, {}
    for file, names in files.filename_to_tensors.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, starts = 0, {}
        is_large = sum(tensors[name].nbytes for name in names) >= LARGE_FILE
        # As the library has them; in large files, what is whole blocks first, so that it begins at blocks.
        odd = {name: is_large and tensors[name].nbytes % BLOCK_BYTES > 0 for name in names}
        for name in sorted(names, key=lambda name: (odd[name], -tensors[name].element_size(), name)):
            starts[name], end = end, end + tensors[name].nbytes
            kind, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [starts[name], end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % (BLOCK_BYTES if is_large else 8))
        text = len(text).to_bytes(8, "little") + text
        headers[file] = (text, len(text) + end)
        places |= {name: Place(file, len(text) + start, tensors[name].dtype) for name, start in starts.items()}
    count = sum(tensor.numel() for tensor in tensors.values())
    metadata = {"total_parameters": count, "total_size": sum(tensor.nbytes for tensor in tensors.values())}
    index = {"metadata": metadata, "weight_map": {name: place.file for name, place in places.items()}}
    return headers, places, index if files.is_sharded else None
