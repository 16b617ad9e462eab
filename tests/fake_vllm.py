"""A stand-in for `vllm serve`: the part of its protocol that rollouts use, as vLLM 0.32 was seen to speak it, with
answers computed by transformers, one request at a time.

FAKE_VLLM may say in JSON what goes wrong: `ends` (before it answers), `dies_at` (at so many answers), `rejects`
(adapters), `waits` (seconds, before each answer), `off` (added to log-probabilities).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS: dict[str, Any] = json.loads(os.environ.get("FAKE_VLLM", "{}"))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model", type=Path)
    for name in ("served-model-name", "host", "dtype", "generation-config", "logprobs-mode", "uvicorn-log-level"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-num-seqs", "max-loras", "max-lora-rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("enable-lora", "enforce-eager", "disable-uvicorn-access-log"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    parser.add_argument("--tokenizer", type=Path)
    return parser.parse_args()


class Engine:
    def __init__(self, settings: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.torch, self.settings, self.lock = torch, settings, threading.Lock()
        dtype = getattr(torch, settings.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self.base = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.adapters: dict[str, dict[str, Any]] = {}
        self.answered = 0

    def load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            why = f"The lora adapter '{name}' has already been loaded."
            return _error(400, f"{why} If you want to load the adapter in place, set 'load_inplace' to True.")
        if not (folder / "adapter_config.json").exists():
            return _error(404, f"Loading lora {name} failed: No adapter found for <path>")
        if FAULTS.get("rejects"):
            return _error(500, "Call to add_lora method failed: the rank is too large")
        from safetensors.torch import load_file

        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > self.settings.max_lora_rank:
            largest = f"max_lora_rank ({self.settings.max_lora_rank})"
            return _error(500, f"Call to add_lora method failed: LoRA rank {config['r']} is greater than {largest}.")
        tensors, merged = load_file(folder / "adapter_model.safetensors"), dict(self.base)
        for key, down in tensors.items():
            if key.endswith(".lora_A.weight"):
                up = tensors[key.replace(".lora_A.", ".lora_B.")]
                of = key.removeprefix("base_model.model.").replace(".lora_A", "")
                merged[of] = self.base[of] + config["lora_alpha"] / config["r"] * (up @ down)
        self.adapters[name] = merged
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> tuple[int, Any]:
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        torch, prompt = self.torch, body["prompt"]
        if body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: base.")
        if len(prompt) + body["max_tokens"] > self.settings.max_model_len:
            return _error(400, f"This model's maximum context length is {self.settings.max_model_len} tokens.")
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        assert body["logprobs"] == 0
        self.model.load_state_dict(self.adapters[body["model"]])
        chance = torch.Generator().manual_seed(body.get("seed", 0))
        ids, logps, ended = list(prompt), [], None
        with torch.no_grad():
            while ended is None and len(logps) < body["max_tokens"]:
                logits = self.model(torch.tensor([ids])).logits[0, -1].double()
                each = torch.log_softmax(logits / (body["temperature"] or 1.0), -1)
                drawn = torch.multinomial(each.exp(), 1, generator=chance) if body["temperature"] else each.argmax()
                token = int(drawn)
                ids.append(token)
                logps.append(each[token].item() + FAULTS.get("off", 0.0))
                ended = token if token in body["stop_token_ids"] else None
        self.answered += 1
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": logps}, "token_ids": ids[len(prompt) :]}
        choice |= {"finish_reason": "length" if ended is None else "stop", "stop_reason": ended}
        return 200, {"object": "text_completion", "model": body["model"], "choices": [choice]}


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}


def main() -> None:
    settings = read_arguments()
    if FAULTS.get("ends"):
        sys.exit(f"(EngineCore pid=1) ERROR 01-01 [core.py:1] ValueError: {FAULTS['ends']}")
    engine, key = Engine(settings), os.environ["VLLM_API_KEY"]
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "RANK" not in os.environ

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200 if self.path == "/health" else 404, "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {key}":
                self._send(401, {"error": "Unauthorized"})
                return
            with engine.lock:
                time.sleep(FAULTS.get("waits", 0))
                if self.path == "/v1/load_lora_adapter":
                    said = engine.load(body["lora_name"], Path(body["lora_path"]))
                elif self.path == "/v1/unload_lora_adapter":
                    said = engine.unload(body["lora_name"])
                else:
                    assert self.path == "/v1/completions"
                    said = engine.answer(body)
                if engine.answered == FAULTS.get("dies_at"):
                    print("RuntimeError: Worker failed, the cache is full", file=sys.stderr, flush=True)
                    os._exit(1)
            self._send(*said)

        def _send(self, status: int, said: Any) -> None:
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer((settings.host, settings.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
