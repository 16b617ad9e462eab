"""vLLM and SGLang as `tunesmith serve` starts them; a program that stands in for them says what it was given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.serving import free_port
from tunesmith.errors import UserError
from tunesmith.model import vllm
from tunesmith.serve.external import Options, engine_command, find_engine

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
    "--speculative-config",
}  # fmt: skip
SGLANG = {
    "--model-path", "--served-model-name", "--host", "--port", "--max-running-requests", "--context-length",
    "--tp-size", "--api-key",
}  # fmt: skip
"""Options in the documentation of vLLM 0.2x and SGLang 0.5, as read in November 2026."""


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
    assert command.environment == {"VLLM_API_KEY": "right-key-1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    assert command.names == ("run", "second", "base")


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
    monkeypatch.setattr(vllm, "vllm_notes", lambda *_: ["vLLM rejects DoRA: merge it."])
    with pytest.raises(UserError, match="rejects DoRA"):
        engine_command("vllm", trained[0], {}, Options())


def test_an_engine_is_found_by_its_command_and_auto_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
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


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_started_watched_and_ended(trained, tmp_path, fails):
    (tmp_path / "vllm").write_text(STAND_IN)
    (tmp_path / "vllm").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SEEN": str(tmp_path / "seen"), "TUNESMITH_API_KEY": "right-key-1"}
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
        assert "vLLM ended with code 3" in text
        return
    assert code == 0, text
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["words"][0] == "serve"
    assert seen["environment"]["VLLM_API_KEY"] == "right-key-1"
