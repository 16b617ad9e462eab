"""What is shown of each evaluation: answers to fixed prompts, and the losses of single tokens of some held-out records.

RUN/samples.jsonl has lines of {"step", "answers", "tokens"}; those of one step belong together. A step that a resumed
run did again stands there twice, and the later lines count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "samples.jsonl"
PROMPTS, PROMPT, ANSWER = 8, 2_000, 4_000
"""Prompts of a task, and characters of each and of its answer, that are kept."""
MOST = 1 << 26
"""Bytes after which no more is kept."""


class SampleLog:
    """Appends lines, by one rank. A full disk costs what is to be written, not the run."""

    def __init__(self, folder: Path, *, is_first: bool = True):
        self.path, self.is_first = folder / FILE, is_first

    def write(self, step: int, **content: Any) -> None:
        if not self.is_first or not any(content.values()):
            return
        line = json.dumps({"step": step, **content}, allow_nan=False, separators=(",", ":")) + "\n"
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as stream:
                size = stream.tell()
                if size > MOST:
                    return
                stream.seek(max(0, size - 1))
                torn = size > 0 and stream.read(1) != b"\n"  # by a kill
                stream.write(b"\n" * torn + line.encode())


def answered(prompts: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first answers of a task with their scores, to be kept."""
    return [
        {
            "prompt": prompt[:PROMPT],
            "answer": str(result["answer"])[:ANSWER],
            "scores": {name: value for name, value in result.items() if name != "answer"},
        }
        for prompt, result in zip(prompts[:PROMPTS], results, strict=False)
    ]


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """By step; what is damaged is left out."""
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")
    except OSError:
        return {}
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            sample = json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict) and isinstance(step := sample.pop("step", None), int):
            by_step.setdefault(step, {}).update(sample)
    return dict(sorted(by_step.items()))
