"""Locks on files and folders: who writes a run, and which half-written folders nobody writes any more.

The kernel frees a lock when its process dies, however it dies. File systems without locks are said to be so, and then
folders go by the pid in their names.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from tunesmith import disk
from tunesmith.checkpoint.files import describe, make_folder
from tunesmith.errors import UserError

log = logging.getLogger(__name__)

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
"""What `flock` answers on (network) file systems without locks."""


class RunLock:
    """Held while a process writes a run folder; a second one is told who holds it. A kill frees it."""

    def __init__(self, folder: Path, *, wait_s: float = 2.0, warn: Callable[[str], None] = log.warning):
        self.folder = Path(folder)
        self._wait_s = wait_s
        self._warn = warn
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        path = self.folder / ".lock"
        try:
            make_folder(self.folder)
            give_up = time.monotonic() + self._wait_s  # a killed process holds it until its memory is freed
            while (fd := take_lock(path, os.O_RDWR | os.O_CREAT)) is None and time.monotonic() < give_up:
                time.sleep(0.05)
            self._fd = fd
        except OSError as error:
            if error.errno in NO_LOCKS:
                self._warn(f"The file system of {self.folder} has no locks: let only one process train there.")
                return self
            why = disk.reason(error) or describe(error)
            raise UserError(
                f"the run folder {self.folder} cannot be written: {why}; set `output` to another one"
            ) from error
        if self._fd is None:
            holder = path.read_text(errors="replace").strip()
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise UserError(
                f"{self.folder} is being written by {who}; wait until it is done, stop it, "
                "or set `output` to another folder"
            )
        try:
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds all the same, only without a name on it
        return self

    def __exit__(self, *_: object) -> None:
        free_lock(self._fd)
        self._fd = None


def take_folder_lock(folder: Path) -> int | None:
    """Shows other processes that this folder is being written; without locks they go by the pid in its name."""
    try:
        return take_lock(folder)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise


def is_abandoned(partial: Path, pid: int) -> bool:
    """Whether its writer is dead. Containers give the next process the same pid, so ours proves nothing."""
    if pid != os.getpid() and is_alive(pid):
        return False
    try:
        lock = take_lock(partial)
    except OSError as error:
        return error.errno in NO_LOCKS
    free_lock(lock)
    return lock is not None


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
