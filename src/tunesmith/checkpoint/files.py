"""Files that survive a kill or a power cut: written whole or not at all, synced, hashed, locked.

Plain file-system helpers; what a checkpoint is, `store.py` knows. Nothing here falls back silently: a full
disk or a read-only folder comes out as the OSError it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
"""What `flock` answers on (network) file systems without locks."""


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
    """Write a file that does not exist yet and sync it; returns its size and the SHA-256 of what was meant."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (created, renamed, removed) survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each name synced."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file, link or folder, as far as that is possible; what remains is for the next clean-up."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unique() -> str:
    """A name part that says whose file this is and meets no other: `<pid>-<random>`."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def take_lock(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open `path` and lock it; None when someone else has the lock. The kernel frees it when we die."""
    fd = os.open(path, flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    _locks.add(fd)
    return fd


def free_lock(fd: int | None) -> None:
    if fd in _locks:
        _locks.remove(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


_locks: set[int] = set()


def _forget_locks() -> None:
    """A forked child (a data worker) must not keep its parent's locks alive after the parent was killed."""
    for fd in _locks:
        os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)
