"""Large files past the system's page cache (O_DIRECT), and several of them at the same time.

Through the cache each byte costs the CPU ten times as much (0.5 s a GB against 0.05, measured), which training could
use, what is cached pushes out the data that training reads, and a file that is read back comes from memory. Past it, it
comes from the disk. File systems that cannot do this are written and read in the usual way.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from tunesmith.disk import BLOCK_BYTES, DIRECT_BYTES, REFUSED, set_direct

T = TypeVar("T")
PIECE_BYTES = 8 * 2**20
MEMORY_BYTES = 512
"""What memory that is written as it lies begins at a multiple of; disks that want more say so."""


class DirectWriter:
    """Writes a file from its beginning: large pieces past the cache, from where they lie if they begin at blocks of
    memory and of the file, else from a copy that does."""

    def __init__(self, fd: int):
        self.size = 0
        self._fd = fd
        self._memory = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)  # begins at a page
        self._filled = 0
        self._is_direct: bool | None = None
        """None: not tried yet."""
        self._takes_as_it_lies = True

    def write(self, chunk: bytes | memoryview) -> None:
        if not len(chunk):
            return
        source = np.frombuffer(chunk, np.uint8)
        self.size += len(source)
        if self._can_take(source):
            self._put(self._memory[: self._filled])
            self._filled = 0
            blocks = len(source) - len(source) % BLOCK_BYTES
            source = source[self._put(source[:blocks], as_it_lies=True) :]
        while len(source):
            room = self._memory[self._filled : self._filled + len(source)]
            np.copyto(room, source[: len(room)])  # unlike a memoryview's copy, this lets other threads run
            source = source[len(room) :]
            self._filled += len(room)
            if self._filled == PIECE_BYTES:
                self._put(self._memory)
                self._filled = 0

    def finish(self) -> None:
        """Write what is left. It is for the caller to sync."""
        self._set_direct(False)
        self._put(self._memory[: self._filled])
        self._filled = 0

    def _can_take(self, source: np.ndarray) -> bool:
        is_aligned = self._filled % BLOCK_BYTES == 0 and source.ctypes.data % MEMORY_BYTES == 0
        return is_aligned and len(source) >= DIRECT_BYTES and self._takes_as_it_lies and self._is_direct is not False

    def _put(self, source: np.ndarray, *, as_it_lies: bool = False) -> int:
        """Write all of it; less, said by the result, only where it may not be written as it lies."""
        if self._is_direct is None and len(source) >= DIRECT_BYTES:
            self._set_direct(True)
        left = memoryview(source)
        while left:
            try:
                written = os.write(self._fd, left)
            except OSError as error:
                if not self._is_direct or error.errno not in REFUSED:
                    raise
                if as_it_lies:
                    self._takes_as_it_lies = False
                    break
                self._set_direct(False)
                continue
            left = left[written:]
            if written % BLOCK_BYTES:
                self._set_direct(False)
        return len(source) - len(left)

    def _set_direct(self, wanted: bool) -> None:
        if wanted or self._is_direct:
            self._is_direct = set_direct(self._fd, wanted)


def read_direct(fd: int) -> Iterator[memoryview]:
    """A file from its beginning to its end, from the disk where the file system can; each piece until the next."""
    memory = memoryview(mmap.mmap(-1, PIECE_BYTES))
    is_direct = set_direct(fd, True)
    while True:
        try:
            count = os.readv(fd, [memory])
        except OSError as error:
            if not is_direct or error.errno not in REFUSED:
                raise
            is_direct = set_direct(fd, False)
            continue
        if not count:
            return
        yield memory[:count]
        if is_direct and count % BLOCK_BYTES:  # the end, most likely
            is_direct = set_direct(fd, False)


def run_in_threads(jobs: Sequence[Callable[[], T]], count: int) -> list[T]:
    """What the jobs return, in their order, at most `count` at a time. After a failure no further one begins, and the
    first failure is raised when none runs any more. The threads do not keep a process that ends from ending."""
    if len(jobs) == 1 or count == 1:
        return [job() for job in jobs]
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    waiting, turn = iter(enumerate(jobs)), threading.Lock()

    def take() -> tuple[int, Callable[[], T]] | None:
        with turn:
            return None if failures else next(waiting, None)

    def work() -> None:
        try:
            while (taken := take()) is not None:
                results[taken[0]] = taken[1]()
        except BaseException as error:  # for the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=work, name="writer", daemon=True) for _ in range(min(count, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: what the jobs write to must not be taken from under them
        failures.insert(0, error)
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(jobs))]
