"""Answers by vLLM, for a run that learns from them: what is said to its server (`infer.vllm_server`) by each rank.

Prompts are sent and answers come back as token ids, these with the log-probabilities that their tokens were drawn with:
of the distribution after the temperature. Adapters come and go while it runs; what vLLM keeps of prompts (prefix
caching) it keeps by the adapter's name and path, which are other ones in each step.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import UserError
from tunesmith.infer.rollout import Sampled, Wanted

STALLED_SECONDS = 1800.0
"""That it may take to end the next answer of those it is asked for."""
POLL_SECONDS, DYING_SECONDS = 0.5, 20.0


@dataclass(frozen=True)
class Address:
    """Where it answers, and to whom."""

    port: int
    key: str


class Client:
    """What is said to the server, by one of the ranks. `why_ended`: what is known of it when it does not answer."""

    def __init__(self, address: Address, why_ended: Callable[[], str | None] = lambda: None):
        self.address, self.why_ended = address, why_ended

    def load_adapter(self, name: str, folder: Path) -> None:
        """UserError where vLLM rejects it."""
        body = {"lora_name": name, "lora_path": str(folder.resolve())}
        status, said = self._say("/v1/load_lora_adapter", body)
        if status != 200:
            raise UserError(f"vLLM rejects the run's adapter: {_message(said)}. Use rollout.engine: own.")

    def unload_adapter(self, name: str) -> None:
        status, said = self._say("/v1/unload_lora_adapter", {"lora_name": name})
        if status != 200:
            raise UserError(f"vLLM does not let the adapter {name} go: {_message(said)}.")

    def answers(
        self,
        adapter: str,
        prompts: Sequence[list[int]],
        wanted: Sequence[Wanted],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: frozenset[int],
        rows: int,
        should_stop: Callable[[int], None] = lambda _: None,
    ) -> list[Sampled]:
        """As `infer.rollout.sample`, with log-probabilities; `rows`: answers that are asked for at once."""
        common = {"model": adapter, "max_tokens": max_tokens, "temperature": temperature, "logprobs": 0}
        common |= {"ignore_eos": True, "stop_token_ids": sorted(stop_ids), "return_token_ids": True}
        common |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}

        def body(one: Wanted) -> dict[str, Any]:
            draws = {"seed": seed_of(one.seed)} if temperature > 0 else {}
            return {**common, **draws, "prompt": prompts[one.prompt]}

        found = self._all([body(one) for one in wanted], min(rows, len(wanted)), should_stop)
        return [sampled_of(said, stop_ids, max_tokens) for said in found]

    def _all(self, bodies: Sequence[dict[str, Any]], rows: int, should_stop: Callable[[int], None]) -> list[Any]:
        """What is answered to each, so many asked at once; given up where `should_stop` raises."""
        found: list[Any] = [None] * len(bodies)
        arrived: queue.SimpleQueue[Future[tuple[int, Any]]] = queue.SimpleQueue()
        lines, done, last = _Lines(self.address), 0, time.monotonic()
        with ThreadPoolExecutor(max(1, rows)) as pool:
            try:
                places = {pool.submit(lines.ask, "/v1/completions", body): at for at, body in enumerate(bodies)}
                for future in places:
                    future.add_done_callback(arrived.put)
                while done < len(bodies):
                    should_stop(done)
                    try:
                        future = arrived.get(timeout=POLL_SECONDS)
                    except queue.Empty:
                        if (why := self.why_ended()) is not None:
                            raise UserError(why) from None
                        if time.monotonic() - last > STALLED_SECONDS:
                            raise UserError(
                                f"vLLM has not ended a single answer in {STALLED_SECONDS:.0f} s, so training stopped; "
                                "lower rollout.max_answer_tokens, or leave rollout.engine at own."
                            ) from None
                        continue
                    status, said = self._heard(future)
                    if status != 200:
                        why = self._why_gone() if status >= 500 else None
                        raise UserError(why or f"vLLM refuses to answer: {_message(said)}.")
                    found[places[future]], done, last = said, done + 1, time.monotonic()
            except BaseException:
                lines.close()  # vLLM gives up requests that nobody listens to
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                lines.close()
        should_stop(done)
        return found

    def _say(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        lines = _Lines(self.address)
        try:
            return lines.ask(path, body)
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from None
        finally:
            lines.close()

    def _heard(self, future: Future[tuple[int, Any]]) -> tuple[int, Any]:
        try:
            return future.result()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from None

    def _gone(self, error: Exception) -> UserError:
        return UserError(self._why_gone() or f"vLLM does not answer any more ({type(error).__name__}: {error}).")

    def _why_gone(self) -> str | None:
        """Of a server that may be about to end, and to say why."""
        give_up = time.monotonic() + DYING_SECONDS
        while (why := self.why_ended()) is None and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS / 5)
        return why


class _Lines:
    """Connections, one for each thread that asks."""

    def __init__(self, address: Address):
        self._address, self._own, self._every, self._is_closed = address, threading.local(), [], False

    def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status, and what is answered."""
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._address.port, timeout=2 * STALLED_SECONDS)
            connection.auto_open = 0  # not again once it was closed from outside
            self._own.connection = connection
            self._every.append(connection)
        if connection.sock is None:
            connection.connect()
        if self._is_closed:
            connection.close()
            raise ConnectionAbortedError("given up")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._address.key}"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", errors="replace")
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def close(self) -> None:
        """At once, whoever waits."""
        self._is_closed = True
        for connection in self._every:
            if (sock := connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def seed_of(text: str) -> int:
    """Of an answer: what vLLM's generator for it begins with. Its low bits differ, too, which is all that torch's
    generator looks at on a CPU."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sampled_of(said: Any, stop_ids: frozenset[int], max_tokens: int) -> Sampled:
    """An answer, by what the server sent."""
    try:
        (choice,) = said["choices"]
        ids = [int(one) for one in choice["token_ids"]]
        logps = choice["logprobs"]["token_logprobs"]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"vLLM answers without token ids or their log-probabilities ({type(error).__name__}: {error}); rollouts "
            "need version 0.11 or newer."
        ) from None
    if not all(isinstance(one, float | int) and math.isfinite(one) for one in logps):
        raise UserError(
            "The model's probabilities are no finite numbers while it answers, so training stopped; a lower "
            "learning_rate or precision: fp32 usually helps."
        )
    if not ids or len(ids) != len(logps) or len(ids) > max_tokens:
        raise UserError(
            f"vLLM sent {len(ids)} tokens with {len(logps)} log-probabilities, where 1 to {max_tokens} fit."
        )
    return Sampled(ids, ids[-1] in stop_ids, [float(one) for one in logps])


def _message(said: Any) -> str:
    """Of a refusal."""
    if isinstance(said, dict):
        said = said.get("error", said)
        said = said.get("message", said) if isinstance(said, dict) else said
    return " ".join(str(said).split())[:400].rstrip(".")
