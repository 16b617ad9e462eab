"""What stands before every request: who is answered at all, and a line in the log without what was asked."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.serve.protocol import ApiError
from tunesmith.serve.refusals import as_response
from tunesmith.serve.service import Service

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health",)
"""Paths that are answered without a key."""
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
"""Paths that the log and the metrics name; all others are one, lest clients make as many as they like."""
log = logging.getLogger("tunesmith.serve")


@dataclass(frozen=True)
class Access:
    """Which requests are answered."""

    api_key: str | None
    checks_host: bool
    """On a loopback address: a page in a browser may have its name point there (DNS rebinding)."""


class Guard:
    """Before every request: the Host header and the key. After it: a line in the log, without what was asked."""

    def __init__(self, app: ASGIApp, access: Access, service: Service):
        self._app, self._access, self._service = app, access, service
        self._key = _digest(access.api_key) if access.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def send_noting_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            problem = self._problem(Request(scope))
            if problem:
                await as_response(problem)(scope, receive, send_noting_status)
            else:
                await self._app(scope, receive, send_noting_status)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("a request failed: %s", type(error).__name__)  # without its message, which may quote the prompt
            if status:
                return  # it cannot be taken back: the connection is closed
            await as_response(ApiError(500, "Something unexpected happened."))(scope, receive, send_noting_status)
        finally:
            path = scope["path"] if scope["path"] in KNOWN else "another path"
            self._service.metrics.count_request(path, status)
            client = (scope.get("client") or ("?",))[0]
            log.info("%s %s %s %s %.3f s", client, scope["method"][:10], path, status, time.monotonic() - began)

    def drain(self) -> None:
        """From now on new requests are refused."""
        self._service.is_draining = True

    def _problem(self, request: Request) -> ApiError | None:
        """Why this request is not answered, if it is not: a foreign host, no key, or another one."""
        if self._access.checks_host and _host(request.headers.get("host", "")) not in LOOPBACK:
            message = "The Host header must name this machine: localhost or 127.0.0.1."
            return ApiError(403, message, code="foreign_host")
        if self._key is None or request.url.path in OPEN:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return ApiError(401, "Give the API key as `Authorization: Bearer KEY`.", code="missing_api_key")
        if not hmac.compare_digest(_digest(key.strip()), self._key):
            return ApiError(401, "This API key is not the one of this server.", code="invalid_api_key")
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
