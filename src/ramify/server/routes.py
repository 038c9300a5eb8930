"""The table of endpoints, and the OpenAPI document made from it.

A new endpoint is a handler in `<api>/endpoints.py`, a request type in `<api>/protocol.py`, and a row
here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from ramify import __version__
from ramify.server.anthropic import endpoints as anthropic
from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.context import RequestContext
from ramify.server.http.wire import json_response
from ramify.server.openai import endpoints as openai
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from ramify.server.operations import cache_admin
from ramify.server.operations.cache_admin import PinRequest

Handler = Callable[[RequestContext], Awaitable[Response]]
JSON, TEXT = "application/json", "text/plain"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path: how it is served, and how the OpenAPI document describes it.

    Args:
        body: type of the request's body.
        streams: the response can be a stream of server-sent events.
        admin: needs the operator's key.
        is_open: needs no key; answers at any time.
        while_draining: is served while the server shuts down.
        dialect: form of errors.
        parameters: names and types of the query's parameters.
        media: type of the response's body.
    """

    path: str
    method: Literal["GET", "POST", "DELETE"]
    handler: Handler
    summary: str
    body: type | None = None
    streams: bool = False
    admin: bool = False
    is_open: bool = False
    while_draining: bool = False
    dialect: Literal["openai", "anthropic"] = "openai"
    parameters: tuple[tuple[str, str], ...] = ()
    media: str = JSON


async def livez(context: RequestContext) -> Response:
    """GET /livez: 503 when the process must be restarted."""
    return _health_response(context, context.health.liveness_failure())


async def readyz(context: RequestContext) -> Response:
    """GET /readyz: 503 when requests should go to another server."""
    return _health_response(context, context.health.unready_reason())


def _health_response(context: RequestContext, failure: str | None) -> Response:
    """The status for everybody; what the engine does at the moment for the admin."""
    payload: dict[str, Any] = {"status": failure or "ok"}
    if context.caller.is_admin:
        payload |= context.health.as_json()
    if failure is None:
        return json_response(payload)
    return json_response(payload, status=503, headers={"Retry-After": "1"})


async def version(_: RequestContext) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def openapi(_: RequestContext) -> Response:
    """GET /openapi.json."""
    return json_response(openapi_document(ENDPOINTS))


_open = partial(Endpoint, is_open=True)
_admin = partial(Endpoint, admin=True)
_anthropic = partial(Endpoint, dialect="anthropic")
_CLEAR = (
    ("prefix", "string"),
    ("tenant", "string"),
    ("salt", "string"),
    ("older_than", "number"),
    ("pins", "boolean"),
)

# fmt: off
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/chat/completions", "POST", openai.chat_completions, "Answer a conversation.", ChatRequest, streams=True),
    Endpoint("/v1/completions", "POST", openai.completions, "Continue texts.", CompletionRequest, streams=True),
    Endpoint("/v1/responses", "POST", openai.responses, "Answer, and store the response.", ResponsesRequest, streams=True),
    Endpoint("/v1/responses/{name}", "GET", openai.get_response, "A stored response."),
    Endpoint("/v1/responses/{name}", "DELETE", openai.delete_response, "Delete a stored response."),
    _anthropic("/v1/messages", "POST", anthropic.messages, "Answer, in Anthropic's form.", MessageRequest, streams=True),
    _anthropic("/v1/messages/count_tokens", "POST", anthropic.count_tokens, "Count a prompt's tokens.", CountRequest),
    Endpoint("/v1/models", "GET", openai.list_models, "The models that are served."),
    Endpoint("/v1/models/{name:path}", "GET", openai.get_model, "A model."),
    Endpoint("/tokenize", "POST", openai.tokenize, "Text to token ids.", TokenizeRequest),
    Endpoint("/detokenize", "POST", openai.detokenize, "Token ids to text.", DetokenizeRequest),
    _admin("/v1/cache", "GET", cache_admin.stats, "Statistics of the cache."),
    _admin("/v1/cache", "DELETE", cache_admin.clear, "Evict everything, or what all parameters match.", parameters=_CLEAR),
    _admin("/v1/cache/tree", "GET", cache_admin.tree, "The radix tree's top nodes.", parameters=(("max_nodes", "integer"),)),
    _admin("/v1/cache/pins", "GET", cache_admin.pins, "Pinned prefixes."),
    _admin("/v1/cache/pins", "POST", cache_admin.pin, "Pin a prefix.", PinRequest),
    _admin("/v1/cache/pins/{name}", "DELETE", cache_admin.unpin, "Unpin a prefix."),
    Endpoint("/v1/cache/explain", "POST", cache_admin.explain, "What a request to any path above would hit; runs nothing.", dict),
    _admin("/reset_prefix_cache", "POST", cache_admin.reset, "Evict everything."),
    _admin("/metrics", "GET", cache_admin.metrics, "Metrics for Prometheus.", media=TEXT, while_draining=True),
    _open("/livez", "GET", livez, "Whether the process is alive."),
    _open("/readyz", "GET", readyz, "Whether requests are served."),
    _open("/health", "GET", readyz, "Same as /readyz."),
    _open("/ping", "GET", readyz, "Same as /readyz."),
    _open("/version", "GET", version, "The server's version."),
    _open("/openapi.json", "GET", openapi, "This document."),
)
# fmt: on


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Describe endpoints as an OpenAPI 3.1 document."""
    kinds = list({row.body: None for row in endpoints if row.body is not None})
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {}, "type": {"type": "string"}},
    }
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ramify",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs, with the reason for every cache miss.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {endpoint.media: {"schema": {}}}
    if endpoint.streams:
        answer["text/event-stream"] = {"schema": {}}
    error = {
        "description": "what is wrong with the request, or with the server",
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary + " Needs the admin key." * endpoint.admin,
        "responses": {
            "200": {"description": "the answer", "content": answer},
            "default": error,
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in (piece[1:-1] for piece in path.split("/") if piece.startswith("{"))
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": kind}}
        for name, kind in endpoint.parameters
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        schema, _ = msgspec.json.schema_components(
            [endpoint.body], ref_template="#/components/schemas/{name}"
        )
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema[0]}}}
    if endpoint.is_open:
        operation["security"] = []
    return operation
