"""The server's description of itself, made from the requests' own types."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from tunesmith import __version__
from tunesmith.serve.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, LoadRequest, UnloadRequest

REFUSALS = {
    "400": "the request cannot be answered as it is",
    "401": "no API key, or a wrong one",
    "403": "a foreign Host header",
    "404": "no such model",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "not sent as JSON",
    "429": "too many requests are waiting",
    "500": "the model failed",
    "503": "the server is going away",
    "504": "the answer took too long",
}


ASKED = (ChatRequest, CompletionRequest, EmbeddingRequest)


def description(models: list[str], *, with_loading: bool = False) -> dict[str, Any]:
    template = "#/components/schemas/{model}"
    kinds = [(kind, "validation") for kind in (*ASKED, *((LoadRequest, UnloadRequest) if with_loading else ()))]
    _, made = models_json_schema(kinds, ref_template=template)  # pyright: ignore[reportArgumentType]
    schemas = dict(made["$defs"])
    for request in ASKED:
        schemas[request.__name__]["properties"]["model"]["enum"] = models
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    listed = _object({"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object"}}})
    model = _object({"id": {"type": "string"}, "object": {"const": "model"}})
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": models},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "tunesmith serve", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _asked("ChatRequest", "chat.completion")},
            "/v1/completions": {"post": _asked("CompletionRequest", "text_completion")},
            "/v1/embeddings": {"post": _told("EmbeddingRequest", listed)},
            **(_loading() if with_loading else {}),
            "/v1/models": {"get": _got(listed, ("401", "403"))},
            "/v1/models/{name}": {"get": _got(model, ("401", "403", "404")) | {"parameters": [name]}},
            "/health": {"get": _got(_object({"status": {"type": "string"}}), ("403", "503"))},
            "/metrics": {"get": _got(None, ("401", "403"))},
            "/openapi.json": {"get": _got({"type": "object"}, ("401", "403"))},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _asked(request: str, kind: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{request}"}
    answer = _object({"id": {"type": "string"}, "object": {"const": kind}, "choices": {"type": "array"}})
    event = _object({"data": {"type": "string", "description": "a chunk as JSON; at the end [DONE]"}})
    content = {"application/json": {"schema": answer}, "text/event-stream": {"schema": event}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the answer, whole or as server-sent events", "content": content}}
        | _refusals(REFUSALS),
    }


def _told(request: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}
    return {"requestBody": {"required": True, "content": body}} | _got(schema, tuple(REFUSALS))


def _loading() -> dict[str, Any]:
    return {
        "/v1/load_lora_adapter": {"post": _told("LoadRequest", None)},
        "/v1/unload_lora_adapter": {"post": _told("UnloadRequest", None)},
    }


def _got(schema: dict[str, Any] | None, statuses: tuple[str, ...]) -> dict[str, Any]:
    content = (
        {"text/plain": {"schema": {"type": "string"}}} if schema is None else {"application/json": {"schema": schema}}
    )
    return {"responses": {"200": {"description": "as asked", "content": content}} | _refusals(statuses)}


def _refusals(statuses: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}
