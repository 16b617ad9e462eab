"""The folder for what can be made again: tokens, converted models, compiled layers, bytecode, measured
rates."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("TUNESMITH_CACHE") or Path.home() / ".cache" / "tunesmith")


def folder_to_fill(name: str) -> Path | None:
    """A folder in it that others' code may write to and lock; None where that cannot be, as in a cache that others own:
    they then do without, or find their own place."""
    folder = cache_folder() / name
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return None
    return folder
