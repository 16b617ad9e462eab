"""Answers that are JSON, of any kind or of a schema: tokens that cannot lead to such an answer are masked.

The parser over the tokenizer's bytes is llguidance's, a package of its own. What it cannot hold an answer to, it
refuses before anything is generated; so what is answered is valid, or was cut by its length.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tunesmith.serve import trial
from tunesmith.serve.engine import NotFollowedError
from tunesmith.serve.models import Served
from tunesmith.serve.protocol import ApiError, ResponseFormat

SCHEMA_CHARACTERS = 256 << 10
KNOWN = 10_000
"""Schemas of which it is kept that they are compiled within bounds."""
COMPILED = 32
"""Schemas that are kept compiled for a model, some megabytes each where they have a thousand properties. A repeated one
with 300 takes 0.02 ms instead of 20, one with 1,500 takes 0.04 instead of 300."""
OPTIONS = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}",  # some models would else write spaces until there is no room
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
PARAM = "response_format"
VALUES = ("const", "enum", "default", "examples")
"""Keywords of a schema with values, in which nothing is a keyword."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema with schemas by names, none of which is a keyword."""


class JsonGrammar:
    """One answer's way through its schema."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        return torch.from_numpy(bits).bool()

    def take(self, token: int) -> bool:
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():  # its message may quote the answer
            raise NotFollowedError


@dataclass(eq=False)
class Compiler:
    """What is compiled for one model: its tokenizer as llguidance has it, and matchers at their beginning, the oldest
    first."""

    tokenizer: Any
    matchers: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, key: bytes) -> Any:
        """A matcher of one's own, or None where none is kept."""
        with self.lock:
            if key not in self.matchers:
                return None
            self.matchers.move_to_end(key)
            return self.matchers[key].deep_copy()

    def keep(self, key: bytes, matcher: Any) -> None:
        with self.lock:
            self.matchers[key] = matcher
            while len(self.matchers) > COMPILED:
                self.matchers.popitem(last=False)


class Grammars:
    """A model's tokenizer is made once, which takes a second; what was compiled for it goes when the model does."""

    def __init__(self) -> None:
        self._compilers: weakref.WeakKeyDictionary[Served, Compiler] = weakref.WeakKeyDictionary()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Grammars that are known to compile, by their content, the oldest first."""

    def prepare(self, served: Served) -> None:
        """Before `of`, where nobody else uses its tokenizer. ApiError where it has none that will do."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            message = f"{PARAM}: this server makes no JSON answers; install llguidance beside it (tunesmith[serve])."
            raise ApiError(400, message, param=PARAM) from None
        if served not in self._compilers:
            self._compilers[served] = Compiler(_made(served))

    def of(self, served: Served, asked: ResponseFormat) -> JsonGrammar:
        """ApiError where answers cannot be held to what is asked. May take seconds, the first time for a schema."""
        text = json.dumps(_schema(asked))
        if len(text) > SCHEMA_CHARACTERS:
            message = f"{PARAM}: the schema is longer than {SCHEMA_CHARACTERS >> 10} KiB."
            raise ApiError(400, message, param=PARAM)
        compiler, key = self._compilers[served], hashlib.sha256(text.encode()).digest()
        matcher = compiler.begin(key)
        if matcher is None:
            made = self._compiled(text, compiler.tokenizer, is_known=asked.json_schema is None)
            matcher = made.deep_copy()
            compiler.keep(key, made)
        return JsonGrammar(matcher)

    def _compiled(self, schema: str, tokenizer: Any, *, is_known: bool) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        if not is_known:
            self._try(grammar)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**trial.LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ApiError(400, f"{PARAM}: answers cannot be held to this schema: {_why(matcher)}.", param=PARAM)
        return matcher

    def _try(self, grammar: str) -> None:
        key = hashlib.sha256(grammar.encode()).digest()
        if key in self._known:
            return
        if not trial.is_compiled(grammar):
            message = (
                f"{PARAM}: the schema takes too long, or too much memory, to be compiled; give a simpler one, with "
                "fewer optional properties, patterns and alternatives, and no `multipleOf` of a large number."
            )
            raise ApiError(400, message, param=PARAM)
        self._known[key] = None
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)


def _why(matcher: Any) -> str:
    first, *more = matcher.get_error().strip().splitlines()
    if first.startswith("NoExtension"):  # such as one that is nothing but a reference to itself
        return "no answer is valid by it"
    said = f"{first} {more[-1].removeprefix('error: ')}" if first.endswith(":") and more else first
    return said[:300].rstrip(".")


def _schema(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "json_object":
        return {"type": "object"}
    assert asked.json_schema is not None
    schema = {name: part for name, part in asked.json_schema.schema_.items() if name != "x-guidance"}
    _check(schema)
    return schema


def _check(part: Any) -> None:
    """A name may come twice in an object, which readers count once: `minProperties` is then not kept."""
    if isinstance(part, list):
        for one in part:
            _check(one)
    if isinstance(part, dict):
        least, required = part.get("minProperties"), part.get("required")
        if isinstance(least, int) and least > (len(required) if isinstance(required, list) else 0):
            message = f"{PARAM}: answers cannot be held to minProperties beyond the properties that are required."
            raise ApiError(400, message, param=PARAM)
        for name, one in part.items():
            if name not in VALUES:
                _check(list(one.values()) if name in NAMED and isinstance(one, dict) else one)


def _made(served: Served) -> Any:
    from llguidance import LLTokenizer

    backend = getattr(served.encoder.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ApiError(400, f"{PARAM}: the tokenizer of this model is of a kind that JSON answers do not know.")
    plain = type(backend).from_str(backend.to_str())  # a copy: the other one stays as it is
    plain.no_padding()
    plain.no_truncation()
    try:
        return LLTokenizer(plain.to_str(), eos_token=sorted(served.stop_ids) or None)
    except (ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0][:200].rstrip(".")
        raise ApiError(400, f"{PARAM}: JSON answers do not know this model's tokenizer: {why}.", param=PARAM) from None
