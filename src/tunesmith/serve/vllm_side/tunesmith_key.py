"""The key on every path of vLLM's server: by itself vLLM asks for it below /v1 and a few others alone, and answers
prompts at /invocations without.

vLLM's own Python imports this file (`--middleware`) from a folder where nothing else lies, and so it needs the standard
library alone.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = ("/health",)
"""As with Tunesmith's own server."""
REFUSAL = b'{"error": {"message": "The key is missing or wrong.", "type": "invalid_request_error", "code": 401}}'


class KeyEverywhere:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        is_asked = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if is_asked and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await _refuse(scope, send)
                return
        await self.app(scope, receive, send)


async def _refuse(scope: dict[str, Any], send: Callable[..., Any]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})
