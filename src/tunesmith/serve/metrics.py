"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

import threading
from collections import Counter

from tunesmith.serve.engine import Engine


class Metrics:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._requests: Counter[tuple[str, int]] = Counter()
        self._first_seconds, self._first_count = 0.0, 0
        self._lock = threading.Lock()

    def count_request(self, path: str, status: int) -> None:
        with self._lock:
            self._requests[path, status] += 1

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_seconds += seconds
            self._first_count += 1

    def text(self) -> str:
        engine, stats = self._engine, self._engine.stats
        with self._lock:
            requests = [
                f'tunesmith_requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._requests.items())
            ]
            first = [
                f"tunesmith_first_token_seconds_sum {self._first_seconds:.6f}",
                f"tunesmith_first_token_seconds_count {self._first_count}",
            ]
        counters = {
            "prompt_tokens_total": ("Tokens of prompts that were read", stats.prompt_tokens),
            "generated_tokens_total": ("Tokens that were generated", stats.generated_tokens),
            "steps_total": ("Decoding steps", stats.steps),
            "proposed_tokens_total": ("Tokens that speculative decoding proposed", stats.proposed_tokens),
            "accepted_tokens_total": ("Of these, tokens that the model chose", stats.accepted_tokens),
            "cancelled_total": ("Requests that were cancelled or took too long", stats.cancelled),
            "failed_total": ("Requests on which the model failed", stats.failed),
        }
        gauges = {
            "running": ("Requests that are decoded", engine.running),
            "waiting": ("Requests in the queue", engine.waiting),
            "cache_tokens": ("Tokens in the key-value cache, padding included", engine.cached_tokens),
            "cache_tokens_limit": ("Tokens that it may hold", engine.limits.cache_tokens),
        }
        lines = [
            "# HELP tunesmith_requests_total Requests by path and status",
            "# TYPE tunesmith_requests_total counter",
        ]
        lines += requests
        lines += ["# HELP tunesmith_first_token_seconds From a request to its first token"]
        lines += ["# TYPE tunesmith_first_token_seconds summary", *first]
        for kind, named in (("counter", counters), ("gauge", gauges)):
            for name, (said, value) in named.items():
                lines += [
                    f"# HELP tunesmith_{name} {said}",
                    f"# TYPE tunesmith_{name} {kind}",
                    f"tunesmith_{name} {value}",
                ]
        return "\n".join(lines) + "\n"
