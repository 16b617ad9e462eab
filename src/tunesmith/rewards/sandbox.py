"""Runs the program on its standard input within limits, as a script of its own; see `unit_tests.py`.

The first line of the input is a word, which is written out if the program comes to its end. What the program itself
writes goes nowhere.
"""

import ctypes
import os
import resource
import signal
import sys

NEW_USER, NEW_PID, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
LARGEST_FILE = 64 << 20


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    word, _, program = sys.stdin.buffer.read().partition(b"\n")
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    is_apart = _go_apart()
    child = os.fork()  # the first process of the new namespace: all others in it end when it does
    if child:
        _end_with(child, seconds)
    _limit(seconds, memory)
    if not is_apart:
        _close_network()
    code = 1
    try:
        exec(compile(program, "answer.py", "exec"), {"__name__": "__main__"})
        os.write(out, word)
        code = 0
    finally:
        os._exit(code)


def _go_apart() -> bool:
    """Without network, and with processes of its own; whether the kernel allows it."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    return unshare is not None and unshare(NEW_USER | NEW_PID | NEW_NETWORK) == 0


def _end_with(child: int, seconds: float) -> None:
    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    os.waitpid(child, 0)
    os._exit(0)


def _limit(seconds: float, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def _close_network() -> None:
    """Where there is no namespace for it, Python's own way to the network is shut."""
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise OSError("there is no network here")

    socket.socket = socket.create_connection = refuse  # type: ignore[assignment,misc]
    sys.modules["_socket"].socket = refuse  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
