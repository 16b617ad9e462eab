"""Answers by vLLM: its server as a process of its own beside the run, and what is said to it.

vLLM pins other versions of torch and transformers, so it is never imported: it is the command `vllm`, or what
TUNESMITH_VLLM names. It listens on this machine alone, at a port that was free, and answers those who have its key,
which is drawn for it; `launch.guardian` ends it with the run, however that ends. Adapters come and go while it runs.
Prompts are sent and answers come back as token ids, these with the log-probabilities that their tokens were drawn with:
of the distribution after the temperature. What vLLM keeps of prompts (prefix caching) it keeps by the adapter's name
and path, which are other ones in each step.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import UserError
from tunesmith.infer.rollout import Sampled, Wanted
from tunesmith.launch import guardian
from tunesmith.launch.local import free_port

COMMAND = "TUNESMITH_VLLM"
"""The variable that names the command, where `vllm` is not on the PATH: it may be in an environment of its own."""
BASE = "base"
"""The name of the model without an adapter."""
START_SECONDS, STALLED_SECONDS = 1800.0, 1800.0
"""That it may take to start, and to end the next answer of those it is asked for."""
POLL_SECONDS, DYING_SECONDS = 0.5, 20.0
CAUSE = re.compile(r"(?:\(.+? pid=\d+\) )?(?:ERROR [^\]]*\] )?\s*([\w.]*(?:Error|Exception): .+)")
"""An exception in what vLLM prints, behind the name of its process."""
OURS = (
    *("PYTHONPATH", "PYTHONHOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "PYTORCH_CUDA_ALLOC_CONF", "TORCHELASTIC_ERROR_FILE", "TRITON_INTERPRET"),
)
"""Variables that are meant for the trainer's own processes: vLLM has other libraries, and is no rank of the run."""


def vllm_command() -> str:
    """Where vLLM's command is. UserError where it is not installed."""
    named = os.environ.get(COMMAND)
    found = shutil.which(named or "vllm")
    if found is None:
        where = f"{COMMAND} is {named}, which is no command" if named else "there is no command `vllm`"
        raise UserError(
            f"rollout.engine: vllm needs vLLM, which is not installed here ({where}); install it in an environment of "
            f"its own and set {COMMAND} to the command in there, or leave rollout.engine at own."
        )
    return found


@dataclass(frozen=True)
class Address:
    """Where it answers, and to whom."""

    port: int
    key: str


class Server:
    """vLLM's process, from its start to its end."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path):
        """`words`: of the command `vllm serve`, but for where it listens. What it prints goes into `log`."""
        self.address, self.log = Address(free_port(), secrets.token_urlsafe(24)), log
        own = {name: value for name, value in os.environ.items() if name not in OURS}
        own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", **environment}
        own["VLLM_API_KEY"] = self.address.key
        place = ["--host", "127.0.0.1", "--port", str(self.address.port)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *words, *place],
                env=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C is for the run, which may still want answers
            )
        assert self._process.stdout is not None
        self._group = int(self._process.stdout.readline() or 0)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, tell: Callable[[float], None] = lambda _: None) -> None:
        """Until it answers; `tell` is told for how many seconds it was waited for. UserError where it ends first."""
        began = time.monotonic()
        while not self._answers():
            if not self.is_alive:
                raise UserError(f"vLLM ended before it answered: {self.last_words()} All it said is in {self.log}.")
            if time.monotonic() - began > START_SECONDS:
                raise UserError(f"vLLM did not answer within {START_SECONDS:.0f} s; what it said is in {self.log}.")
            tell(time.monotonic() - began)
            time.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        """The cause that it named when it failed, else its last lines; as a sentence."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            lines = deque((line.strip() for line in file), maxlen=400)
        causes = [found[1] for line in lines if (found := CAUSE.match(line))]
        causes = [one for one in causes if "stack trace" not in one] or causes
        said = causes[-1:] or [line for line in lines if line][-3:]
        return f"{' / '.join(said)[-400:].rstrip('.')}." if said else "it said nothing."

    def end(self) -> None:
        """It, and all that it has started; no error where it is gone already."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(guardian.END_SECONDS + 10)
        if self._group and self._process.returncode != 0:  # the guardian itself may have been killed
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


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
