"""Measured numbers as files: what, when, on what, with which versions and commit. Tables are made from these."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tunesmith.measure.results import document

FOLDER = Path(__file__).parent / "results"


def write_result(
    name: str, what: str, numbers: dict[str, Any] | list[dict[str, Any]], about: dict[str, Any] | None = None
) -> Path:
    """Write NAME.json into benchmarks/results, or into the folder that RESULTS names. `about` says when and on what
    the numbers were measured, where that was not just now and here."""
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".new")  # a call that is killed leaves what was there
    made.write_text(json.dumps({**(about or document(what, numbers)), "numbers": numbers}, indent=1) + "\n")
    made.replace(path)
    return path


def read_rows(name: str) -> list[dict[str, Any]]:
    """What `write_result` wrote last, if it did."""
    return json.loads(_path(name).read_text(encoding="utf-8"))["numbers"] if _path(name).exists() else []


def _path(name: str) -> Path:
    return Path(os.environ.get("RESULTS") or FOLDER) / f"{name}.json"
