"""The multi-host runner: one command for each host, at the same time. Their words are told apart by the host's name,
and they end together when one fails."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
"""For those that were asked to end."""


def run_on_hosts(commands: Mapping[str, Sequence[str]], say: Callable[[str], None]) -> int:
    """Run until all have ended; 0, or the code of the first that failed. Ctrl-C and SIGTERM end all of them."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = {
        name: subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **quiet)
        for name, command in commands.items()
    }
    readers = [threading.Thread(target=_tell, args=(name, process, say)) for name, process in processes.items()]
    for reader in readers:
        reader.start()
    asked: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    failed = 0
    try:
        while running := [process for process in processes.values() if process.poll() is None]:
            failed = failed or next((one.returncode for one in processes.values() if one.returncode), 0)
            if failed or asked:
                _end(running)
                break
            threading.Event().wait(POLL_SECONDS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes.values():
            process.kill()
            process.wait()
        for reader in readers:
            reader.join(timeout=1.0)
    failed = failed or next((one.returncode for one in processes.values() if one.returncode), 0)
    if asked:
        return 128 + asked[0]
    return 128 - failed if failed < 0 else failed


def _tell(name: str, process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout
    for line in process.stdout:
        say(f"{name}: {line.rstrip()}")


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
