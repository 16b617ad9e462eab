"""Why a request is not answered, and the response that says so."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunesmith.serve.protocol import ApiError


def ended(reason: str) -> ApiError:
    """The error for an answer that ended by this `Reason` of the engine's before it was done."""
    if reason == "timeout":
        return ApiError(504, "The answer took longer than this server allows.", code="timeout")
    if reason == "cancelled":
        return going_away()
    if reason == "not followed":
        message = "response_format: the schema is too intricate for this answer to be held to it; give a simpler one."
        return ApiError(400, message, param="response_format")
    return ApiError(500, "The model failed on this request.")


def going_away() -> ApiError:
    return ApiError(503, "The server is going away.", code="going_away")


def too_many() -> ApiError:
    message = "Too many requests are waiting; try again soon."
    return ApiError(429, message, code="queue_full", kind="rate_limit_error")


def too_long(what: str, limit: int, param: str) -> ApiError:
    message = f"This server holds {limit:,} tokens of a prompt and its answer together; {what}."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def as_response(error: ApiError) -> JSONResponse:
    """The error as JSON, with the headers that go with its status."""
    by_status = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
    headers = dict(by_status.get(error.status, {}))
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.body(), error.status, headers)


def refused(_: Request, error: Exception) -> Response:
    """The response to an ApiError that an endpoint raised."""
    assert isinstance(error, ApiError)
    return as_response(error)


def unknown_route(_: Request, error: Exception) -> Response:
    """The response to an error of Starlette's own: no such path, another method."""
    assert isinstance(error, HTTPException)
    message = {404: "There is no such path.", 405: "This path is not for that method."}.get(error.status_code)
    body = ApiError(error.status_code, message or str(error.detail)).body()
    return JSONResponse(body, error.status_code, headers=error.headers)


def failed(_: Request, error: Exception) -> Response:
    """The response to an error that nobody foresaw."""
    return as_response(ApiError(500, "Something unexpected happened."))


def client_left(_: Request, __: Exception) -> Response:
    """What is logged of a request whose client has gone; nobody reads it."""
    return Response(status_code=499)
