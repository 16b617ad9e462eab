"""The single-host launcher: starts a run's ranks on this machine, watches them, and ends well.

Each rank is a process of its own with torchrun's environment, so that a rank does not know who started it. The first
one that fails ends the run: the others, which would wait for it, are killed within seconds, and what the first had to
say is what the user sees. Ctrl-C and SIGTERM are passed on to all ranks, which save and stop together, in the time they
need. Why this is not torch's elastic agent: docs/decisions/009-launcher.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
STOPPED = (130, 143)
"""Exit codes of ranks that saved and stopped, by Ctrl-C and SIGTERM."""
USER_ERROR = 1
"""Exit code of ranks that have said in a sentence what the user can mend."""
OUR_FAULT = 70
COLLECT_SECONDS = 1.0
"""After a first failure: time for the others to notice, so that the earliest can be told from its consequences."""


@dataclass(frozen=True)
class Failure:
    """How the rank that failed first ended."""

    rank: int
    code: int
    """Exit code, or minus the signal that killed it."""
    message: str
    """One sentence where the rank could still say something, else empty."""
    traceback: str

    @property
    def is_final(self) -> bool:
        """Whether the ranks would end the same way if they were started again."""
        return self.code in STOPPED or (self.code == USER_ERROR and bool(self.message))

    @property
    def exit_code(self) -> int:
        """With which the launcher ends."""
        return self.code if self.code > 0 else OUR_FAULT

    def words(self, ranks: int) -> str:
        how = f"it was ended by signal {-self.code}" if self.code < 0 else f"its exit code is {self.code}"
        return f"rank {self.rank} of {ranks} failed first: {self.message or how}"

    def report(self, ranks: int, stacks: Sequence[Path] = ()) -> Iterator[str]:
        """What the user is told. `stacks`: what ranks that hung have written about it."""
        if self.traceback:
            yield f"rank {self.rank} of {ranks}:\n{self.traceback}"
        if self.code == USER_ERROR and not self.message and stacks:
            yield (
                "error: a step took so long that the ranks must have hung; what each of them was doing is in "
                f"{stacks[0].parent}"
            )
        elif self.code not in STOPPED:
            yield f"error: {self.message if self.code == USER_ERROR else self.words(ranks)}"


def run_tunesmith(
    arguments: Sequence[str], ranks: int, *, restarts: int, warn: Callable[[str], None], once: Sequence[str] = ()
) -> Failure | None:
    """Run `tunesmith` as so many ranks; when they fail start all again, at most `restarts` times. `once`: further
    arguments the first time. None when all ended well in the end."""
    command = [sys.executable, "-m", "tunesmith", *arguments]
    failure = run_ranks([*command, *once], ranks)
    for restart in range(restarts):
        if failure is None or failure.is_final:
            break
        number = f"{restart + 1} of {restarts}"
        warn(f"{failure.words(ranks)}; all ranks are started again from the last checkpoint ({number})")
        failure = run_ranks(command, ranks)
    return failure


def run_ranks(command: Sequence[str], ranks: int) -> Failure | None:
    """Run `command` as so many ranks until all have ended; None when all ended well.

    Ranks that stop because they were asked to end with the signal's usual code, which fails nobody else.
    """
    with tempfile.TemporaryDirectory(prefix="tunesmith-ranks-") as name:
        folder = Path(name)
        processes = _start(command, ranks, folder)
        with _passing_signals_on(processes):
            try:
                while None in (codes := [process.poll() for process in processes]):
                    if any(code not in (None, 0, *STOPPED) for code in codes):
                        break
                    time.sleep(POLL_SECONDS)
                return _first_failure(processes, folder)
            finally:
                _kill(processes)


def write_failure(message: str, traceback: str) -> bool:
    """In a rank: leave word of how it failed where its launcher looks for it; False where nobody does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun's way: it prints this file, too
    if not path:
        return False
    content = {"message": message, "extraInfo": {"py_callstack": traceback, "timestamp": str(int(time.time()))}}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": content, "time": time.time()}), encoding="utf-8")
    except OSError:
        return False
    return True


def _start(command: Sequence[str], ranks: int, folder: Path) -> list[subprocess.Popen]:
    port = free_port()
    return [
        subprocess.Popen(
            list(command),
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json"),
            },
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on once
        )
        for rank in range(ranks)
    ]


def _first_failure(processes: list[subprocess.Popen], folder: Path) -> Failure | None:
    """Of those that failed, the cause: one that was killed from outside, else the earliest to say something."""
    if not any(process.returncode for process in processes):
        return None
    give_up = time.monotonic() + COLLECT_SECONDS
    while None in [process.poll() for process in processes] and time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)
    failed = []
    for rank, process in enumerate(processes):
        if process.returncode:
            said = _said(folder / f"{rank}.json")
            is_silent_death = process.returncode < 0 and said is None
            failed.append((not is_silent_death, said[0] if said else 0.0, rank, said))
    _, _, rank, said = min(failed, key=lambda one: one[:3])
    return Failure(rank, processes[rank].returncode, said[1] if said else "", said[2] if said else "")


def _said(path: Path) -> tuple[float, str, str] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["time"], content["message"]["message"], content["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def _passing_signals_on(processes: list[subprocess.Popen]) -> Iterator[None]:
    def handle(number: int, _frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
