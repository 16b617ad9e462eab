"""Stopping a run as Ctrl-C does: it saves first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from tunesmith.errors import UserError
from tunesmith.ui.log import digest
from tunesmith.ui.read import is_held

AGAIN = 10.0
"""Seconds after which a run that has not acknowledged may be asked once more. A second Ctrl-C that reaches the training
loop stops it without saving, so a run that is stopping is never sent one."""


class Stopper:
    """Asks each process once."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}

    def stop(self, folder: Path) -> int:
        """Send SIGINT to the process that writes the run; its pid. What prevents that is said in a sentence."""
        if is_held(folder) is False:
            raise UserError("This run is not running.")
        pid = holder(folder)
        if pid is None:
            raise UserError("This run is written by a process of another machine or user; stop it there, by Ctrl-C.")
        asked = self._asked.get(pid, float("-inf"))
        if digest(folder).kind == "stopping" or time.monotonic() - asked < AGAIN:
            raise UserError("This run is stopping already: it saves first, which may take a while.")
        self._asked[pid] = time.monotonic()
        os.kill(pid, signal.SIGINT)
        return pid


def holder(folder: Path) -> int | None:
    """The process of this machine that has the run's lock open. The pid in the file alone proves nothing: on a shared
    disk it is another machine's."""
    path = folder / ".lock"
    try:
        pid = int(path.read_text(encoding="ascii"))
        lock = path.stat()
        files = psutil.Process(pid).open_files()
    except (OSError, ValueError, psutil.Error):
        return None
    for one in files:
        try:
            if os.path.samestat(os.stat(one.path), lock):
                return pid
        except OSError:
            continue
    return None
