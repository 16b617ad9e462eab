"""A command ends with whoever started it, and with it what it has started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tunesmith.launch import guardian

SLEEPS = "import time; time.sleep(99)"


def running(mark: Path) -> list[str]:
    """Processes that have been given this path."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = one.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(mark).encode() in words:
            found.append(one.parent.name)
    return found


def wait_for(fact: Callable[[], bool]) -> None:
    give_up = time.monotonic() + guardian.END_SECONDS + 20
    while not fact():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def command(mark: Path) -> list[str]:
    """Starts another process, and sleeps."""
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}, {str(mark)!r}])"
    return [sys.executable, "-c", starts, str(mark)]


@pytest.mark.parametrize("way", ["starter killed", "starter terminated", "guardian terminated"])
def test_a_command_ends_with_whoever_started_it(tmp_path, way):
    words = [sys.executable, "-I", "-S", guardian.__file__, *command(tmp_path)]
    starts = (
        "import subprocess, sys, time\n"
        f"one = subprocess.Popen({words!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        f"print(one.pid, flush=True)\n{SLEEPS}\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    wait_for(lambda: len(running(tmp_path)) == 3)
    if way == "guardian terminated":
        os.kill(pid, signal.SIGTERM)
    else:
        starter.send_signal(signal.SIGKILL if way == "starter killed" else signal.SIGTERM)
    wait_for(lambda: not running(tmp_path))
    starter.kill()
    starter.wait()
    starter.stdout.close()
