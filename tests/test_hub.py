"""A hub that does not answer is said to be so within five seconds, whatever is asked of it and however it fails."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session

from tunesmith import hub
from tunesmith.config.schema import Dataset, Run
from tunesmith.data import source
from tunesmith.errors import UserError
from tunesmith.model.load import load_config, load_tokenizer
from tunesmith.plan.models import check_there, read_facts

MODEL = "nobody/nothing-of-this-name"
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Point the hub's library at an endpoint; all that it keeps is elsewhere, and empty."""

    def at(endpoint: str, **environment: str) -> None:
        for name in ("HF_HUB_OFFLINE", *PROXIES):
            monkeypatch.setenv(name, "")  # so that it is as before at the end, whoever changes it
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        if "datasets" in sys.modules:
            monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        forget()

    def forget() -> None:
        for thread in threading.enumerate():
            if thread.name == "hub":  # its socket is not to be closed while it reads
                thread.join()
        hub.why_unreachable.cache_clear()
        close_session()

    yield at
    forget()


@contextlib.contextmanager
def listener(answer: bytes | None = None) -> Iterator[str]:
    """A port that takes every connection and never answers, or always the same."""
    held = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                held.append(connection)
                if answer is not None:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread where it waits
        thread.join()


def refused_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def everything() -> Iterator[str]:
    """What a user reads who asks the hub for a plan, a config, a tokenizer and a data set."""
    run = Run(model=MODEL, data="x")
    for question in (
        lambda: check_there(MODEL),
        lambda: read_facts(MODEL),
        lambda: load_config(run),
        lambda: load_tokenizer(run),
        lambda: next(source.read(Dataset(hub=MODEL))),
    ):
        with pytest.raises(UserError) as error:
            question()
        yield str(error.value)


def seconds_of_everything() -> float:
    import datasets  # noqa: F401 - imported before the clock runs
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    began = time.monotonic()
    for sentence in everything():
        assert "the hub cannot be reached (http" in sentence, sentence
        assert "\n" not in sentence
    return time.monotonic() - began


def test_a_hub_that_takes_connections_and_never_answers_is_named_within_five_seconds(ask, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 1.0)
    with listener() as endpoint:
        ask(endpoint)
        assert seconds_of_everything() < 5 - 3  # of the four it may take in earnest
        assert "no answer within 1 seconds" in hub.unreachable()


def test_a_port_that_refuses_is_named_at_once(ask):
    ask(refused_port())
    assert seconds_of_everything() < 2
    assert "refused" in hub.unreachable()


def test_a_proxy_that_never_answers_is_mentioned(ask, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.5)
    with listener() as proxy:
        ask("http://hub.invalid", HTTP_PROXY=proxy, ALL_PROXY=proxy)
        assert "no answer within" in hub.unreachable()
        assert "ALL_PROXY is set" in hub.unreachable()


def test_a_gateway_that_answers_for_a_hub_that_is_away_is_no_hub(ask):
    with listener(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n") as endpoint:
        ask(endpoint)
        assert "status 502" in hub.unreachable()


def test_a_name_server_that_keeps_one_waiting_is_not_waited_for(ask, monkeypatch):
    monkeypatch.setattr(hub, "SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1.5) or [])
    ask("http://hub.invalid")
    began = time.monotonic()
    assert not hub.is_reachable()
    assert time.monotonic() - began < 1.4


def test_a_name_that_does_not_exist_is_no_hub(ask):
    ask("http://hub.invalid")
    assert not hub.is_reachable()


@pytest.mark.parametrize("status", [b"200 OK", b"302 Found\r\nLocation: /x", b"401 Unauthorized", b"404 Not Found"])
def test_a_hub_that_answers_at_all_is_there(ask, status):
    with listener(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n") as endpoint:
        ask(endpoint)
        assert hub.is_reachable()


def test_a_hub_that_is_switched_off_is_not_asked(ask):
    ask("http://hub.invalid", HF_HUB_OFFLINE="1")
    assert hub.unreachable() == "the hub cannot be reached (HF_HUB_OFFLINE is set)"


@pytest.mark.parametrize("verb", ["plan", "check", "train", "profile"])
def test_verbs_ask_the_hub_before_they_import_what_takes_seconds(tmp_path, verb):
    (tmp_path / "run.yaml").write_text(f"model: {MODEL}\ndata: run.yaml\n")
    code = (
        "import sys\nfrom tunesmith.cli.main import main\n"
        f"try:\n    main(['{verb}'])\nfinally:\n    print('torch' in sys.modules)"
    )
    environment = {**os.environ, "HF_ENDPOINT": refused_port(), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "the hub cannot be reached (http://127.0.0.1" in ended.stderr
    assert ended.stdout.endswith("False\n")
