"""OpenAI's endpoints over an engine: a request is checked and becomes a job, whose answer is a `Reply`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tunesmith.data.turns import conversation_of
from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import UserError
from tunesmith.serve.answer import CALL_END, Answer
from tunesmith.serve.embed import embed, written
from tunesmith.serve.engine import Busy, Grammar, Job
from tunesmith.serve.grammar import Grammars
from tunesmith.serve.models import Models, Served
from tunesmith.serve.openapi import description
from tunesmith.serve.protocol import (
    ApiError,
    ChatRequest,
    Common,
    CompletionRequest,
    EmbeddingRequest,
    LoadRequest,
    UnloadRequest,
    parse,
)
from tunesmith.serve.refusals import ended, going_away, too_long, too_many
from tunesmith.serve.reply import Reply
from tunesmith.serve.service import Service
from tunesmith.serve.shapes import ChatShape, CompletionShape

BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
"""Seconds that a client has to send its request."""
COMPILERS = 2
"""Schemas that are compiled at a time."""
COMPLETION_TOKENS = 16
"""What an answer of `/v1/completions` may have where nothing is said, as with OpenAI."""
Made = TypeVar("Made")
log = logging.getLogger("tunesmith.serve")


class Endpoints:
    """A method for each endpoint, and the steps from a request to a job that they share."""

    def __init__(
        self, models: Models, service: Service, timeout: float, load: Callable[[str, Path], Served] | None = None
    ):
        self.models, self.service, self.timeout, self._load = models, service, timeout, load
        self.engine, self.metrics = service.engine, service.metrics
        self.grammars = Grammars()
        self.renderer = ThreadPoolExecutor(1, "render")  # one: tokenizers are not made for several threads
        self.compiler = ThreadPoolExecutor(COMPILERS, "compile")
        self._longest = max(map(_longest_token, models.served.values()))

    # Endpoints

    async def chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await _body(request))
        _check_stream(asked)
        served = self._served(asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "top_logprobs: say `logprobs: true` with it.", param="top_logprobs")
        _check_format(asked)
        prompt = await self._rendered(lambda: self._chat_prompt(served, asked))
        form, grammar = asked.response_format, None
        if form is not None and form.is_json:
            await self._rendered(lambda: self.grammars.prepare(served))
            grammar = await self._compiled(lambda: self.grammars.of(served, form))
        top_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        shape = ChatShape(served, has_tools, bool(asked.logprobs))
        stops = [] if grammar is not None else [*(asked.stops or served.defaults.stops)]
        if has_tools and asked.parallel_tool_calls is False:
            stops.append(CALL_END)  # a call is read without it, too
        answer = Answer(served.encoder.tokenizer, stops)
        return Reply(
            self.service, asked, shape, self._job(served, asked, prompt, max_tokens, top_logprobs, grammar), answer
        )

    async def complete(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _body(request))
        _check_stream(asked)
        served = self._served(asked.model)
        prompt = await self._rendered(lambda: self._text_prompt(served, asked.one_prompt, "prompt"))
        shape = CompletionShape(served, asked.logprobs is not None)
        answer = Answer(served.encoder.tokenizer, asked.stops or served.defaults.stops, prompt)
        job = self._job(served, asked, prompt, asked.max_tokens or COMPLETION_TOKENS, asked.logprobs)
        return Reply(self.service, asked, shape, job, answer)

    async def embed(self, request: Request) -> Response:
        asked = parse(EmbeddingRequest, await _body(request))
        served = self._served(asked.model)
        prompts = await self._rendered(lambda: [self._text_prompt(served, text, "input") for text in asked.texts])
        limit = self.engine.limits.length
        for prompt in prompts:
            if not 0 < len(prompt) <= limit:
                message = f"input: a text has {len(prompt):,} tokens; it can have 1 to {limit:,}."
                raise ApiError(400, message, param="input", code="context_length_exceeded")
        vectors = []
        try:
            async with asyncio.timeout(self.timeout):
                for prompt in prompts:  # one after the other: others have their tokens in between
                    if await request.is_disconnected():
                        raise ClientDisconnect
                    vectors.append(await self._between_steps(lambda prompt=prompt: self._embedded(served, prompt)))
        except TimeoutError:
            raise ended("timeout") from None
        except UserError as error:
            raise ApiError(400, str(error), param="model") from None
        form = asked.encoding_format or "float"
        data = [
            {"object": "embedding", "index": place, "embedding": written(vector, form)}
            for place, vector in enumerate(vectors)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": usage})

    def _embedded(self, served: Served, prompt: list[int]) -> list[float]:
        self.models.select(served)
        self.engine.stats.prompt_tokens += len(prompt)
        return embed(self.engine.model, prompt)

    async def load_adapter(self, request: Request) -> Response:
        asked, load = parse(LoadRequest, await _body(request)), self._load
        assert load is not None
        name, where = asked.lora_name, Path(asked.lora_path)
        try:
            await asyncio.to_thread(self.models.check_adapter, name, where)
            served = await self._between_steps(lambda: load(name, where))
            self.models.add(served)
        except UserError as error:
            raise ApiError(400, f"lora_path: {error}", param="lora_path") from None
        except OSError:
            raise ApiError(400, "lora_path: there is nothing that can be read.", param="lora_path") from None
        self._longest = max(self._longest, _longest_token(served))
        log.info("the adapter %s was loaded", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        asked = parse(UnloadRequest, await _body(request))
        name = self._served(asked.lora_name, "lora_name").name
        try:
            self.models.remove(name)
        except UserError as error:
            raise ApiError(400, f"lora_name: {error}", param="lora_name") from None
        await self._between_steps(self.models.take_off)  # one that still answers is put on again for its next token
        log.info("the adapter %s was unloaded", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._listed(name) for name in self.models.served]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(self._listed(self._served(request.path_params["name"]).name))

    async def health(self, _: Request) -> Response:
        is_well = self.engine.is_alive and not self.service.is_draining
        return JSONResponse({"status": "ok" if is_well else "unavailable"}, 200 if is_well else 503)

    async def describe(self, _: Request) -> Response:
        return JSONResponse(description(list(self.models.served), with_loading=self._load is not None))

    async def show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    # From a request to a job

    def _listed(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.models.created, "owned_by": "tunesmith"}

    def _served(self, name: str, param: str = "model") -> Served:
        """The model of this name; ApiError where there is none."""
        served = self.models.served.get(name)
        if served is None:
            known = ", ".join(self.models.served)
            raise ApiError(
                404, f"{param}: there is no such model; there are {known}.", param=param, code="model_not_found"
            )
        return served

    async def _between_steps(self, work: Callable[[], Made]) -> Made:
        """What `work` makes in the engine's thread, between two of its steps."""
        if self.service.is_draining:
            raise going_away()
        try:
            return await asyncio.wrap_future(self.engine.between_steps(work))
        except Busy:
            raise too_many() from None
        except asyncio.CancelledError:
            if self.engine.is_alive:  # it is this request that was cancelled
                raise
            raise going_away() from None

    async def _rendered(self, work: Callable[[], Made]) -> Made:
        """What `work` makes in the thread in which prompts are rendered; a refusal where a prompt cannot be."""
        if self.service.is_draining:
            raise going_away()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.renderer, work)
        except RecordError as error:
            raise ApiError(400, f"{error.reason}.", param="messages") from None
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _compiled(self, work: Callable[[], Made]) -> Made:
        """What `work` makes in the threads that compile grammars, for which other prompts do not wait."""
        if self.service.is_draining:
            raise going_away()
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.get_running_loop().run_in_executor(self.compiler, work)
        except TimeoutError:
            raise ended("timeout") from None

    def _chat_prompt(self, served: Served, asked: ChatRequest) -> list[int]:
        self._check_size(sum(len(str(message.content or "")) for message in asked.messages), "messages")
        tools = None if asked.tool_choice == "none" else asked.tools
        messages, described = conversation_of(
            [message.model_dump(exclude_none=True) for message in asked.messages], tools, Origin("this request", 1)
        )
        is_bound = asked.response_format is not None and asked.response_format.is_json
        return served.encoder.prompt(messages, described, reasons=served.reasons and not is_bound)

    def _text_prompt(self, served: Served, text: str | list[int], param: str) -> list[int]:
        if isinstance(text, str):
            self._check_size(len(text), param)
            return served.encoder.text_prompt(text)
        size = self.models.model.get_input_embeddings().weight.shape[0]
        if max(text) >= size:
            raise ApiError(400, f"{param}: a token is not below {size}, the size of the vocabulary.", param=param)
        return list(text)

    def _check_size(self, characters: int, param: str) -> None:
        """ApiError, before anything is tokenized, where so many characters have more tokens than there is room for."""
        if characters > self.engine.limits.length * self._longest:
            raise too_long(f"the prompt has {characters:,} characters", self.engine.limits.length, param)

    def _job(
        self,
        served: Served,
        asked: Common,
        prompt: list[int],
        max_tokens: int | None,
        top_logprobs: int | None,
        grammar: Grammar | None = None,
    ) -> Job:
        limit = min(self.engine.limits.length, self.engine.limits.cache_tokens)
        if not prompt:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        room = limit - len(prompt)
        if room < (max_tokens or 1):
            wanted = f" and {max_tokens:,} are asked for" if max_tokens else ""
            param = "messages" if isinstance(asked, ChatRequest) else "prompt"
            raise too_long(f"the prompt has {len(prompt):,} tokens{wanted}", limit, param)
        return Job(
            model=served,
            prompt=prompt,
            max_tokens=max_tokens or served.defaults.longest(len(prompt), room),
            stop_ids=served.stop_ids,
            take=lambda _: False,
            end=lambda _: None,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            top_logprobs=top_logprobs,
            deadline=time.monotonic() + self.timeout,
            grammar=grammar,
            decoding=replace(served.defaults.decoding, **asked.decoding),
        )


def _check_stream(asked: Common) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: say `stream: true` with it.", param="stream_options")


def _check_format(asked: ChatRequest) -> None:
    form = asked.response_format
    if form is None:
        return
    if (form.type == "json_schema") != (form.json_schema is not None):
        message = "response_format: `json_schema` goes with the type json_schema, and with no other."
        raise ApiError(400, message, param="response_format")
    if form.is_json and asked.stops:
        raise ApiError(400, "stop: it would cut an answer that must be JSON; leave one of the two out.", param="stop")
    if form.is_json and asked.tools and asked.tool_choice != "none":
        message = (
            'tools: an answer that must be JSON calls none; leave one of the two out, or say `tool_choice: "none"`.'
        )
        raise ApiError(400, message, param="tools")


async def _body(request: Request) -> bytes:
    """The body of a request; ApiError where it is not JSON by its type, is too large, or comes too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser may send other types without asking first
        raise ApiError(415, "Send the request as JSON, with `Content-Type: application/json`.")
    too_large = ApiError(413, f"The body is larger than {BODY_BYTES >> 20} MiB.", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"The body did not come within {BODY_SECONDS:.0f} seconds.") from None
    return b"".join(parts)


def _longest_token(served: Served) -> int:
    return max(map(len, served.encoder.tokenizer.get_vocab()))
