"""Many clients at once on `tunesmith serve` with a tiny model: are answers right, whoever else is answered, and for how
long does memory stay where it is?

    python benchmarks/serving.py [--seconds 300] [--clients 64]

Each client asks again and again: greedy chats of three models over one base (a run, another adapter, the base alone),
whole or streamed, held against transformers' `generate`; seeded ones, held against the first answer with the same
seed; JSON answers, held against their schema; embeddings; and streams that it leaves after the first piece. The
server is a process of its own, whose memory is looked at every second. At last some streams alone are left, and the
time until the cache is empty is taken. The result is benchmarks/results/serving.json; `--seconds` below 300 writes
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
from results import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MODELS = ("run", "second", "base")
QUESTIONS = 32
"""For each model."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
LEAVING = 16
SETTLED = 60.0
"""Seconds after which memory is compared."""


def question(number: int) -> tuple[str, int]:
    """Of varied lengths, with an answer of varied length."""
    return f"number {number} " + "and so on " * (number % 11), 4 + number * 7 % 60


def expected(folders: dict[str, Path]) -> dict[tuple[str, int], str]:
    """By transformers alone."""
    import torch

    from tunesmith.data.types import Message
    from tunesmith.run.open import open_model

    found = {}
    for name, folder in folders.items():
        opened = open_model(folder)
        ends = sorted(opened.encoder.end_ids)
        for number in range(QUESTIONS):
            text, most = question(number)
            ids = torch.tensor([opened.encoder.prompt([Message("user", text)])])
            options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
            with torch.inference_mode():
                made = opened.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found[name, number] = opened.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return found


class Clients:
    def __init__(self, url: str, right: dict[tuple[str, int], str], seconds: float, only: Sequence[str] = ()):
        self.right, self.until = right, time.monotonic() + seconds
        limits = httpx2.Limits(max_connections=1000)
        self.http = httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.drawn: dict[tuple[str, int], str] = {}
        self.vectors: dict[tuple[str, int], list[float]] = {}
        self.waits: list[float] = []
        kinds = {"whole": 40, "streamed": 25, "seeded": 12, "left": 12, "embeddings": 5}
        if importlib.util.find_spec("llguidance"):
            kinds["json"] = 6
        kinds = {kind: share for kind, share in kinds.items() if not only or kind in only}
        self.kinds, self.shares = list(kinds), list(kinds.values())

    async def run(self, client: int) -> None:
        chance = random.Random(client)
        while time.monotonic() < self.until:
            kind = chance.choices(self.kinds, self.shares)[0]
            began = time.monotonic()
            try:
                await getattr(self, kind)(chance.choice(MODELS), chance.randrange(QUESTIONS))
            except (httpx2.HTTPError, AssertionError, ValueError, KeyError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
            self.counts[kind] += 1
            self.waits.append(time.monotonic() - began)

    def _ask(self, model: str, number: int, **fields: Any) -> dict[str, Any]:
        text, most = question(number)
        ask = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0}
        return ask | fields

    async def _chat(self, ask: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(CHAT, json=ask)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    async def whole(self, model: str, number: int) -> None:
        choice = await self._chat(self._ask(model, number))
        assert choice["message"]["content"] == self.right[model, number], "another answer than transformers'"

    async def streamed(self, model: str, number: int) -> None:
        said = ""
        async with self.http.stream("POST", CHAT, json=self._ask(model, number, stream=True)) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert lines.pop() == "[DONE]", "a stream without an end"
        for line in lines:
            said += json.loads(line)["choices"][0]["delta"].get("content") or ""
        assert said == self.right[model, number], "another stream than transformers' answer"

    async def seeded(self, model: str, number: int) -> None:
        choice = await self._chat(self._ask(model, number, temperature=1.0, top_p=0.9, seed=number))
        said = choice["message"]["content"]
        assert self.drawn.setdefault((model, number), said) == said, "a seed gave two answers"

    async def left(self, model: str, number: int) -> None:
        ask = {"model": model, "prompt": question(number)[0], "max_tokens": 300, "temperature": 3, "stream": True}
        async with self.http.stream("POST", COMPLETIONS, json=ask) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            await anext(lines)
            await lines.aclose()

    async def json(self, model: str, number: int) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        ask = self._ask(model, number, temperature=2, max_tokens=150, response_format=form)
        choice = await self._chat(ask)
        if choice["finish_reason"] == "stop":
            made = json.loads(choice["message"]["content"])
            assert set(made) == {"name", "size"}, "another object than the schema's"
            assert len(made["name"]) <= 8, "too long a name"
            assert type(made["size"]) is int, "no integer"
            assert 0 <= made["size"] <= 99, "beyond the bounds"
        else:
            self.counts["json cut by its length"] += 1

    async def embeddings(self, model: str, number: int) -> None:
        answer = await self.http.post(EMBEDDINGS, json={"model": model, "input": question(number)[0]})
        assert answer.status_code == 200, answer.text
        vector = answer.json()["data"][0]["embedding"]
        assert self.vectors.setdefault((model, number), vector) == vector, "a text has two embeddings"

    async def metrics(self) -> dict[str, float]:
        text = (await self.http.get("/metrics")).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


async def watch(server: psutil.Process, clients: Clients, samples: list[tuple[float, int, float]]) -> None:
    began = time.monotonic()
    while time.monotonic() < clients.until:
        held = (await clients.metrics())["tunesmith_cache_tokens"]
        samples.append((time.monotonic() - began, server.memory_info().rss, held))
        await asyncio.sleep(1)


async def leave(clients: Clients) -> list[dict[str, float]]:
    """From when so many clients leave their streams until nothing of them is in the cache."""
    taken = []
    for _ in range(20):
        ask = {"model": "run", "prompt": "number", "max_tokens": 400, "temperature": 3, "stream": True}
        streams = [clients.http.stream("POST", COMPLETIONS, json=ask) for _ in range(LEAVING)]
        responses = await asyncio.gather(*(one.__aenter__() for one in streams))
        lines = [response.aiter_lines() for response in responses]
        await asyncio.gather(*(anext(one) for one in lines))
        held = (await clients.metrics())["tunesmith_cache_tokens"]
        began = time.monotonic()
        await asyncio.gather(*(one.aclose() for one in lines))
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in streams))
        while (await clients.metrics())["tunesmith_cache_tokens"] > 0:
            await asyncio.sleep(0.002)
        if held:  # else all of them had ended by themselves
            taken.append({"tokens": held, "ms": round(1e3 * (time.monotonic() - began), 1)})
    return taken[:5]


async def measure(url: str, server: psutil.Process, right: dict, chosen: argparse.Namespace) -> dict[str, Any]:
    count, seconds = chosen.clients, chosen.seconds
    clients = Clients(url, right, seconds, chosen.only)
    samples: list[tuple[float, int, float]] = []
    await asyncio.gather(*(clients.run(number) for number in range(count)), watch(server, clients, samples))
    taken = await leave(clients)
    last = await clients.metrics()
    await clients.http.aclose()
    settled = [rss for at, rss, _ in samples if at >= min(SETTLED, seconds / 2)]
    waits = sorted(clients.waits)
    proposed, accepted = (last[f"tunesmith_{kind}_tokens_total"] for kind in ("proposed", "accepted"))
    return {
        "clients": count, "seconds": seconds, "requests": dict(clients.counts), "wrong": len(clients.wrong),
        "first wrong": clients.wrong[:5], "generated_tokens": last["tunesmith_generated_tokens_total"],
        "cancelled": last["tunesmith_cancelled_total"], "failed": last["tunesmith_failed_total"],
        "proposed_tokens": proposed, "accepted_tokens": accepted,
        "median_seconds": waits[len(waits) // 2], "p99_seconds": waits[len(waits) * 99 // 100],
        "memory_mib": {"settled": settled[0] >> 20, "largest after": max(settled) >> 20, "last": settled[-1] >> 20},
        "memory_by_time_mib": [[round(at), rss >> 20] for at, rss, _ in samples[:: max(1, len(samples) // 20)]],
        "cache_tokens": {"largest": max(held for *_, held in samples), "limit": last["tunesmith_cache_tokens_limit"]},
        "cache_empty_after_leaving": taken,
    }  # fmt: skip


def main() -> None:
    from export.models import make_run
    from tiny_model import make_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[], help="kinds of requests, such as whole, json, left")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        base = make_tiny_model(Path(folder) / "base")
        run = make_run(Path(folder) / "first", base, steps=4)
        second = make_run(Path(folder) / "second", base, steps=4, seed=5, lora={"rank": 2, "targets": ["q_proj"]})
        right = expected({"run": run, "second": second, "base": base})
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "tunesmith", "serve", str(run), "--adapter", f"second={second}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with tempfile.TemporaryFile() as said:
            server = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=said, stderr=said)
            try:
                url = f"http://127.0.0.1:{port}"
                wait_for(url, server)
                numbers = asyncio.run(measure(url, psutil.Process(server.pid), right, chosen))
            finally:
                server.terminate()
                numbers_of_end = server.wait(60)
    print(json.dumps(numbers, indent=1))
    assert numbers_of_end == 0
    if chosen.seconds >= 300 and not chosen.only:
        write_result("serving", "Clients at once on `tunesmith serve`, a tiny model, CPU", numbers)
    assert not numbers["wrong"]


def wait_for(url: str, server: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main()
