"""The folder for what can be made again: tokens, converted models, compiled layers, bytecode, measured
rates."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("TUNESMITH_CACHE") or Path.home() / ".cache" / "tunesmith")


def folder_to_fill(name: str) -> Path | None:
    """A folder in it that others' code may write to and lock; None where that cannot be, as in a cache that others own:
    they then do without, or find their own place."""
    try:
        import fcntl

        folder = cache_folder() / name
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError, RuntimeError):  # the last where no home folder is known
        return None
    return folder


DATED = 631_152_000
"""1990: older files have a date that says nothing, as some images give it to all."""


def keep_bytecode() -> None:
    """Have Python keep the bytecode of modules here, where it keeps none beside their sources, as in many containers:
    it would compile torch's and transformers' thousands of files at each start, for seconds. A source is known by its
    size and date only, so what is installed is part of the place."""
    found = find_spec("torch")
    if sys.pycache_prefix or found is None or found.origin is None:
        return
    beside = Path(found.origin).parent
    is_kept = not sys.dont_write_bytecode and os.access(beside, os.W_OK)
    try:
        if is_kept or (beside / "__pycache__").is_dir() or os.stat(found.origin).st_mtime < DATED:
            return
        names = sorted(name for name in os.listdir(beside.parent) if name.endswith(".dist-info"))
    except OSError:  # not an ordinary folder
        return
    import hashlib

    installed = hashlib.sha256("\n".join([sys.version, *names]).encode()).hexdigest()[:16]
    if folder := folder_to_fill(f"bytecode/{installed}"):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)  # for the processes started from here
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
