"""From an answer's tokens to its text: pieces as soon as they are whole characters, stop strings, calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.infer.sampling import Token

CALL, CALL_END = "<tool_call>", "</tool_call>"


class Text:
    """Tokens decoded one after the other; what is given out, laid end to end, is what they are decoded to together.

    `before` are tokens after which the text goes on: a tokenizer that strips the first space of a text leaves it then.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(before[-8:])
        self._start, self._read, self._sent = 0, len(self._ids), 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        new = self._new()
        if not new:
            return ""
        if new.endswith("\ufffd"):  # perhaps the first bytes of a character, each of which may stand as one of its own
            whole = max(self._sent, len(new.rstrip("\ufffd")))
            piece, self._sent = new[self._sent : whole], whole
            return piece
        piece = new[self._sent :]
        self._start, self._read, self._sent = self._read, len(self._ids), 0
        return piece

    def rest(self) -> str:
        """What was kept back for a character that never became whole."""
        return self._new()[self._sent :]

    def _new(self) -> str:
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Piece:
    """What an answer has gained: text, and the tokens since the last piece."""

    text: str
    tokens: tuple[Token, ...] = ()


class Answer:
    """Takes tokens, gives pieces. Text that may be the beginning of a stop string is kept back until it is known."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], before: Sequence[int] = ()):
        self._text = Text(tokenizer, before)
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._tokens: list[Token] = []
        self.is_stopped = False

    def push(self, token: Token) -> Piece | None:
        self._tokens.append(token)
        self._held += self._text.push(token.id)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = self._held[: min(found)]
            return self._give(len(self._held))
        return self._give(len(self._held) - self._undecided())

    def rest(self) -> Piece | None:
        if not self.is_stopped:
            self._held += self._text.rest()
        return self._give(len(self._held))

    def _undecided(self) -> int:
        """Characters at the end with which a stop string may begin."""
        most = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _give(self, size: int) -> Piece | None:
        text, self._held = self._held[:size], self._held[size:]
        if not text and not (self._tokens and self._tokens[-1].logprob is not None):
            return None
        tokens, self._tokens = tuple(self._tokens), []
        return Piece(text, tokens)


def tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text without the calls in it, and the calls, where they are written as most models do (Hermes, Qwen):
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What is no such call stays text."""
    said, found = "", []
    rest = text
    while CALL in rest:
        before, _, after = rest.partition(CALL)
        body, _, behind = after.partition(CALL_END)
        call = _call(body)
        if call is None:
            said += before + CALL
            rest = after
            continue
        said += before
        found.append(call)
        rest = behind
    return (said + rest).strip() if found else text, found


def _call(body: str) -> dict[str, Any] | None:
    try:
        made = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return None
    arguments = made.get("arguments", {})
    if not isinstance(arguments, str):  # some models write them as clients are given them, as JSON in a string
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": made["name"], "arguments": arguments},
    }
