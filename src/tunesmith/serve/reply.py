"""The answer to one request on its way from the engine's thread to the client, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tunesmith.infer.sampling import Token
from tunesmith.serve.answer import Answer, Piece
from tunesmith.serve.engine import Busy, Job, Reason
from tunesmith.serve.protocol import Common
from tunesmith.serve.refusals import as_response, ended, going_away, too_many
from tunesmith.serve.service import Service
from tunesmith.serve.shapes import Shape

READ_SECONDS = 30.0
"""Seconds that a client has to take a piece of its answer; then it counts as gone."""
GONE = object()
"""The event that the client has left."""
log = logging.getLogger("tunesmith.serve")


class Reply(Response):
    """The answer to one request, whole or streamed. However it ends, its job has left the engine then."""

    def __init__(self, service: Service, asked: Common, shape: Shape, job: Job, answer: Answer):
        self.service, self.asked, self.shape, self.job, self.answer = service, asked, shape, job, answer
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
            self.service.engine.cancel(self.job)

    def _submitted(self) -> asyncio.Queue:
        """Hands the job to the engine, whose thread puts what it makes into the queue: pieces, and how it ended."""
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
            self.service.engine.submit(self.job)
        except Busy:
            if self.service.is_draining or not self.service.engine.is_alive:
                raise going_away() from None
            raise too_many() from None
        return events

    async def _pieces(self, events: asyncio.Queue) -> AsyncIterator[Piece | Reason]:
        """The pieces, and last how it ended; nothing more once the client has gone."""
        first = True
        while True:
            event = await events.get()
            if event is GONE:
                return
            if first:
                self.service.metrics.first_token(time.monotonic() - self._began)
                first = False
            yield event
            if not isinstance(event, Piece):
                return

    async def _whole(self, events: asyncio.Queue) -> Response | None:
        """The answer in one response, once it has ended; None where the client has gone."""
        pieces: list[Piece] = []
        async for event in self._pieces(events):
            if isinstance(event, Piece):
                pieces.append(event)
            elif event in ("stop", "length"):
                return JSONResponse(self.shape.whole(pieces, event, self._usage()))
            else:
                return as_response(ended(event))
        return None

    async def _stream(self, events: asyncio.Queue, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as server-sent events; an error before the first of them is a response of its own."""
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
                        await as_response(ended(event))(scope, receive, send)
                        return
                    await say(json.dumps(ended(event).body()))
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
        prompt, completion = len(self.job.prompt), self.job.generated
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def _until_gone(receive: Receive, events: asyncio.Queue) -> None:
    """Waits until the client leaves, and puts `GONE` into the queue then."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(GONE)
