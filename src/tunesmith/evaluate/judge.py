"""A judge: another model behind an OpenAI-compatible API, which rates answers, or says which of two is better.

Pairs are judged in both orders, since judges prefer a place; a verdict that changes with the order is half a win. They
also prefer long answers: `length_controlled` is the share of wins that is left at equal length. What fails for a while
(429, 5xx, a lost connection) is tried again, later each time, and as late as the server asks; what cannot be read as
a judgement is asked for again, then counted as malformed. The key goes into one header and nowhere else.
"""

from __future__ import annotations

import email.utils
import http.client
import ipaddress
import json
import math
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunesmith.errors import UserError
from tunesmith.evaluate.figures import wilson

VERSION = 1
"""Version of the prompts below."""
ATTEMPTS = 8
"""Attempts at one request that fails in a way that may pass."""
ASKED_AGAIN = 2
"""How often a judgement that cannot be read is asked for once more."""
LONGEST_WAIT = 120.0
WORKERS = 8
"""Requests at a time."""

RATE = (
    "You are a fair judge of answers that an AI assistant gave. Consider how helpful, correct, relevant, deep and "
    "clear the last answer is. Do not let its length sway you. Explain in a few sentences, then end with a line "
    "`Rating: [[N]]`, where N is a whole number from 1 (useless) to 10 (as good as can be)."
)
CHOOSE = (
    "You are a fair judge of two AI assistants, A and B, who had the same conversation with a user. Decide whose "
    "answers are better: more helpful, correct, relevant, deep and clear. Do not let the order of the two, nor the "
    "length of their answers, sway you. Explain in a few sentences, then end with `[[A]]` if A is better, `[[B]]` if "
    "B is better, or `[[C]]` if they are equally good."
)


@dataclass(frozen=True)
class Judge:
    url: str
    """Up to and including `/v1`."""
    model: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 180.0
    first_wait: float = 1.0
    """Seconds before a failed request is tried again; twice as long each time."""
    pauses: Pauses = field(default_factory=lambda: Pauses(), repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise UserError(f"--judge: {self.url} is no address of an API, such as https://api.openai.com/v1.")
        if self.key and parts.scheme == "http" and not _is_local(parts.hostname):
            raise UserError(f"--judge: {self.url} would carry the key unencrypted; use https.")

    def rate(self, turns: Sequence[str], answers: Sequence[str], reference: Sequence[str] | None) -> dict[str, Any]:
        """Each answer, after the conversation before it, from 1 to 10; their mean."""
        found = []
        for number in range(1, len(turns) + 1):
            text = _conversation(turns[:number], answers[:number])
            if reference and len(reference) >= number:
                text += f"\n\n[A reference answer to the last question]\n{reference[number - 1]}"
            found.append(self._judged(RATE, text, rating_of))
        known = [value for value in found if value is not None]
        score = sum(known) / len(known) if len(known) == len(found) else None
        return {"score": score, "scores": found, "malformed": len(found) - len(known)}

    def choose(self, turns: Sequence[str], first: Sequence[str], second: Sequence[str]) -> dict[str, Any]:
        """1 where the first answers are better, 0 where the second are, in both orders; their mean."""
        found = []
        for one, other in ((first, second), (second, first)):
            parts = [f"[Assistant {name}]\n{_conversation(turns, said)}" for name, said in (("A", one), ("B", other))]
            found.append(self._judged(CHOOSE, "\n\n".join(parts), choice_of))
        swapped = None if found[1] is None else 1 - found[1]
        both = [value for value in (found[0], swapped) if value is not None]
        return {
            "win": sum(both) / 2 if len(both) == 2 else None,
            "orders": [found[0], swapped],
            "malformed": 2 - len(both),
            "length": sum(map(len, first)),
            "other_length": sum(map(len, second)),
        }

    def _judged(self, task: str, text: str, read: Callable[[str], float | None]) -> float | None:
        for _ in range(1 + ASKED_AGAIN):
            said = self.ask([{"role": "system", "content": task}, {"role": "user", "content": text}])
            if said is not None and (found := read(said)) is not None:
                return found
        return None

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """What the judge says; None where that is no answer of such an API. UserError where asking again is in vain."""
        body = json.dumps({"model": self.model, "messages": list(messages), "temperature": 0}).encode()
        wait, why = self.first_wait, ""
        for attempt in range(ATTEMPTS):
            self.pauses.keep()
            try:
                return _said(self._post(body))
            except urllib.error.HTTPError as error:
                why = f"it answered {error.code} {error.reason}"
                asked = _retry_after(error.headers.get("Retry-After"))
                error.close()
                if error.code not in (408, 409, 429) and error.code < 500:
                    raise UserError(f"--judge: {self.url} refuses: {why}; {_advice(error.code)}.") from None
                if error.code == 429:  # for all that ask, not for this request alone
                    self.pauses.until(time.monotonic() + min(asked or wait, LONGEST_WAIT))
                pause = min(asked or wait * random.uniform(0.5, 1.5), LONGEST_WAIT)
            except (OSError, http.client.HTTPException) as error:  # no connection, a timeout, an answer cut off
                why = f"{type(error).__name__} ({getattr(error, 'reason', '') or error})"
                pause = min(wait * random.uniform(0.5, 1.5), LONGEST_WAIT)
            if attempt + 1 < ATTEMPTS:
                time.sleep(pause)
            wait *= 2
        raise UserError(
            f"--judge: {self.url} has failed {ATTEMPTS} times in a row: {self._without_key(why)}. What it has judged "
            "is kept; start again to go on."
        )

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers, method="POST")
        with _opener.open(request, timeout=self.timeout) as response:
            return response.read(1 << 24)

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "...") if self.key else text


class Pauses:
    """When the server has asked for a pause, all wait for it."""

    def __init__(self) -> None:
        self._lock, self._until = threading.Lock(), 0.0

    def until(self, when: float) -> None:
        with self._lock:
            self._until = max(self._until, when)

    def keep(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(left)


def judge_all(
    asked: Sequence[tuple[str, Callable[[], dict[str, Any]]]], *, workers: int = WORKERS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each item's judgement as soon as it is there, in no order."""
    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(judge): item for item, judge in asked}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def rating_of(text: str) -> float | None:
    found = re.findall(r"\[\[(\d+\.?\d*)\]\]", text) or re.findall(r"[Rr]ating:\s*\[?(\d+\.?\d*)\]?", text)
    value = float(found[-1]) if found else math.nan
    return value if 1 <= value <= 10 else None


def choice_of(text: str) -> float | None:
    found = re.findall(r"\[\[([ABC])\]\]", text)
    return {"A": 1.0, "B": 0.0, "C": 0.5}[found[-1]] if found else None


# What wins say


@dataclass(frozen=True)
class Wins:
    """The share of pairs that are won (ties half), at the lengths as they are and at equal lengths, each with its
    interval of 95%."""

    rate: float
    low: float
    high: float
    controlled: float
    controlled_low: float
    controlled_high: float
    items: int
    malformed: int
    consistent: float
    """The share of pairs on which both orders agree."""


def wins_of(results: Sequence[Mapping[str, Any]], *, seed: int = 0, draws: int = 500) -> Wins | None:
    known = [one for one in results if one.get("win") is not None]
    if not known:
        return None
    wins = np.array([one["win"] for one in known], dtype=float)
    lengths = np.array([one["length"] - one["other_length"] for one in known], dtype=float)
    rate, (low, high) = float(wins.mean()), interval(wins)
    chance = np.random.default_rng(seed)
    drawn = [chance.integers(len(wins), size=len(wins)) for _ in range(draws)]
    controlled = [length_controlled(wins[some], lengths[some]) for some in drawn]
    spread = np.quantile(controlled, [0.025, 0.975])
    agree = float(np.mean([one["orders"][0] == one["orders"][1] for one in known]))
    malformed = sum(one.get("malformed", 0) for one in results)
    return Wins(
        rate,
        low,
        high,
        length_controlled(wins, lengths),
        float(spread[0]),
        float(spread[1]),
        len(wins),
        malformed,
        agree,
    )


def interval(wins: np.ndarray) -> tuple[float, float]:
    """95% for the mean of values from 0 to 1: Wilson's, with as many items as their spread is worth."""
    count, rate = len(wins), float(wins.mean())
    most = rate * (1 - rate)
    spread = float(wins.var(ddof=1)) if count > 1 else most
    worth = count * min(most / spread, 4.0) if spread > 0 and most > 0 else count
    return wilson(rate * worth, worth)


def length_controlled(wins: np.ndarray, lengths: np.ndarray) -> float:
    """The share of wins at equal length: a logistic regression of wins on the difference in length, which is bounded so
    that one very long answer does not decide it. Half a win and half a loss at equal length keep it finite."""
    scale = float(lengths.std()) or 1.0
    x = np.stack([np.ones(len(wins) + 2), np.concatenate([np.tanh(lengths / scale), [0.0, 0.0]])], axis=1)
    y = np.concatenate([wins, [1.0, 0.0]])
    weights = np.concatenate([np.ones(len(wins)), [0.5, 0.5]])
    slopes = np.zeros(2)
    for _ in range(25):
        p = 1 / (1 + np.exp(-np.clip(x @ slopes, -30, 30)))
        gradient = x.T @ (weights * (y - p)) - np.array([0.0, 0.1]) * slopes
        curvature = (x * (weights * p * (1 - p))[:, None]).T @ x + np.diag([1e-9, 0.1])
        step = np.clip(np.linalg.solve(curvature, gradient), -2, 2)
        slopes = slopes + step
        if np.abs(step).max() < 1e-8:
            break
    return float(1 / (1 + math.exp(-slopes[0])))


# HTTP


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """One that led elsewhere would take the key along."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _said(content: bytes) -> str | None:
    try:
        said = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return said if isinstance(said, str) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds, or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _advice(code: int) -> str:
    if code in (401, 403):
        return "give its key in TUNESMITH_JUDGE_KEY or OPENAI_API_KEY"
    if 300 <= code < 400:
        return "give the address that it leads to"
    return "look at the address and at --judge-model"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _conversation(turns: Sequence[str], answers: Sequence[str]) -> str:
    parts = []
    for turn, answer in zip(turns, answers, strict=True):
        parts += [f"[User]\n{turn}", f"[Assistant's answer]\n{answer}\n[End of the answer]"]
    return "\n\n".join(parts)
