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
from starlette.requests import Request
from starlette.responses import Response

from ramify import __version__
from ramify.server import model_list, sessions
from ramify.server.anthropic import endpoints as anthropic
from ramify.server.anthropic.protocol import VERSION_HEADER, CountRequest, MessageRequest
from ramify.server.batches import anthropic_endpoints as message_batches
from ramify.server.batches import endpoints as batches
from ramify.server.batches import file_endpoints as files
from ramify.server.batches.protocol import BatchRequest, MessageBatchRequest
from ramify.server.context import RequestContext
from ramify.server.http.wire import EVENT_STREAM, NDJSON, Dialect, json_response
from ramify.server.ollama import embed as ollama_embed
from ramify.server.ollama import endpoints as ollama
from ramify.server.ollama.protocol import (
    EmbeddingRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from ramify.server.openai import embeddings
from ramify.server.openai import endpoints as openai
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from ramify.server.openai.responses import conversations
from ramify.server.openai.responses import endpoints as responses
from ramify.server.openai.responses.protocol import (
    CompactRequest,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
    InputTokensRequest,
    ResponsesRequest,
)
from ramify.server.operations import activity_report, cache_admin, loads, tree_branches, weights
from ramify.server.operations.cache_admin import PinRequest
from ramify.server.page import endpoints as page
from ramify.server.prefixes import endpoints as prefixes
from ramify.server.prefixes.definition import PrefixRequest

Handler = Callable[[RequestContext], Awaitable[Response]]
JSON, TEXT, HTML = "application/json", "text/plain", "text/html"
JSONL = files.JSONL


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path: how it is served, and how the OpenAPI document describes it.

    Args:
        body: type of the request's body.
        streams: the response can be a stream: of server-sent events, Ollama's of lines of JSON.
        admin: needs the operator's key.
        is_open: needs no key; answers at any time.
        while_draining: is served while the server shuts down.
        api: form of errors and pings; by header: Anthropic's for a request with its version header.
        parameters: names and types of the query's parameters.
        media: type of the response's body.
        aliases: further paths, which the OpenAPI document leaves out.
        prompt_field: of the body, which the error for a prompt that is too long names; None: as raised.
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
    api: Dialect | Literal["by_header"] = "openai"
    parameters: tuple[tuple[str, str], ...] = ()
    media: str = JSON
    aliases: tuple[str, ...] = ()
    prompt_field: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, the path without /v1 (for clients whose base URL lacks it), and the aliases."""
        without_version = self.path.removeprefix("/v1")
        is_api = without_version != self.path and not self.path.startswith("/v1/cache")
        return (self.path, *((without_version,) if is_api else ()), *self.aliases)

    def dialect_of(self, request: Request) -> Dialect:
        """The API in whose form a request is answered, errors and pings included."""
        if self.api == "by_header":
            return "anthropic" if VERSION_HEADER in request.headers else "openai"
        return self.api


async def livez(context: RequestContext) -> Response:
    """GET /livez: 503 when the process must be restarted."""
    return _health_response(context, context.health.liveness_failure())


async def readyz(context: RequestContext) -> Response:
    """GET /readyz: 503 when requests should go to another server."""
    return _health_response(context, context.health.unready_reason())


def _health_response(context: RequestContext, failure: str | None) -> Response:
    """The status; for the admin, the engine's state as well."""
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
_anthropic = partial(Endpoint, api="anthropic")
_ollama = partial(Endpoint, api="ollama")
_PAGE = (("limit", "integer"), ("order", "string"), ("after", "string"))

# fmt: off
ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/chat/completions", "POST", openai.chat_completions, "Answer a conversation.", ChatRequest, streams=True),
    Endpoint("/v1/completions", "POST", openai.completions, "Continue texts.", CompletionRequest, streams=True, prompt_field="prompt"),
    Endpoint("/v1/responses", "POST", responses.create_response, "Answer, and store the response.", ResponsesRequest, streams=True, prompt_field="input"),
    Endpoint("/v1/responses/input_tokens", "POST", responses.count_input_tokens, "Count a prompt's tokens.", InputTokensRequest, prompt_field="input"),
    Endpoint("/v1/responses/compact", "POST", responses.compact_response, "Summarise a conversation.", CompactRequest, prompt_field="input"),
    Endpoint("/v1/responses/{name}", "GET", responses.get_response, "A stored response, or its events.", streams=True, parameters=(("stream", "boolean"), ("starting_after", "integer"))),
    Endpoint("/v1/responses/{name}", "DELETE", responses.delete_response, "Delete a stored response."),
    Endpoint("/v1/responses/{name}/cancel", "POST", responses.cancel_response, "400: nothing runs in the background."),
    Endpoint("/v1/responses/{name}/input_items", "GET", responses.list_input_items, "The items before a response.", parameters=_PAGE),
    Endpoint("/v1/conversations", "POST", conversations.create_conversation, "Begin a conversation.", ConversationRequest),
    Endpoint("/v1/conversations/{name}", "GET", conversations.get_conversation, "A conversation."),
    Endpoint("/v1/conversations/{name}", "POST", conversations.update_conversation, "Replace a conversation's metadata.", ConversationUpdate),
    Endpoint("/v1/conversations/{name}", "DELETE", conversations.delete_conversation, "Delete a conversation and its items."),
    Endpoint("/v1/conversations/{name}/items", "GET", conversations.list_items, "A conversation's items.", parameters=_PAGE),
    Endpoint("/v1/conversations/{name}/items", "POST", conversations.create_items, "Append items.", ConversationItemsRequest),
    Endpoint("/v1/conversations/{name}/items/{item}", "GET", conversations.get_item, "An item."),
    Endpoint("/v1/conversations/{name}/items/{item}", "DELETE", conversations.delete_item, "Delete an item."),
    Endpoint("/v1/files", "POST", files.create_file, "Upload a file of requests: multipart, with the fields purpose and file.", api="by_header"),
    Endpoint("/v1/files", "GET", files.list_files, "The caller's files.", parameters=(*_PAGE, ("purpose", "string")), api="by_header"),
    Endpoint("/v1/files/{name}", "GET", files.get_file, "A file.", api="by_header"),
    Endpoint("/v1/files/{name}", "DELETE", files.delete_file, "Delete a file that no batch reads.", api="by_header"),
    Endpoint("/v1/files/{name}/content", "GET", files.file_content, "A file's bytes.", media=JSONL, api="by_header"),
    Endpoint("/v1/batches", "POST", batches.create_batch, "Answer the requests of a file at low priority.", BatchRequest),
    Endpoint("/v1/batches", "GET", batches.list_batches, "The caller's batches.", parameters=(("limit", "integer"), ("after", "string"))),
    Endpoint("/v1/batches/{name}", "GET", batches.get_batch, "A batch: how far it is, and the files of its results."),
    Endpoint("/v1/batches/{name}/cancel", "POST", batches.cancel_batch, "Cancel a batch; results that are there stay."),
    _anthropic("/v1/messages", "POST", anthropic.messages, "Answer, in Anthropic's form.", MessageRequest, streams=True),
    _anthropic("/v1/messages/count_tokens", "POST", anthropic.count_tokens, "Count a prompt's tokens.", CountRequest),
    _anthropic("/v1/messages/batches", "POST", message_batches.create_batch, "Answer many requests at low priority.", MessageBatchRequest),
    _anthropic("/v1/messages/batches", "GET", message_batches.list_batches, "The caller's batches.", parameters=(("limit", "integer"), ("after_id", "string"), ("before_id", "string"))),
    _anthropic("/v1/messages/batches/{name}", "GET", message_batches.get_batch, "A batch, and how far it is."),
    _anthropic("/v1/messages/batches/{name}", "DELETE", message_batches.delete_batch, "Delete a batch that has ended."),
    _anthropic("/v1/messages/batches/{name}/cancel", "POST", message_batches.cancel_batch, "Cancel a batch; results that are there stay."),
    _anthropic("/v1/messages/batches/{name}/results", "GET", message_batches.batch_results, "A line for each request.", media=message_batches.JSONL),
    Endpoint("/v1/sessions/{name:path}", "DELETE", sessions.delete_session, "End a session: its pages are evicted first.", api="by_header"),
    Endpoint("/v1/prefixes", "GET", prefixes.list_prefixes, "Named prefixes: the tenant's own and public ones.", api="by_header"),
    Endpoint("/v1/prefixes", "POST", prefixes.create_prefix, "Name, compute and pin the beginning of conversations.", PrefixRequest, api="by_header"),
    Endpoint("/v1/prefixes/{name:path}", "GET", prefixes.get_prefix, "A named prefix with its definition.", api="by_header"),
    Endpoint("/v1/prefixes/{name:path}", "DELETE", prefixes.delete_prefix, "Forget a name, and end the pins of its pages.", api="by_header"),
    Endpoint("/v1/models", "GET", model_list.list_models, "The models that are served.", api="by_header", parameters=model_list.PAGE_PARAMETERS),
    Endpoint("/v1/models/{name:path}", "GET", model_list.get_model, "A model.", api="by_header"),
    _ollama("/api/chat", "POST", ollama.chat, "Answer a conversation, in Ollama's form.", OllamaChatRequest, streams=True),
    _ollama("/api/generate", "POST", ollama.generate, "Answer a question, or continue a text.", GenerateRequest, streams=True, prompt_field="prompt"),
    _ollama("/api/embed", "POST", ollama_embed.embed, "Unit vectors of texts.", EmbedRequest, prompt_field="input"),
    _ollama("/api/embeddings", "POST", ollama_embed.embeddings, "The vector of a text.", EmbeddingRequest, prompt_field="prompt"),
    _ollama("/api/tags", "GET", ollama.tags, "The names of the model that is served."),
    _ollama("/api/ps", "GET", ollama.ps, "The same: the model is loaded."),
    _ollama("/api/show", "POST", ollama.show, "The model's template, sizes and capabilities.", ShowRequest),
    _ollama("/api/pull", "POST", ollama.unmanaged, "400: models are not managed here."),
    _ollama("/api/create", "POST", ollama.unmanaged, "400: models are not managed here."),
    _ollama("/api/push", "POST", ollama.unmanaged, "400: models are not managed here."),
    _ollama("/api/copy", "POST", ollama.unmanaged, "400: models are not managed here."),
    _ollama("/api/delete", "DELETE", ollama.unmanaged, "400: models are not managed here."),
    Endpoint("/tokenize", "POST", openai.tokenize, "Text to token ids.", TokenizeRequest),
    Endpoint("/tokenizer_info", "GET", openai.tokenizer_info, "Chat template and special tokens."),
    Endpoint("/v1/embeddings", "POST", embeddings.embeddings, "Unit vectors of texts.", EmbeddingsRequest),
    Endpoint("/v1/score", "POST", embeddings.score, "Similarities of pairs of texts.", ScoreRequest),
    Endpoint("/v1/rerank", "POST", embeddings.rerank, "Documents by similarity to a query.", RerankRequest, aliases=("/v2/rerank",)),
    Endpoint("/pooling", "POST", embeddings.embeddings, "As /v1/embeddings.", EmbeddingsRequest),
    Endpoint("/detokenize", "POST", openai.detokenize, "Token ids to text.", DetokenizeRequest),
    _admin("/v1/cache", "GET", cache_admin.stats, "Statistics of the cache."),
    _admin("/v1/cache", "DELETE", cache_admin.clear, "Evict everything, or what all parameters match.", parameters=cache_admin.CLEAR_PARAMETERS),
    _admin("/v1/cache/tree", "GET", cache_admin.tree, "The radix tree's top nodes.", parameters=(("max_nodes", "integer"),)),
    Endpoint("/v1/cache/branches", "GET", tree_branches.branches, "A part of the radix tree; a tenant sees its own.", parameters=tree_branches.PARAMETERS),
    _admin("/v1/cache/pins", "GET", cache_admin.pins, "Pinned prefixes."),
    _admin("/v1/cache/pins", "POST", cache_admin.pin, "Pin a prefix.", PinRequest),
    _admin("/v1/cache/pins/{name}", "DELETE", cache_admin.unpin, "Unpin a prefix."),
    Endpoint("/v1/cache/explain", "POST", cache_admin.explain, "What a request to any path above would hit; runs nothing.", dict),
    Endpoint("/v1/activity", "GET", activity_report.activity, "What runs, and the last ten minutes; a tenant sees its own.", while_draining=True),
    _admin("/v1/weights", "POST", weights.replace, "Replace the weights, of several engines one at a time.", weights.WeightsRequest),
    _admin("/reset_prefix_cache", "POST", cache_admin.reset, "Evict everything."),
    _admin("/v1/loads", "GET", loads.loads, "What each engine has to do, in SGLang's form.", parameters=loads.PARAMETERS, while_draining=True),
    _admin("/metrics", "GET", cache_admin.metrics, "Metrics for Prometheus.", media=TEXT, while_draining=True),
    _open("/", "GET", page.root, "The live page for a browser, else the text by which clients of Ollama know a server.", media=TEXT),
    _open("/ui", "GET", page.page, "The live page.", media=HTML, aliases=("/ui/",)),
    _open("/ui/{name}", "GET", page.asset, "A script or style of the live page.", media=HTML),
    _open("/livez", "GET", livez, "Whether the process is alive."),
    _open("/readyz", "GET", readyz, "Whether requests are served."),
    _open("/health", "GET", readyz, "Same as /readyz."),
    _open("/ping", "GET", readyz, "Same as /readyz."),
    _open("/version", "GET", version, "The server's version."),
    _open("/api/version", "GET", ollama.version, "The version of Ollama whose API this is.", api="ollama"),
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
            "description": "OpenAI's, Anthropic's and Ollama's APIs, with the reason for every cache miss.",
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
        answer[NDJSON if endpoint.api == "ollama" else EVENT_STREAM] = {"schema": {}}
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
