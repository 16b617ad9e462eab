"""`tunesmith serve --engine vllm` with vLLM itself, where its command is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from export.models import make_model, make_run
from serve.serving import free_port, serving
from vllm_here import needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm]
QUESTIONS = ("Who are you?", "What is 12345 + 678?")
KEY = "right-key-1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two over one base, with heads of a size that vLLM's attention on a CPU has."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder / "model", "llama", head_dim=32)
    other = {"seed": 5, "lora": {"rank": 24, "targets": ["q_proj", "down_proj"]}}
    return make_run(folder / "first", model, steps=4), make_run(folder / "second", model, steps=4, **other)


def asked(client: httpx2.Client, name: str, question: str) -> tuple[str, str, int]:
    """A greedy answer, why it ended, and the number of its prompt's tokens."""
    body = {"model": name, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    said, usage = response.json()["choices"][0], response.json()["usage"]
    text = said["message"]["content"].rstrip("\ufffd")  # vLLM leaves out a character whose bytes have not all come
    return text, said["finish_reason"], usage["prompt_tokens"]


def test_vllm_answers_as_tunesmith_does_for_the_base_and_each_adapter(runs, tmp_path):
    first, second = runs
    with serving(first, {"second": second}) as served:
        names = ("run", "second", "base")
        own = {(name, question): asked(served.client, name, question) for name in names for question in QUESTIONS}
    assert len(set(own.values())) == len(own), "each adapter changes the answer"
    port = free_port()
    command = [sys.executable, "-m", "tunesmith", "serve", str(first), "--adapter", f"second={second}"]
    command += ["--engine", "vllm", "--port", str(port), "--max-length", "256", "--allow-adapter-loading"]
    with (tmp_path / "said").open("w") as said:
        environment = os.environ | {"TUNESMITH_API_KEY": KEY}
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            until = time.monotonic() + 900
            while "Serving run, second, base" not in (text := (tmp_path / "said").read_text()):
                assert process.poll() is None, text[-3000:]
                assert time.monotonic() < until
                time.sleep(0.5)
            address, key = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
            with httpx2.Client(base_url=address, timeout=120, trust_env=False) as stranger:
                assert stranger.get("/v1/models").status_code == 401
                assert stranger.post("/invocations", json={"model": "run", "prompt": "a"}).status_code == 401
                assert stranger.get("/health").status_code == 200
            with httpx2.Client(base_url=address, timeout=120, trust_env=False, headers=key) as client:
                listed = client.get("/v1/models").json()["data"]
                assert {one["id"] for one in listed} == set(names)
                assert listed[0]["max_model_len"] == 256
                found = {one: asked(client, *one) for one in own}
                loaded = client.post(
                    "/v1/load_lora_adapter", json={"lora_name": "third", "lora_path": str(second / "adapter")}
                )
                assert loaded.status_code == 200, loaded.text
                third = [asked(client, "third", question) for question in QUESTIONS]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert found == own
    assert third == [own["second", question] for question in QUESTIONS]
    assert KEY not in (tmp_path / "said").read_text()


def test_a_start_that_fails_is_told_of(runs, tmp_path):
    command = [sys.executable, "-m", "tunesmith", "serve", str(runs[0]), "--engine", "vllm", "--port"]
    command += [str(free_port()), "--max-length", "100000"]  # more than the model has
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 1
    assert "vLLM ended with code 1; it says why above." in ended.stderr
    assert "max_model_len" in ended.stdout + ended.stderr
