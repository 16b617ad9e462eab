"""How answers are written: the JSON of a chat's answer or a completion's, whole or in chunks, as OpenAI writes them."""

from __future__ import annotations

import time
import uuid
from typing import Any

from tunesmith.serve.answer import CALL, Piece, tool_calls
from tunesmith.serve.models import Served


class Shape:
    """How an endpoint writes answers: whole, or as chunks with a last one that counts the tokens."""

    prefix = ""
    object, chunk_object = "", ""

    def __init__(self, served: Served):
        self.served = served
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, pieces: list[Piece], reason: str, usage: dict[str, int]) -> dict[str, Any]:
        return self._around(self.object, [self._choice(pieces, reason)]) | {"usage": usage}

    def chunks(self, event: Piece | str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._around(self.chunk_object, []) | {"usage": usage}

    def _choice(self, pieces: list[Piece], reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices}

    def _token_text(self, token: int) -> str:
        """A token as it continues a text: some tokenizers strip the space before the first word of what they decode."""
        tokenizer = self.served.encoder.tokenizer
        once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
        return twice[len(once) :]


class ChatShape(Shape):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: Served, has_tools: bool, tells_logprobs: bool):
        super().__init__(served)
        self.has_tools, self.tells_logprobs = has_tools, tells_logprobs
        self._is_begun = False
        self._held: str = ""

    def _choice(self, pieces: list[Piece], reason: str) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.has_tools:
            content, calls = tool_calls(text)
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                reason = _reason_of_calls(reason)
        logprobs = self._logprobs(pieces)
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def chunks(self, event: Piece | str) -> list[dict[str, Any]]:
        """Chunks of a piece, or of the answer's end. With tools, text from the beginning of a call on is held until the
        end, when it is known to be one."""
        chunks = [] if self._is_begun else [self._chunk({"role": "assistant", "content": ""}, None, None)]
        self._is_begun = True
        if isinstance(event, Piece):
            text = self._not_held(event.text) if self.has_tools else event.text
            logprobs = self._logprobs([event])
            return [*chunks, self._chunk({"content": text}, logprobs, None)] if text or logprobs else chunks
        content, calls = tool_calls(self._held)
        if content:
            chunks.append(self._chunk({"content": content}, None, None))
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            chunks.append(self._chunk({"tool_calls": numbered}, None, None))
            event = _reason_of_calls(event)
        return [*chunks, self._chunk({}, None, event)]

    def _not_held(self, text: str) -> str:
        """What can be sent of this text and of what was held: up to where a call begins, or may."""
        text, self._held = self._held + text, ""
        start = text.find(CALL)
        if start < 0:
            sizes = range(min(len(CALL) - 1, len(text)), 0, -1)
            start = next((len(text) - size for size in sizes if CALL.startswith(text[-size:])), len(text))
        self._held = text[start:]
        return text[:start]

    def _chunk(self, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._around(self.chunk_object, [choice])

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        entries = []
        for token in (token for piece in pieces for token in piece.tokens):
            top = [self._entry(*pair) for pair in token.top]
            entries.append({**self._entry(token.id, token.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._token_text(token)
        is_whole = "\ufffd" not in text  # else it is a part of a character, and its bytes are unknown
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


def _reason_of_calls(reason: str) -> str:
    """Why an answer with calls ended. One that was cut by its length says that: it may lack a call, or a part of
    one."""
    return reason if reason == "length" else "tool_calls"


class CompletionShape(Shape):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: Served, tells_logprobs: bool):
        super().__init__(served)
        self.tells_logprobs = tells_logprobs
        self._offset = 0

    def _choice(self, pieces: list[Piece], reason: str | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(pieces) if self.tells_logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def chunks(self, event: Piece | str) -> list[dict[str, Any]]:
        choice = self._choice([event], None) if isinstance(event, Piece) else self._choice([], event)
        return [self._around(self.chunk_object, [choice])]

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        texts, offsets = [self._token_text(token.id) for token in tokens], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{self._token_text(i): _finite(value) for i, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _finite(value: float | None) -> float | None:
    """A log-probability as JSON has it, which knows no infinity."""
    return value if value is None or value > -9999.0 else -9999.0
