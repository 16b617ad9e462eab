"""Files that survive a kill or a power cut: written whole or not at all, synced, hashed.

Plain file-system helpers; what a checkpoint is, `store.py` knows. Nothing here falls back silently: a full
disk or a read-only folder comes out as the OSError it is.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from tunesmith.checkpoint.direct import DirectWriter, read_direct
from tunesmith.disk import DIRECT_BYTES, sync_folder
from tunesmith.errors import UserError

DIGEST = "xxh3_128"
"""Of what is written. It finds damage as surely as SHA-256 does (2^-128 of it is missed), at twenty times the speed on
CPUs without instructions for that; neither is a protection against a person who can write the manifest, too."""


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: after a kill at any instant it holds the old bytes or the new."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{unique()}")
    try:
        write_new(partial, [data])
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file that does not exist yet and sync it; returns its size and the DIGEST of what was meant."""
    digest = new_digest(DIGEST)
    with open(path, "xb", buffering=0) as file:
        writer = DirectWriter(file.fileno())
        for chunk in chunks:
            digest.update(chunk)
            writer.write(chunk)
        writer.finish()
        os.fsync(file.fileno())
    return writer.size, digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each name synced."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def new_digest(kind: str) -> Any:
    """DIGEST, or `sha256` for what an earlier version wrote."""
    return xxhash.xxh3_128() if kind == DIGEST else hashlib.new(kind)


def digest_file(path: Path, kind: str = DIGEST, *, from_disk: bool = False) -> str:
    """`from_disk`: past the system's page cache, where the file system can and the file is large."""
    if not from_disk or path.stat().st_size < DIRECT_BYTES:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: new_digest(kind)).hexdigest()
    digest = new_digest(kind)
    with open(path, "rb", buffering=0) as file:
        for piece in read_direct(file.fileno()):
            digest.update(piece)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file, link or folder, as far as that is possible; what remains is for the next clean-up."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unique() -> str:
    """A name part that says whose file this is and meets no other: `<pid>-<random>`."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def describe(error: Exception) -> str:
    """What went wrong, in the system's words, with the file's name; what is in words already, as it is."""
    if isinstance(error, UserError) or not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    return f"{reason} ({error.filename})" if error.filename else reason
