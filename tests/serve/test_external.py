"""vLLM and SGLang as `tunesmith serve` starts them; a program that stands in for them says what it was given."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from serve.serving import free_port
from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.infer.vllm_server import VARIABLE
from tunesmith.model import vllm
from tunesmith.serve.external import (
    KEY_EVERYWHERE,
    VLLM_SIDE,
    Command,
    Options,
    engine_command,
    find_engine,
    run_engine,
)

STAND_IN = f"""#!{sys.executable}
import http.server, json, os, signal, sys
names = ("VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
given = {{"words": sys.argv[1:], "environment": {{name: os.environ.get(name) for name in names}}}}
open(os.environ["SEEN"], "w").write(json.dumps(given))
if os.environ.get("FAILS"):
    sys.exit(3)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
VLLM = {
    "--served-model-name", "--enable-lora", "--max-loras", "--max-lora-rank", "--lora-modules", "--tokenizer",
    "--generation-config", "--host", "--port", "--max-num-seqs", "--max-model-len", "--tensor-parallel-size",
    "--speculative-config", "--middleware",
}  # fmt: skip
"""Options that vLLM 0.32 knows."""
SGLANG = {
    "--model-path", "--served-model-name", "--host", "--port", "--max-running-requests", "--context-length",
    "--tp-size", "--api-key",
}  # fmt: skip
"""Options in the documentation of SGLang 0.5, as read in November 2026."""


def after(words: list[str], option: str) -> list[str]:
    """What follows an option, up to the next one."""
    rest = words[words.index(option) + 1 :]
    ends = [number for number, word in enumerate(rest) if word.startswith("--")]
    return rest[: ends[0]] if ends else rest


def options_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_vllm_gets_the_base_its_adapters_and_how_the_run_was_asked(trained, tiny_model):
    first, second = trained
    options = Options(api_key="right-key-1", length=512, batch=8, draft="small", loads_adapters=True)
    command = engine_command("vllm", first, {"second": second}, options, gpus=2)
    words = command.words
    assert words[:3] == ["vllm", "serve", str(tiny_model)]
    assert options_of(words) == VLLM
    assert after(words, "--lora-modules") == [f"run={first}/adapter", f"second={second}/adapter"]
    assert after(words, "--max-loras") == ["2"]
    assert int(after(words, "--max-lora-rank")[0]) >= 4
    assert int(after(words, "--max-lora-rank")[0]) in vllm.RANKS
    for option in ("--tokenizer", "--generation-config"):
        (side,) = after(words, option)
        assert (Path(side) / "generation_config.json").exists()
        assert (Path(side) / "tokenizer.json").exists()
    assert json.loads(after(words, "--speculative-config")[0])["model"] == "small"
    assert after(words, "--tensor-parallel-size") == ["2"]
    assert "right-key-1" not in words, "others on the machine see the words of a command"
    path = command.environment["PYTHONPATH"].split(os.pathsep)[0]
    assert [file.name for file in Path(path).glob("*.py")] == [after(words, "--middleware")[0].split(".")[0] + ".py"]
    assert command.environment.items() >= {
        ("VLLM_API_KEY", "right-key-1"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),
    }
    assert command.names == ("run", "second", "base")


def test_without_a_gpu_vllm_is_told_the_precision_of_the_run_and_how_much_memory_to_take(trained, tiny_model):
    """By itself it rounds weights in fp32 to bf16, and wants nine tenths of all memory for its cache."""
    words = engine_command("vllm", trained[0], {}, Options(), gpus=0).words
    assert after(words, "--dtype") == ["float32"]
    assert 0 < int(after(words, "--kv-cache-memory-bytes")[0]) < psutil.virtual_memory().total / 2
    assert after(engine_command("vllm", tiny_model, {}, Options(), gpus=0).words, "--dtype") == ["float32"]
    words = engine_command("vllm", trained[0], {}, Options(), gpus=1).words
    assert not {"--dtype", "--kv-cache-memory-bytes"} & set(words), "its adapters on a GPU are in 16 bits"


def test_adapters_that_are_asked_in_other_ways_are_not_served_together_by_vllm(trained, tmp_path):
    other = shutil.copytree(trained[1], tmp_path / "other")
    template = other / "side_files" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "model"))
    with pytest.raises(UserError, match=r"other is asked in another way than .*run \(chat_template.jinja differ\)"):
        engine_command("vllm", trained[0], {"other": other}, Options())


def test_the_template_is_asked_by_vllm_as_in_training(trained, monkeypatch):
    """Such as for answers without reasoning, where the template's own way would begin one."""
    monkeypatch.setattr(Encoder, "mode_of", lambda self, reasons: {"enable_thinking": reasons})
    words = engine_command("vllm", trained[0], {}, Options()).words
    assert json.loads(after(words, "--default-chat-template-kwargs")[0]) == {"enable_thinking": False}


def test_a_model_by_itself_is_served_by_either(tiny_model):
    for engine, known in (("vllm", VLLM), ("sglang", SGLANG)):
        words = engine_command(engine, tiny_model, {}, Options(length=512)).words
        assert str(tiny_model) in words
        assert after(words, "--served-model-name") == [tiny_model.name]
        assert options_of(words) < known
    assert "--api-key" in engine_command("sglang", tiny_model, {}, Options(api_key="right-key-1")).words


def test_what_an_engine_would_leave_out_is_refused(trained, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="SGLang would serve with its base's stop tokens"):
        engine_command("sglang", trained[0], {}, Options())
    monkeypatch.setattr(vllm, "refused", lambda *_: ["vLLM rejects DoRA: merge it."])
    with pytest.raises(UserError, match="rejects DoRA"):
        engine_command("vllm", trained[0], {}, Options())


def test_an_engine_is_found_by_its_command_and_auto_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_engine("auto", has_gpu=True) is None
    with pytest.raises(UserError, match="not installed"):
        find_engine("vllm", has_gpu=True)
    with pytest.raises(UserError, match="can be auto, own, vllm or sglang"):
        find_engine("other", has_gpu=True)
    (tmp_path / "sglang").write_text("#!/bin/sh\n")
    (tmp_path / "sglang").chmod(0o755)
    assert find_engine("auto", has_gpu=True) == "sglang"
    assert find_engine("auto", has_gpu=False) is None
    assert find_engine("own", has_gpu=True) is None


def test_a_port_where_somebody_listens_is_refused(trained):
    """What listens there would be taken for the engine."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        options = Options(port=there.getsockname()[1])
        with pytest.raises(UserError, match="another server listens there already"):
            run_engine("vllm", Command(["vllm", "serve"]), options, lambda: None)


def test_what_does_not_end_when_it_is_asked_to_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("tunesmith.serve.external.DRAIN_SECONDS", 0.3)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    command = Command([sys.executable, "-c", stubborn])
    assert run_engine("sglang", command, Options(port=free_port()), lambda: None) == 128 + signal.SIGKILL


def test_the_key_is_asked_for_on_every_path_of_vllm(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right-key-1")
    monkeypatch.syspath_prepend(str(VLLM_SIDE))
    module, _, name = KEY_EVERYWHERE.partition(".")
    answered: list[int] = []

    async def app(scope, receive, send):
        answered.append(200)

    async def send(message):
        answered.extend([message["status"]] if "status" in message else [])

    guard = getattr(importlib.import_module(module), name)(app)
    right, wrong = [(b"authorization", b"Bearer right-key-1")], [(b"authorization", b"Bearer other")]
    asked = [
        ("/invocations", right),
        ("/invocations", wrong),
        ("/v1/models", []),
        ("/health", []),
        ("/tokenize", wrong),
    ]
    for path, headers in asked:
        asyncio.run(guard({"type": "http", "method": "POST", "path": path, "headers": headers}, None, send))
    assert answered == [200, 401, 401, 200, 401]


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_started_watched_and_ended(trained, tmp_path, fails):
    (tmp_path / "vllm").write_text(STAND_IN)
    (tmp_path / "vllm").chmod(0o755)
    environment = os.environ | {
        VARIABLE: str(tmp_path / "vllm"),
        "SEEN": str(tmp_path / "seen"),
        "TUNESMITH_API_KEY": "right-key-1",
    }
    environment |= {"FAILS": "1"} if fails else {}
    command = [sys.executable, "-m", "tunesmith", "serve", str(trained[0]), "--engine", "vllm", "--port"]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen([*command, str(free_port())], env=environment, stdout=said, stderr=said)
        until = time.monotonic() + 240  # it takes 16 s of CPU time, and a minute on a machine with ten other jobs
        while "Serving run, base" not in (tmp_path / "said").read_text() and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    text = (tmp_path / "said").read_text()
    assert "right-key-1" not in text
    if fails:
        assert code == 1
        assert "vLLM ended with code 3; it says why above" in text
        return
    assert code == 0, text
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["words"][0] == "serve"
    assert seen["environment"]["VLLM_API_KEY"] == "right-key-1"
