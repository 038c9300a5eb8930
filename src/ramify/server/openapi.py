"""The server's OpenAPI document, made of the types that requests are read with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify import __version__

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    path: str
    method: str
    summary: str
    body: type | None = None
    streams: bool = False
    parameters: tuple[tuple[str, str], ...] = ()  # of the query: name and type
    media: str = JSON  # of its answer
    is_open: bool = False  # needs no key


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1 for these operations."""
    kinds = list({one.body: None for one in endpoints if one.body is not None})
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {
        "type": "object",
        "properties": {"error": {}, "type": {"type": "string"}},
    }
    paths: dict[str, Any] = {}
    for one in endpoints:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path)
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


def _operation(one: Endpoint, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = {one.media: {"schema": {}}}
    if one.streams:
        answer["text/event-stream"] = {"schema": {}}
    error = {
        "description": "what is wrong with the request, or with the server",
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    told: dict[str, Any] = {
        "summary": one.summary,
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
        {"name": name, "in": "query", "schema": {"type": kind}} for name, kind in one.parameters
    ]
    if parameters:
        told["parameters"] = parameters
    if one.body is not None:
        schema, _ = msgspec.json.schema_components(
            [one.body], ref_template="#/components/schemas/{name}"
        )
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schema[0]}}}
    if one.is_open:
        told["security"] = []
    return told
