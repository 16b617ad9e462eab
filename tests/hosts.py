"""Two hosts on one machine: network namespaces with a name and an address each, and a link between them that can be
slowed. Needs root; gone when the `with` block ends."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAMES = ("tunesmith-a", "tunesmith-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "link0"
PORT = 7700
REACH = "ip netns exec {host} unshare --uts sh -c 'hostname {host} && exec \"$@\"' sh"
"""Runs a command on a host, under its name; for `tunesmith launch hosts --reach`."""


@dataclass(frozen=True)
class Hosts:
    names: tuple[str, str] = NAMES
    reach: str = REACH

    def slow(self, megabits: float) -> None:
        """Let the link carry so many megabits a second each way."""
        rate = ["root", "tbf", "rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "100ms"]
        for name in self.names:
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", LINK, *rate)

    def sent(self) -> int:
        """Bytes that the first host has sent over the link so far."""
        shown = _run("ip", "-n", self.names[0], "-s", "-j", "link", "show", LINK)
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    def bandwidth(self, seconds: float = 1.5) -> float:
        """Bytes a second that go through one connection from the first host to the second."""
        listener = self._start(1, "listen")
        sender = self._start(0, "send", str(seconds))
        out, _ = listener.communicate(timeout=60)
        assert sender.wait(60) == 0
        return float(out)

    def _start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.names[host], sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if missing := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
        return f"{missing[0]} is not installed"
    try:
        _run("ip", "netns", "add", f"{NAMES[0]}-try")
        _run("ip", "netns", "del", f"{NAMES[0]}-try")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"
    return None


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    _remove()
    try:
        for name in NAMES:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / name  # what a namespace sees in /etc
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(" ".join(pair) for pair in zip(ADDRESSES, NAMES, strict=True))]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        _run("ip", "link", "add", LINK, "netns", NAMES[0], "type", "veth", "peer", "name", LINK, "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
            _run("ip", "-n", name, "link", "set", LINK, "up")
        yield Hosts()
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        with suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "del", name)  # the link goes with it
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _listen() -> None:
    with socket.create_server((ADDRESSES[1], PORT)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
        connection.recv(1 << 16)
        began = last = time.monotonic()
        received = 0
        while data := connection.recv(1 << 16):
            received += len(data)
            last = time.monotonic()
        print(received / (last - began))


def _send(seconds: float) -> None:
    give_up = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((ADDRESSES[1], PORT))
            break
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
    end = time.monotonic() + seconds
    with connection:
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 16))


if __name__ == "__main__":
    _listen() if sys.argv[1] == "listen" else _send(float(sys.argv[2]))
