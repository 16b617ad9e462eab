"""The HTTP side: OpenAI's endpoints (`endpoints`) behind a guard (`guard`), as one application. Nothing that a client
wrote, and nothing that a model answered, is logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from tunesmith.serve.endpoints import Endpoints
from tunesmith.serve.engine import Engine
from tunesmith.serve.guard import Access, Guard
from tunesmith.serve.metrics import Metrics
from tunesmith.serve.models import Models, Served
from tunesmith.serve.protocol import ApiError
from tunesmith.serve.refusals import client_left, failed, refused, unknown_route
from tunesmith.serve.service import Service


def make_app(
    models: Models,
    engine: Engine,
    access: Access,
    *,
    timeout: float,
    load: Callable[[str, Path], Served] | None = None,
) -> Guard:
    """The application over these models. `load` reads an adapter in the engine's thread; where it is None, adapters
    stay as they are."""
    service = Service(engine, Metrics(engine))
    endpoints = Endpoints(models, service, timeout, load)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)
            for pool in (endpoints.renderer, endpoints.compiler):
                pool.shutdown(wait=False, cancel_futures=True)

    changing = [
        Route("/v1/load_lora_adapter", endpoints.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", endpoints.unload_adapter, methods=["POST"]),
    ]
    app = Starlette(
        routes=[
            *(changing if load else ()),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.complete, methods=["POST"]),
            Route("/v1/embeddings", endpoints.embed, methods=["POST"]),
            Route("/v1/models", endpoints.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.show_model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/metrics", endpoints.show_metrics, methods=["GET"]),
            Route("/openapi.json", endpoints.describe, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: refused,
            HTTPException: unknown_route,
            ClientDisconnect: client_left,
            Exception: failed,
        },
        lifespan=lifespan,
    )
    return Guard(app, access, service)
