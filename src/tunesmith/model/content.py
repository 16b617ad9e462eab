"""The content of a model's files, hashed while they are read: by it a run knows its base again.

Each tensor is hashed in pieces, by whoever reads the part that a piece begins in. What comes of it does not depend on
the order, on how many ranks read, or on how tensors are spread over files. XXH3 runs at the speed of memory; it finds
every accident and every exchange of a model, and is no signature against somebody who makes collisions on purpose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash

from tunesmith.disk import BLOCK_BYTES, REFUSED, set_direct
from tunesmith.errors import UserError
from tunesmith.model.headers import Entry, shortened

PIECE = 1 << 22
"""Bytes that have a hash of their own."""
ROOM = 1 << 18
"""Bytes in memory at a time."""


class Content:
    """What has been read of a model; filled by several threads."""

    def __init__(self) -> None:
        self._pieces: dict[str, dict[int, str]] = {}
        self._described: dict[str, str] = {}
        self.files: dict[str, str] = {}
        """The file of each tensor."""

    def add_read(self, entry: Entry, content: memoryview) -> None:
        """Hash a tensor that has been read whole, from memory."""
        self._pieces[entry.name] = {
            number: xxhash.xxh3_128_hexdigest(content[number * PIECE : (number + 1) * PIECE])
            for number in range(max(1, -(-entry.size // PIECE)))
        }
        self._note(entry)

    def add(self, entry: Entry, files: Bytes, span: tuple[int, int] | None = None) -> None:
        """Hash the pieces of a tensor that begin in `span`, from byte to byte of it; all of them when left out."""
        first, last = span or (0, max(1, entry.size))
        room = memoryview(bytearray(min(ROOM, entry.size)))
        for number in range(-(-first // PIECE), -(-last // PIECE)):
            digest = xxhash.xxh3_128()
            end = min(entry.size, (number + 1) * PIECE)
            for start in range(number * PIECE, end, ROOM):
                digest.update(files.into(room[: end - start], entry.path, entry.start + start))
            self._pieces.setdefault(entry.name, {})[number] = digest.hexdigest()
        self._note(entry)

    def _note(self, entry: Entry) -> None:
        self._described[entry.name] = f"{entry.dtype} {list(entry.shape)}"
        self.files[entry.name] = entry.path.name

    def join(self, gather: Callable[[str], list[str]]) -> None:
        """Put together what all ranks have read."""
        said = json.dumps([self._pieces, self._described, self.files])
        for pieces, described, files in map(json.loads, gather(said)):
            for name, numbered in pieces.items():
                mine = self._pieces.setdefault(name, {})
                mine.update({int(number): digest for number, digest in numbered.items()})
            self._described.update(described)
            self.files.update(files)

    def tensors(self) -> dict[str, str]:
        """A hash of each tensor that was read."""
        found = {}
        for name in sorted(self._pieces):
            pieces = self._pieces[name]
            text = self._described[name] + "".join(pieces[number] for number in sorted(pieces))
            found[name] = xxhash.xxh3_128_hexdigest(text.encode())
        return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
    """How one base differs from another, one phrase each; both have `config` and `tensors`."""
    found = []
    old, new = _flat(before["config"]), _flat(now["config"])
    for key in sorted(old.keys() | new.keys()):
        if key.partition(".")[0] not in UNIMPORTANT and old.get(key) != new.get(key):
            found.append(f"config.json had {key} {json.dumps(old.get(key))} and now has {json.dumps(new.get(key))}")
    if len(found) > 3:
        found = [*found[:3], f"{len(found) - 3} more values of config.json differ"]
    mine, theirs = now["tensors"], before["tensors"]
    others = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if others:
        where = shortened(sorted({files[name] for name in others}))
        found.append(f"{len(others):,} of {len(theirs):,} tensors differ ({shortened(others)} in {where})")
    if gone := [name for name in theirs if name not in mine]:
        found.append(f"{len(gone):,} of {len(theirs):,} tensors are not there any more ({shortened(gone)})")
    if added := [name for name in mine if name not in theirs]:
        found.append(f"{len(added):,} tensors are new ({shortened(added)})")
    return found


UNIMPORTANT = {"transformers_version", "_name_or_path", "name_or_path", "use_cache", "torch_dtype", "dtype"}
"""What a config says that does not change what the model computes here."""


class Bytes:
    """The bytes of files, by descriptors that `stack` closes; several threads may ask. They are not mapped: pages of
    tensors in use are mapped already, and would count twice."""

    def __init__(self, stack: ExitStack, paths: Iterable[Path], *, is_past_cache: bool = False):
        self._descriptors = {}
        self._direct: dict[Path, int] = {}
        """Of files that are read past the page cache; without those whose file system cannot do it."""
        for path in paths:
            self._descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            stack.callback(os.close, self._descriptors[path])
            if is_past_cache:
                other = os.open(path, os.O_RDONLY)
                stack.callback(os.close, other)
                if set_direct(other, True):
                    self._direct[path] = other

    def into(self, room: memoryview, path: Path, start: int) -> memoryview:
        """As many bytes as there is room for."""
        done = 0
        while done < len(room):
            count = os.preadv(self._descriptors[path], [room[done:]], start + done)
            if not count:
                raise UserError(f"model: {path} ended while it was read; does another program write it?")
            done += count
        return room

    def into_blocks(self, room: memoryview, path: Path, start: int, size: int) -> memoryview:
        """So many bytes, at the place in `room` that `start` has in its block of the file: past the page cache, unless
        they are in it. `room` begins at a block of memory and has so many blocks."""
        before, direct = start % BLOCK_BYTES, self._direct.get(path)
        taken, done = room[before : before + size], 0
        if direct is not None and not self._is_cached(path, start + size // 2):
            done = min(size, max(0, self._from_disk(direct, room, start - before) - before))
        if done < size:
            self.into(taken[done:], path, start + done)
        return taken

    def _from_disk(self, descriptor: int, room: memoryview, start: int) -> int:
        """Bytes that were read into `room`: fewer than there is room for where the file ends or cannot be read so."""
        done = 0
        while done < len(room) and done % BLOCK_BYTES == 0:
            try:
                count = os.preadv(descriptor, [room[done:]], start + done)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                break
            if not count:
                break
            done += count
        return done

    def _is_cached(self, path: Path, at: int) -> bool:
        """Whether the page cache has this byte of a file: that costs the CPU more than reading past it, and no disk."""
        try:
            return os.preadv(self._descriptors[path], [bytearray(1)], at, getattr(os, "RWF_NOWAIT", 0)) == 1
        except OSError:  # it would have to wait, or cannot say
            return False


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        key: leaf
        for name, one in value.items()
        for key, leaf in _flat(one, f"{prefix}.{name}" if prefix else str(name)).items()
    }
