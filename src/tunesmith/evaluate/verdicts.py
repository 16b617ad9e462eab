"""Verdicts that were reached about a run, a line each, for its pages: the last one against each model counts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.disk import writing
from tunesmith.evaluate.results import ADVICE

FILE = "verdicts.jsonl"
MOST = 50
"""That are read, the newest."""


def write(folder: Path, verdict: Mapping[str, Any]) -> None:
    """Into the folder that a run's results are in. `verdict` names `model` and `against`."""
    line = json.dumps({"time": round(time.time(), 3), **verdict}, ensure_ascii=False, allow_nan=False)
    with writing(folder / FILE, ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("ab") as stream:
            stream.write(line.encode("utf-8", "replace") + b"\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The newest last; lines that are none are left out."""
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")
    except OSError:
        return []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and isinstance(one.get("results"), list):
            key = (str(one.get("against")), json.dumps([_task(row) for row in one["results"]]))
            found.pop(key, None)
            found[key] = one
    return list(found.values())[-MOST:]


def _task(row: Any) -> Any:
    return row.get("task") if isinstance(row, dict) else None
