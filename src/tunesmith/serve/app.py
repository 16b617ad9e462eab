"""The HTTP side: OpenAI's endpoints over an engine. Nothing that a client wrote, and nothing that a model answered, is
logged."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.data.turns import conversation_of
from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import UserError
from tunesmith.infer.sampling import Token
from tunesmith.serve.answer import CALL, CALL_END, Answer, Piece, tool_calls
from tunesmith.serve.embed import embed, written
from tunesmith.serve.engine import Busy, Engine, Grammar, Job, Reason
from tunesmith.serve.grammar import Grammars
from tunesmith.serve.metrics import Metrics
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

BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
"""For a client to send its request."""
COMPILERS = 2
"""Schemas that are compiled at a time."""
READ_SECONDS = 30.0
"""For a client to take a piece of its answer; then it counts as gone."""
COMPLETION_TOKENS = 16
"""What an answer of `/v1/completions` may have where nothing is said, as with OpenAI."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health",)
"""What is answered without a key."""
GONE = object()
Made = TypeVar("Made")
log = logging.getLogger("tunesmith.serve")


@dataclass(frozen=True)
class Access:
    """Who is answered."""

    api_key: str | None
    checks_host: bool
    """On a loopback address: a page in a browser may have its name point there (DNS rebinding)."""


def make_app(
    models: Models,
    engine: Engine,
    access: Access,
    *,
    timeout: float,
    load: Callable[[str, Path], Served] | None = None,
) -> Guard:
    """`load` reads an adapter in the engine's thread; where it is None, adapters stay as they are."""
    server = Server(models, engine, timeout, load)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)
            for pool in (server.renderer, server.compiler):
                pool.shutdown(wait=False, cancel_futures=True)

    changing = [
        Route("/v1/load_lora_adapter", server.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", server.unload_adapter, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            *(changing if load else ()),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.complete, methods=["POST"]),
            Route("/v1/embeddings", server.embed, methods=["POST"]),
            Route("/v1/models", server.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", server.show_model, methods=["GET"]),
            Route("/health", server.health, methods=["GET"]),
            Route("/metrics", server.show_metrics, methods=["GET"]),
            Route("/openapi.json", server.describe, methods=["GET"]),
        ],
        exception_handlers={ApiError: _told, HTTPException: _refused, ClientDisconnect: _left, Exception: _failed},
        lifespan=lifespan,
    )
    return Guard(app, access, server)


class Guard:
    """Before every request: the Host header and the key. After it: a line in the log, without what was asked."""

    def __init__(self, app: ASGIApp, access: Access, server: Server):
        self._app, self._access, self._server = app, access, server
        self._key = _digest(access.api_key) if access.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refused = self._problem(Request(scope))
            if refused:
                await _answer(refused)(scope, receive, noting)
            else:
                await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("a request failed: %s", type(error).__name__)  # without its message, which may quote the prompt
            if status:
                return  # it cannot be taken back: the connection is closed
            await _answer(ApiError(500, "Something unexpected happened."))(scope, receive, noting)
        finally:
            path = scope["path"] if scope["path"] in KNOWN else "another path"
            self._server.metrics.count_request(path, status)
            client = (scope.get("client") or ("?",))[0]
            log.info("%s %s %s %s %.3f s", client, scope["method"][:10], path, status, time.monotonic() - began)

    def drain(self) -> None:
        """From now on new requests are refused."""
        self._server.is_draining = True

    def _problem(self, request: Request) -> ApiError | None:
        if self._access.checks_host and _host(request.headers.get("host", "")) not in LOOPBACK:
            message = "The Host header must name this machine: localhost or 127.0.0.1."
            return ApiError(403, message, code="foreign_host")
        if self._key is None or request.url.path in OPEN:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return ApiError(401, "Give the API key as `Authorization: Bearer KEY`.", code="missing_api_key")
        if not hmac.compare_digest(_digest(given.strip()), self._key):
            return ApiError(401, "This API key is not the one of this server.", code="invalid_api_key")
        return None


class Server:
    def __init__(
        self, models: Models, engine: Engine, timeout: float, load: Callable[[str, Path], Served] | None = None
    ):
        self.models, self.engine, self.timeout, self._load = models, engine, timeout, load
        self.grammars = Grammars()
        self.metrics = Metrics(engine)
        self.is_draining = False
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
        told = (asked.top_logprobs or 0) if asked.logprobs else None
        most = asked.max_completion_tokens or asked.max_tokens
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        shape = ChatShape(served, has_tools, bool(asked.logprobs))
        stops = [] if grammar is not None else [*(asked.stops or served.defaults.stops)]
        if has_tools and asked.parallel_tool_calls is False:
            stops.append(CALL_END)  # a call is read without it, too
        answer = Answer(served.encoder.tokenizer, stops)
        return Reply(self, asked, shape, self._job(served, asked, prompt, most, told, grammar), answer)

    async def complete(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _body(request))
        _check_stream(asked)
        served = self._served(asked.model)
        prompt = await self._rendered(lambda: self._text_prompt(served, asked.one_prompt, "prompt"))
        shape = CompletionShape(served, asked.logprobs is not None)
        answer = Answer(served.encoder.tokenizer, asked.stops or served.defaults.stops, prompt)
        job = self._job(served, asked, prompt, asked.max_tokens or COMPLETION_TOKENS, asked.logprobs)
        return Reply(self, asked, shape, job, answer)

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
            raise _ended("timeout") from None
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
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models.served]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._served(request.path_params["name"]).name))

    async def health(self, _: Request) -> Response:
        is_well = self.engine.is_alive and not self.is_draining
        return JSONResponse({"status": "ok" if is_well else "unavailable"}, 200 if is_well else 503)

    async def describe(self, _: Request) -> Response:
        return JSONResponse(description(list(self.models.served), with_loading=self._load is not None))

    async def show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    # From a request to a job

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.models.created, "owned_by": "tunesmith"}

    def _served(self, name: str, param: str = "model") -> Served:
        served = self.models.served.get(name)
        if served is None:
            known = ", ".join(self.models.served)
            raise ApiError(
                404, f"{param}: there is no such model; there are {known}.", param=param, code="model_not_found"
            )
        return served

    async def _between_steps(self, work: Callable[[], Made]) -> Made:
        if self.is_draining:
            raise _going_away()
        try:
            return await asyncio.wrap_future(self.engine.between_steps(work))
        except Busy:
            raise _too_many() from None
        except asyncio.CancelledError:
            if self.engine.is_alive:  # it is this request that was cancelled
                raise
            raise _going_away() from None

    async def _rendered(self, work: Callable[[], Made]) -> Made:
        if self.is_draining:
            raise _going_away()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.renderer, work)
        except RecordError as error:
            raise ApiError(400, f"{error.reason}.", param="messages") from None
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _compiled(self, work: Callable[[], Made]) -> Made:
        """Beside all others, whose prompts do not wait for it."""
        if self.is_draining:
            raise _going_away()
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.get_running_loop().run_in_executor(self.compiler, work)
        except TimeoutError:
            raise _ended("timeout") from None

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
        """Before anything is tokenized: so many characters have more tokens than there is room for."""
        if characters > self.engine.limits.length * self._longest:
            raise _too_long(f"the prompt has {characters:,} characters", self.engine.limits.length, param)

    def _job(
        self,
        served: Served,
        asked: Common,
        prompt: list[int],
        most: int | None,
        told: int | None,
        grammar: Grammar | None = None,
    ) -> Job:
        limit = min(self.engine.limits.length, self.engine.limits.cache_tokens)
        if not prompt:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        room = limit - len(prompt)
        if room < (most or 1):
            wanted = f" and {most:,} are asked for" if most else ""
            param = "messages" if isinstance(asked, ChatRequest) else "prompt"
            raise _too_long(f"the prompt has {len(prompt):,} tokens{wanted}", limit, param)
        return Job(
            model=served,
            prompt=prompt,
            max_tokens=most or served.defaults.longest(len(prompt), room),
            stop_ids=served.stop_ids,
            take=lambda _: False,
            end=lambda _: None,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            top_logprobs=told,
            deadline=time.monotonic() + self.timeout,
            grammar=grammar,
            decoding=replace(served.defaults.decoding, **asked.decoding),
        )


class Reply(Response):
    """The answer to one request, whole or streamed. However it ends, its job has left the engine then."""

    def __init__(self, server: Server, asked: Common, shape: Shape, job: Job, answer: Answer):
        self.server, self.asked, self.shape, self.job, self.answer = server, asked, shape, job, answer
        self.background = None
        self._began = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._submitted()
        watch = asyncio.create_task(_until_gone(receive, events))
        try:
            if self.asked.stream:
                await self._stream(events, scope, receive, send)
            else:
                response = await self._whole(events)
                if response is not None:
                    await asyncio.wait_for(response(scope, receive, send), READ_SECONDS)
        finally:
            watch.cancel()
            self.server.engine.cancel(self.job)

    def _submitted(self) -> asyncio.Queue:
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def tell(event: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everyone who waits
                loop.call_soon_threadsafe(events.put_nowait, event)

        def take(token: Token) -> bool:
            piece = self.answer.push(token)
            if piece is not None:
                tell(piece)
            return self.answer.is_stopped

        def end(reason: Reason) -> None:
            try:
                piece = self.answer.rest() if reason in ("stop", "length") else None
            except Exception as error:  # of the tokenizer's decoder; in the engine's thread, which must go on
                log.error("an answer failed: %s", type(error).__name__)
                piece, reason = None, "failed"
            if piece is not None:
                tell(piece)
            tell(reason)

        self.job.take, self.job.end = take, end
        try:
            self.server.engine.submit(self.job)
        except Busy:
            if self.server.is_draining or not self.server.engine.is_alive:
                raise _going_away() from None
            raise _too_many() from None
        return events

    async def _pieces(self, events: asyncio.Queue) -> AsyncIterator[Piece | Reason]:
        """The pieces, and last how it ended; nothing more once the client has gone."""
        first = True
        while True:
            event = await events.get()
            if event is GONE:
                return
            if first:
                self.server.metrics.first_token(time.monotonic() - self._began)
                first = False
            yield event
            if not isinstance(event, Piece):
                return

    async def _whole(self, events: asyncio.Queue) -> Response | None:
        pieces: list[Piece] = []
        async for event in self._pieces(events):
            if isinstance(event, Piece):
                pieces.append(event)
            elif event in ("stop", "length"):
                return JSONResponse(self.shape.whole(pieces, event, self._usage()))
            else:
                return _answer(_ended(event))
        return None

    async def _stream(self, events: asyncio.Queue, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        begun = False

        async def say(data: str) -> None:
            nonlocal begun
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            message = {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
            await asyncio.wait_for(send(message), READ_SECONDS)

        with_usage = bool(self.asked.stream_options and self.asked.stream_options.include_usage)
        try:
            async for event in self._pieces(events):
                if not isinstance(event, Piece) and event not in ("stop", "length"):
                    if not begun:
                        await _answer(_ended(event))(scope, receive, send)
                        return
                    await say(json.dumps(_ended(event).body()))
                    continue
                for chunk in self.shape.chunks(event):
                    await say(json.dumps(chunk | ({"usage": None} if with_usage else {})))
                if not isinstance(event, Piece):
                    if with_usage:
                        await say(json.dumps(self.shape.last(self._usage())))
                    await say("[DONE]")
            if begun:
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), READ_SECONDS)
        except TimeoutError:
            log.info("a client that does not read its answer is left")  # returning closes the connection

    def _usage(self) -> dict[str, int]:
        asked, made = len(self.job.prompt), self.job.generated
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


class Shape:
    """How an endpoint writes answers."""

    prefix = ""
    object, chunk_object = "", ""

    def __init__(self, served: Served):
        self.served = served
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, pieces: list[Piece], reason: str, usage: dict[str, int]) -> dict[str, Any]:
        made = self._around(self.object, [self._choice(pieces, reason)])
        return made | {"usage": usage}

    def chunks(self, event: Piece | str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        return self._around(self.chunk_object, []) | {"usage": usage}

    def _choice(self, pieces: list[Piece], reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices}

    def _said(self, token: int) -> str:
        """As it goes on from another one: some tokenizers strip the space before the first word of what they decode."""
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
            said, calls = tool_calls(text)
            if calls:
                message |= {"content": said or None, "tool_calls": calls}
                reason = _reason_of_calls(reason)
        logprobs = self._logprobs(pieces)
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def chunks(self, event: Piece | str) -> list[dict[str, Any]]:
        """With tools, text from the beginning of a call on is kept until the end, when it is known to be one."""
        made = [] if self._is_begun else [self._chunk({"role": "assistant", "content": ""}, None, None)]
        self._is_begun = True
        if isinstance(event, Piece):
            text = self._not_held(event.text) if self.has_tools else event.text
            logprobs = self._logprobs([event])
            return [*made, self._chunk({"content": text}, logprobs, None)] if text or logprobs else made
        said, calls = tool_calls(self._held)
        if said:
            made.append(self._chunk({"content": said}, None, None))
        if calls:
            listed = [{"index": number, **call} for number, call in enumerate(calls)]
            made.append(self._chunk({"tool_calls": listed}, None, None))
            event = _reason_of_calls(event)
        return [*made, self._chunk({}, None, event)]

    def _not_held(self, text: str) -> str:
        text, self._held = self._held + text, ""
        begun = text.find(CALL)
        if begun < 0:
            sizes = range(min(len(CALL) - 1, len(text)), 0, -1)
            begun = next((len(text) - size for size in sizes if CALL.startswith(text[-size:])), len(text))
        self._held = text[begun:]
        return text[:begun]

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
        said = self._said(token)
        whole = "\ufffd" not in said  # else it is a part of a character, and which bytes is not told
        return {"token": said, "logprob": _finite(logprob), "bytes": list(said.encode()) if whole else None}


def _reason_of_calls(reason: str) -> str:
    """An answer that was cut by its length may lack a call, or a part of one."""
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
        said, offsets = [self._said(token.id) for token in tokens], []
        for one in said:
            offsets.append(self._offset)
            self._offset += len(one)
        return {
            "tokens": said,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{self._said(i): _finite(value) for i, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


KNOWN = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/health",
    "/metrics",
    "/openapi.json",
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


async def _until_gone(receive: Receive, events: asyncio.Queue) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(GONE)


def _answer(error: ApiError) -> JSONResponse:
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
    own = dict(headers.get(error.status, {}))
    if error.status in (408, 413):
        own["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.body(), error.status, own)


def _ended(reason: str) -> ApiError:
    if reason == "timeout":
        return ApiError(504, "The answer took longer than this server allows.", code="timeout")
    if reason == "cancelled":
        return _going_away()
    if reason == "not followed":
        message = "response_format: the schema is too intricate for this answer to be held to it; give a simpler one."
        return ApiError(400, message, param="response_format")
    return ApiError(500, "The model failed on this request.")


def _going_away() -> ApiError:
    return ApiError(503, "The server is going away.", code="going_away")


def _too_many() -> ApiError:
    message = "Too many requests are waiting; try again soon."
    return ApiError(429, message, code="queue_full", kind="rate_limit_error")


def _too_long(what: str, limit: int, param: str) -> ApiError:
    message = f"This server holds {limit:,} tokens of a prompt and its answer together; {what}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _told(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


def _refused(_: Request, error: Exception) -> Response:
    """Starlette's own: no such path, another method."""
    assert isinstance(error, HTTPException)
    message = {404: "There is no such path.", 405: "This path is not for that method."}.get(error.status_code)
    made = ApiError(error.status_code, message or str(error.detail))
    return JSONResponse(made.body(), error.status_code, headers=error.headers)


def _failed(_: Request, error: Exception) -> Response:
    return _answer(ApiError(500, "Something unexpected happened."))


def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _longest_token(served: Served) -> int:
    return max(map(len, served.encoder.tokenizer.get_vocab()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _host(header: str) -> str:
    """Without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _finite(value: float | None) -> float | None:
    return value if value is None or value > -9999.0 else -9999.0
