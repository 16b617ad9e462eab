"""Results of items on disk, a line each as soon as it is known, so that a killed evaluation goes on where it was.

A file belongs to one model and one way of scoring; items are found in it by the content of their records. Ranks write
files of their own beside each other, and all of them are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.disk import writing
from tunesmith.errors import UserError

ADVICE = "make room there, or name another place with --output"


class Results:
    """What is known of a task's items; `add` makes one more known for good."""

    def __init__(self, folder: Path, title: str, *, model: str, task: str, rank: int = 0):
        key = hashlib.sha256(json.dumps([model, task]).encode()).hexdigest()[:16]
        self._begin = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', title)[:80]}-{key}"
        self.folder = folder
        self.path = folder / f"{self._begin}.{rank}.jsonl"
        self._file: Any = None
        self.known: dict[str, dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """What this process and others have written. A line that was cut off by a kill is none."""
        for path in sorted(self.folder.glob(f"{self._begin}.*.jsonl")):
            try:
                lines = path.read_bytes().split(b"\n")
            except OSError as error:
                raise UserError(
                    f"{path} cannot be read: {error.strerror}; remove it, or name another --output."
                ) from error
            for line in lines:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and isinstance(found.get("item"), str):
                    self.known[found.pop("item")] = found

    def add(self, item: str, result: Mapping[str, Any]) -> None:
        """Written at once: after a kill at any instant the line is there, or is not."""
        line = json.dumps({"item": item, **result}, ensure_ascii=False, allow_nan=False).encode(errors="replace")
        with writing(self.path, ADVICE):
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
                self._file.write(b"\n" if _ends_within_a_line(self.path) else b"")
            _write_all(self._file, line + b"\n")
        self.known[item] = dict(result)

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path, ADVICE):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _write_all(file: Any, data: bytes) -> None:
    """A raw file may take a part only."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
