"""The folder in which tokenized examples are kept, by a key that covers everything they were made from.

What is kept there is written beside its place, synced and renamed, so it is whole or not there; two processes that
make the same do not disturb each other. A damaged one is made again, and what nobody has opened for long is removed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tunesmith import disk
from tunesmith.cache import cache_folder
from tunesmith.data.store import Whole
from tunesmith.data.token_files import Damaged, read_folder
from tunesmith.disk import sync_folder
from tunesmith.errors import UserError

log = logging.getLogger(__name__)

KEPT_DAYS, ABANDONED_DAYS = 60, 1
"""After which tokens that nobody opened, or that were never finished, are removed."""


def tokens_folder() -> Path:
    return cache_folder() / "tokens"


def stored(key: str, *, is_checked: bool = True) -> Whole | None:
    """The whole examples kept under this key; None when there are none or they are damaged, as far as that is
    checked."""
    folder = tokens_folder() / key
    if not os.path.exists(folder):  # Path.exists raises where a parent may not be read
        return None
    try:
        found = read_folder(folder, is_checked=is_checked)
        with suppress(OSError):  # a cache that others own may be read all the same
            os.utime(folder)
        return found
    except Damaged as damage:
        if folder not in _told:  # a run looks more than once
            log.warning("The token cache %s is damaged (%s); it is made again.", folder, damage)
        _told.add(folder)
        return None


_told: set[Path] = set()
"""Damaged ones."""


def install(partial_folder: Path, folder: Path) -> None:
    while True:
        try:
            partial_folder.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            read_folder(folder)  # another process was faster; what it made is the same
            break
        except Damaged:
            aside = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
            with suppress(FileNotFoundError):
                folder.rename(aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)


def remove_old(root: Path) -> None:
    """What nobody has opened for long, and what killed processes left behind; a living one writes more often than once
    a day. A process that still reads removed tokens keeps them until it ends."""
    for folder in root.iterdir():
        days = ABANDONED_DAYS if folder.name.startswith("partial-") else KEPT_DAYS
        with suppress(FileNotFoundError, NotADirectoryError):
            newest = max(path.stat().st_mtime for path in [folder, *folder.glob("*")])
            if newest < time.time() - days * 86400:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (reason := disk.reason(error)) is None:
            raise
        raise UserError(
            f"The token cache {root} cannot be written: {reason}; make room there or set TUNESMITH_CACHE to a "
            "folder elsewhere."
        ) from error
