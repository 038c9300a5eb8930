"""What the server answers, path by path: the content of its OpenAPI document."""

from __future__ import annotations

from ramify.server.anthropic_types import CountRequest, MessageRequest
from ramify.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ramify.server.openapi import Operation
from ramify.server.operate import PinRequest
from ramify.server.responses import ResponsesRequest

_TEXT = "text/plain"

OPERATIONS: tuple[Operation, ...] = (
    Operation("/v1/chat/completions", "POST", "Answer a conversation.", ChatRequest, streams=True),
    Operation("/v1/completions", "POST", "Go on with texts.", CompletionRequest, streams=True),
    Operation("/v1/responses", "POST", "Answer, and keep it.", ResponsesRequest, streams=True),
    Operation("/v1/responses/{name}", "GET", "An answer that was kept."),
    Operation("/v1/responses/{name}", "DELETE", "Forget an answer."),
    Operation("/v1/messages", "POST", "Answer, as Anthropic does.", MessageRequest, streams=True),
    Operation("/v1/messages/count_tokens", "POST", "Count the tokens of it.", CountRequest),
    Operation("/v1/models", "GET", "The model that is served."),
    Operation("/v1/models/{name:path}", "GET", "One model."),
    Operation("/tokenize", "POST", "Text to token ids.", TokenizeRequest),
    Operation("/detokenize", "POST", "Token ids to text.", DetokenizeRequest),
    Operation("/v1/cache", "GET", "Statistics of the cache; for admins."),
    Operation(
        "/v1/cache",
        "DELETE",
        "Evict: everything, or what all parameters given say; for admins.",
        parameters=(
            ("prefix", "string"),
            ("tenant", "string"),
            ("salt", "string"),
            ("older_than", "number"),
        ),
    ),
    Operation(
        "/v1/cache/tree",
        "GET",
        "What is cached; for admins.",
        parameters=(("max_nodes", "integer"),),
    ),
    Operation("/v1/cache/pins", "GET", "What is kept from eviction; for admins."),
    Operation("/v1/cache/pins", "POST", "Keep a prefix; for admins.", PinRequest),
    Operation("/v1/cache/pins/{name}", "DELETE", "Keep it no longer; for admins."),
    Operation(
        "/v1/cache/explain",
        "POST",
        "What a request of any path above would find in the cache; runs nothing.",
        dict,
    ),
    Operation("/reset_prefix_cache", "POST", "Evict everything; for admins."),
    Operation("/metrics", "GET", "Numbers for Prometheus; for admins.", media=_TEXT),
    Operation("/livez", "GET", "Whether the process lives.", is_open=True),
    Operation("/readyz", "GET", "Whether requests are served.", is_open=True),
    Operation("/health", "GET", "As /readyz.", is_open=True),
    Operation("/ping", "GET", "As /readyz.", is_open=True),
    Operation("/version", "GET", "The server's version.", is_open=True),
    Operation("/openapi.json", "GET", "This document.", is_open=True),
)
