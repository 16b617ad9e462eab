"""Ranks that wait for each other for ever: each writes what it is doing, and ends.

A step that takes longer than any should is a hang: one rank is stuck, and the others wait for it in a collective. All
notice it by their own clocks, so the stacks of all are there to compare; the odd one out is the cause.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tunesmith.disk import writing
from tunesmith.parallel.ranks import Ranks

HANG_SECONDS = 1200.0
"""Longer than compiling and the slowest step take, shorter than the timeout of collectives, which would end ranks
without a word of what they were doing."""
FOLDER = "stacks"


class HangWatch:
    """Watches steps of several ranks; alone, there is nobody to wait for."""

    def __init__(self, folder: Path, ranks: Ranks):
        self._file: IO[str] | None = None
        if ranks.count > 1:
            place = folder / FOLDER
            with writing(place, "make room there, or choose another output"):
                place.mkdir(parents=True, exist_ok=True)
                self._file = (place / f"rank-{ranks.rank}.txt").open("w", encoding="utf-8")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While this lasts, HANG_SECONDS may pass; after that every thread's stack is written and the process ends."""
        if self._file is None:
            yield
            return
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def stacks(folder: Path) -> list[Path]:
    """What ranks that hung have left behind."""
    return sorted(file for file in (folder / FOLDER).glob("rank-*.txt") if file.stat().st_size)
