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
    folder = cache_folder() / name
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return None
    return folder


def keep_bytecode() -> None:
    """Have Python keep the bytecode of modules here, where it keeps none beside their sources, as in many containers:
    it would compile torch's and transformers' thousands of files at each start, for seconds. What is installed is part
    of the place: a source is known by its size and date only, and some images give all files the same date."""
    found = find_spec("torch")
    if sys.pycache_prefix or found is None or found.origin is None:
        return
    beside = Path(found.origin).parent
    is_kept = not sys.dont_write_bytecode and os.access(beside, os.W_OK)
    if is_kept or (beside / "__pycache__").is_dir():
        return
    import hashlib

    installed = sorted(name for name in os.listdir(beside.parent) if name.endswith(".dist-info"))
    digest = hashlib.sha256("\n".join(installed).encode()).hexdigest()[:16]
    if folder := folder_to_fill(f"bytecode/{digest}"):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)  # for the processes started from here
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
