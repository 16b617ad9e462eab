"""What a disk refuses, in words, how much room it has, and how files are opened past the system's page cache.

Whoever writes a file says which by `writing`: an error of a full disk often names none. What nobody wrapped, the
command line puts into words by `sentence`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tunesmith.cache import cache_folder
from tunesmith.errors import UserError

FULL = "the disk is full"
REASONS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EFBIG: "the file would be larger than files may be there",
    errno.EACCES: "there is no permission",
    errno.EPERM: "there is no permission",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file, where a folder is needed",
    errno.EEXIST: "a file is where a folder is needed",
    errno.EISDIR: "it is a folder",
    errno.ENOTEMPTY: "a folder that is not empty is in its place",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links lead in a circle",
    errno.EXDEV: "it lies on another disk than its folder",
    errno.EBUSY: "something else uses it",
    errno.EIO: "the disk reports an error",
    errno.ESTALE: "the network disk has lost it",
    errno.ENXIO: "the disk is gone",
    errno.ENODEV: "the disk is gone",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
}
WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""What no reader is ever told."""
LEAST = 1 << 20
"""A disk with less is full: what was refused need not have taken the last byte."""
BLOCK_BYTES = 4096
"""What pieces that go past the page cache, their memory and their place in the file are multiples of: the largest block
of usual disks."""
DIRECT_BYTES = 2**20
"""Less is not worth it."""
REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""What file systems answer that cannot do it."""


def expanded(path: str | Path) -> Path:
    """With the home folder in place of `~`; `~name` stays as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def reason(error: BaseException) -> str | None:
    """Why the file system refused something, in words; None where it was not the file system."""
    number = _number(error)
    return None if number is None else REASONS.get(number)


def sentence(error: BaseException) -> str | None:
    """What happened to which file and what to do, for an error that nobody has put into words; None as above."""
    if isinstance(error, OSError) and "temporary directory" in str(error):
        return "No temporary folder can be written; make room in one, or set TMPDIR to a folder that can be."
    why = reason(error)
    if why is None:
        return None
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    is_named = isinstance(name, str | bytes | os.PathLike)
    if _number(error) not in WRITES:
        return f"{os.fsdecode(name)} cannot be opened: {why}; mend that, or name another place." if is_named else None
    where = os.fsdecode(name) if is_named else _full_folders() if why == FULL else "A file"
    return f"{where} cannot be written: {why}; make room there, or name another place."


@contextmanager
def writing(path: Path | str, advice: str = "make room there, or name another place") -> Iterator[None]:
    """What the file system refuses while `path` is written, as a UserError that names it and ends with `advice`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (why := reason(error)) is None:
            raise
        named = getattr(error, "filename", None)
        if isinstance(named, str) and not Path(named).absolute().is_relative_to(Path(path).absolute().parent):
            path = named  # a temporary folder, say
        raise UserError(f"{path} cannot be written: {why}; {advice}.") from error


def check_writable(path: Path, advice: str = "make room there, or name another place") -> None:
    """Refuse at once what could not be written after hours: tries it beside `path`, whose folder must be there."""
    with writing(path, advice):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        trial = path.absolute().parent / f".{path.name[:100]}.trial-{secrets.token_hex(4)}"
        try:
            trial.write_bytes(b"tried")
        finally:
            with suppress(OSError):
                trial.unlink(missing_ok=True)


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


def set_direct(fd: int, wanted: bool) -> bool:
    """Whether the file now goes past the page cache (O_DIRECT)."""
    direct = getattr(os, "O_DIRECT", 0)  # Linux alone has it
    if not direct:
        return False
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return False
    return wanted


def free(folder: Path) -> int | None:
    """Bytes that may be written to the disk of a folder that is there or will be; None where it does not say."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return found.free if found.total else None  # some network disks say zero of everything


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def gib(count: float) -> str:
    """Bytes in one unit, for people who compare them."""
    return f"{count / 2**30:.1f} GiB"


def _number(error: BaseException) -> int | None:
    """The system's number of an error: its own, or the one that a library's words carry."""
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if number is not None:
        return number
    # How Rust's libraries (safetensors, tokenizers) say it, and Python's own errors inside those of others.
    found = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    if found:
        return int(found[1] or found[2])
    return errno.ENOSPC if re.search(r"[Nn]o space left on device", str(error)) else None


def _full_folders() -> str:
    """Which of the places that are written to without being named have no room."""
    places = {"This folder": Path.cwd(), "The temporary folder": Path(tempfile.gettempdir())}
    with suppress(RuntimeError):  # no home folder is known
        places["The cache"] = cache_folder()
    full = [f"{what} ({path})" for what, path in places.items() if (found := free(path)) is not None and found < LEAST]
    return full[0] if full else "A file"
