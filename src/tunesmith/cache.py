"""The folder for what can be made again: tokens, converted models, compiled layers, measured rates."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("TUNESMITH_CACHE") or Path.home() / ".cache" / "tunesmith")
