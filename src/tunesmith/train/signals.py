"""Signals that ask a run to stop: acknowledged at once, and obeyed between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(acknowledge: Callable[[str], None]) -> Iterator[Callable[[], str | None]]:
    """The first Ctrl-C or SIGTERM asks for a stop; a second Ctrl-C stops at once.

    A handler runs when the main thread is back from what it waits for, which may be a whole step on a GPU. So a thread
    of its own, woken by the system, acknowledges what was asked for."""
    asked: list[str] = []

    def handle(number: int, _frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(_stopped_by(number))

    def listen() -> None:
        while said := os.read(reader, 1):
            if said[0] in (signal.SIGINT, signal.SIGTERM):
                acknowledge(_stopped_by(said[0]))
                return

    if threading.current_thread() is not threading.main_thread():  # where signals cannot be handled
        yield lambda: None
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield lambda: asked[0] if asked else None
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)
        listener.join()
        os.close(reader)


def _stopped_by(number: int) -> str:
    return "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
