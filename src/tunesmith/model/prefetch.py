"""What a start would wait for later, begun early, beside what the CPU does meanwhile. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from tunesmith.errors import UserError
from tunesmith.plan.hardware import host_memory
from tunesmith.plan.models import files_of

READERS = 2
"""Few, since modules are read from the same disk meanwhile."""
PIECE = 1 << 23
MOST = 0.7
"""Of the free memory."""


def read_files(model: str) -> list[Thread]:
    """Have the system read the model's files into its memory, where there is room, and go on at once: loading finds
    them there when modules are imported, the plan is made and the data are ready."""
    try:
        files = files_of(model) if hasattr(os, "RWF_NOWAIT") else []
        size = sum(file.stat().st_size for file in files)
    except (OSError, UserError):  # which loading will say
        return []
    if size > MOST * host_memory()[1]:
        return []
    readers = [Thread(target=_read, args=(files[first::READERS],), daemon=True) for first in range(READERS)]
    for reader in readers:
        reader.start()
    return readers


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """`work` is done in a thread, and done at the end. What fails there is not said: who needs it meets it again."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _read(files: Sequence[Path]) -> None:
    room = bytearray(PIECE)
    with suppress(OSError):
        for file in files:
            with file.open("rb", buffering=0) as stream:
                size = file.stat().st_size
                for start in range(0, size, PIECE):
                    # By its last byte: the first ones may have come along with the piece before.
                    if not _is_in_memory(stream.fileno(), min(start + PIECE, size) - 1):
                        os.preadv(stream.fileno(), [room], start)


def _is_in_memory(descriptor: int, place: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:
        return False
