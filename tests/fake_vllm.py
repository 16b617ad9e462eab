"""A stand-in for `vllm serve`: the part of its protocol that rollouts use, as vLLM 0.32 was seen to speak it, with
answers by a tiny Llama.

FAKE_VLLM may say in JSON what goes wrong: `ends` (before it answers), `dies_at` (at so many answers), `rejects`
(adapters), `off` (added to log-probabilities).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

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
    """A Llama in numpy, without a cache: it starts in a moment. What has been asked meanwhile is answered together."""

    def __init__(self, settings: argparse.Namespace):
        self.settings, self.answered = settings, 0
        self.config = json.loads((settings.model / "config.json").read_text())
        self.base = load_file(settings.model / "model.safetensors")
        self.adapters: dict[str, dict[str, np.ndarray]] = {}
        self.asked: queue.Queue[tuple[dict[str, Any], queue.Queue[Any]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            why = f"The lora adapter '{name}' has already been loaded."
            return _error(400, f"{why} If you want to load the adapter in place, set 'load_inplace' to True.")
        if not (folder / "adapter_config.json").exists():
            return _error(404, f"Loading lora {name} failed: No adapter found for <path>")
        config = json.loads((folder / "adapter_config.json").read_text())
        if FAULTS.get("rejects") or config["r"] > self.settings.max_lora_rank:
            return _error(500, f"LoRA rank {config['r']} is greater than max_lora_rank {self.settings.max_lora_rank}.")
        tensors, merged = load_file(folder / "adapter_model.safetensors"), dict(self.base)
        for key, down in tensors.items():
            if key.endswith(".lora_A.weight"):
                up = tensors[key.replace(".lora_A.", ".lora_B.")]
                of = key.removeprefix("base_model.model.").replace(".lora_A", "")
                merged[of] = self.base[of] + np.float32(config["lora_alpha"] / config["r"]) * (up @ down)
        self.adapters[name] = merged
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> tuple[int, Any]:
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: base.")
        if len(body["prompt"]) + body["max_tokens"] > self.settings.max_model_len:
            return _error(400, f"This model's maximum context length is {self.settings.max_model_len} tokens.")
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        assert body["logprobs"] == 0
        answer: queue.Queue[Any] = queue.Queue()
        self.asked.put((body, answer))
        return answer.get()

    def _work(self) -> None:
        while True:
            some = [self.asked.get()]
            time.sleep(0.02)
            while not self.asked.empty():
                some.append(self.asked.get())
            for (_, answer), said in zip(some, self._answers([body for body, _ in some]), strict=True):
                self.answered += 1
                if self.answered == FAULTS.get("dies_at"):
                    print("RuntimeError: Worker failed, the cache is full", file=sys.stderr, flush=True)
                    os._exit(1)
                answer.put((200, said))

    def _answers(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"ids": list(body["prompt"]), "logps": [], "ended": None, "draws": np.random.default_rng(body.get("seed"))}
            for body in bodies
        ]
        while going := [n for n, row in enumerate(rows) if self._goes_on(row, bodies[n])]:
            logits = forward(self.adapters[bodies[0]["model"]], self.config, [rows[n]["ids"] for n in going])
            for n, each in zip(going, logits.astype(np.float64), strict=True):
                row, body = rows[n], bodies[n]
                each = each / (body["temperature"] or 1.0)
                logps = each - each.max() - np.log(np.exp(each - each.max()).sum())
                reached = np.exp(logps).cumsum()
                token = int(np.searchsorted(reached, row["draws"].random() * reached[-1], side="right"))
                token = token if body["temperature"] else int(logps.argmax())
                row["ids"].append(token)
                row["logps"].append(float(logps[token]) + FAULTS.get("off", 0.0))
                row["ended"] = token if token in body["stop_token_ids"] else None
        return [self._said(body, row) for body, row in zip(bodies, rows, strict=True)]

    def _goes_on(self, row: dict[str, Any], body: dict[str, Any]) -> bool:
        return row["ended"] is None and len(row["logps"]) < body["max_tokens"]

    def _said(self, body: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        ids = row["ids"][len(body["prompt"]) :]
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": row["logps"]}, "token_ids": ids}
        choice |= {"finish_reason": "length" if row["ended"] is None else "stop", "stop_reason": row["ended"]}
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}


def forward(weights: dict[str, np.ndarray], config: dict[str, Any], rows: list[list[int]]) -> np.ndarray:
    """The logits after each row; rows are filled up behind their ends, which none of their tokens sees."""
    width, size, heads = config["head_dim"], max(map(len, rows)), config["num_attention_heads"]
    x = weights["model.embed_tokens.weight"][np.array([row + [0] * (size - len(row)) for row in rows])]
    angles = np.arange(size)[:, None] / config["rope_parameters"]["rope_theta"] ** (np.arange(0, width, 2) / width)
    cos, sin = (np.tile(of(angles), 2).astype(np.float32) for of in (np.cos, np.sin))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def split(x: np.ndarray) -> np.ndarray:
        x = x.reshape(*x.shape[:2], -1, width).transpose(0, 2, 1, 3)
        return x.repeat(heads // x.shape[1], 1)

    def rotated(x: np.ndarray) -> np.ndarray:
        return x * cos + np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        normed = norm(x, f"{at}.input_layernorm")
        q, k, v = (split(normed @ weights[f"{at}.self_attn.{one}_proj.weight"].T) for one in "qkv")
        scores = rotated(q) @ rotated(k).transpose(0, 1, 3, 2) / np.float32(np.sqrt(width))
        scores = np.where(np.tri(size, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        seen = (shares / shares.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        x = x + seen @ weights[f"{at}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{at}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ weights[f"{at}.mlp.down_proj.weight"].T
    last = x[np.arange(len(rows)), [len(row) - 1 for row in rows]]
    return norm(last, "model.norm") @ weights["model.embed_tokens.weight"].T


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}


def main() -> None:
    settings = read_arguments()
    if FAULTS.get("ends"):
        sys.exit(f"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] ValueError: {FAULTS['ends']}")
    engine, key = Engine(settings), os.environ["VLLM_API_KEY"]
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "RANK" not in os.environ

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            said = {"/health": "", "/version": {"version": "0.32.0"}}
            self._send(200 if self.path in said else 404, said.get(self.path, ""))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {key}":
                self._send(401, {"error": "Unauthorized"})
                return
            if self.path == "/v1/load_lora_adapter":
                said = engine.load(body["lora_name"], Path(body["lora_path"]))
            elif self.path == "/v1/unload_lora_adapter":
                said = engine.unload(body["lora_name"])
            else:
                assert self.path == "/v1/completions"
                said = engine.answer(body)
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
