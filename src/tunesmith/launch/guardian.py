"""A command that ends with whoever started it: `python guardian.py COMMAND...`, by nothing but the standard library.

The command and all that it starts are ended when standard input is closed or the parent is gone, which the kernel sees
to however the parent ended, kill -9 included; and with SIGTERM. Its process id is the first line of standard output.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

POLL_SECONDS = 0.5
END_SECONDS = 10.0
"""That the command has to end by itself."""


def main(words: Sequence[str]) -> int:
    parent, asked = os.getppid(), []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(True))
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    with suppress(OSError):
        os.write(1, f"{process.pid}\n".encode())
    try:
        while process.poll() is None and not asked and os.getppid() == parent and not _is_closed():
            pass
    finally:
        _end(process)
    return process.returncode


def _is_closed() -> bool:
    """Whether nobody holds the other end of standard input any more; waits a moment for that."""
    readable, _, _ = select.select([0], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(0, 4096)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all of its session: what it has started may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    give_up = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) & 0xFF)
