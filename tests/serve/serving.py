"""A server in this process, on a port of its own, and a client that speaks plain HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tunesmith.serve.server import Options, Ready, make_server, prepare


class Served:
    def __init__(self, ready: Ready, port: int):
        self.ready, self.engine, self.port = ready, ready.engine, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def post(self, path: str, **fields: Any) -> httpx2.Response:
        return self.client.post(path, json=fields)

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        response = self.post("/v1/chat/completions", **{"model": "run", "messages": messages, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def wait_idle(self) -> None:
        until = time.monotonic() + 10
        while self.engine.running or self.engine.waiting:
            assert time.monotonic() < until
            time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(folder: Path, adapters: Mapping[str, Path] | None = None, **options: Any) -> Iterator[Served]:
    port = free_port()
    chosen = Options(port=port, **options)
    ready = prepare(folder, adapters or {}, chosen)
    server = make_server(ready, chosen)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until
        assert thread.is_alive()
        time.sleep(0.01)
    served = Served(ready, port)
    try:
        yield served
    finally:
        served.client.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
