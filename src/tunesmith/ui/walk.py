"""Files below a folder, as the pages look for them: breadth first, so many folders at most, and no links followed.

What is found goes by an id, a hash of where it lies: a browser asks by ids alone, and whatever it asks for is looked up
among what was found here.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Entries = Sequence["os.DirEntry[str]"]


def walk(
    root: Path, *, depth: int, folders: int, ends: Callable[[Entries], bool] = lambda entries: False
) -> Iterator[tuple[Path, Entries]]:
    """Each folder in and below `root`, `depth` levels deep, with what lies in it by name. Hidden folders are left out,
    and so is what lies below a folder of which `ends` is true."""
    waiting, looked_at = deque([(Path(root), 0)]), 0
    while waiting and looked_at < folders:
        folder, level = waiting.popleft()
        looked_at += 1
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda one: one.name)
        except OSError:
            continue
        yield folder, entries
        if level < depth and not ends(entries):
            waiting += ((Path(one.path), level + 1) for one in entries if not one.name.startswith(".") and _is_dir(one))


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # it has gone, or may not be looked at
        return False


def is_run(entries: Entries) -> bool:
    return any(one.name == "run.json" for one in entries)


def file_id(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
