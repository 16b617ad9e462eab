from __future__ import annotations

from export.conftest import llama, trained

__all__ = ["llama", "trained"]
