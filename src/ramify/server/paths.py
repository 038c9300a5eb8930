"""What the server answers, path by path: the content of its OpenAPI document."""

from __future__ import annotations

from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from ramify.server.openapi import Endpoint
from ramify.server.operations.cache_admin import PinRequest

_TEXT = "text/plain"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("/v1/chat/completions", "POST", "Answer a conversation.", ChatRequest, streams=True),
    Endpoint("/v1/completions", "POST", "Go on with texts.", CompletionRequest, streams=True),
    Endpoint("/v1/responses", "POST", "Answer, and keep it.", ResponsesRequest, streams=True),
    Endpoint("/v1/responses/{name}", "GET", "An answer that was kept."),
    Endpoint("/v1/responses/{name}", "DELETE", "Forget an answer."),
    Endpoint("/v1/messages", "POST", "Answer, as Anthropic does.", MessageRequest, streams=True),
    Endpoint("/v1/messages/count_tokens", "POST", "Count the tokens of it.", CountRequest),
    Endpoint("/v1/models", "GET", "The model that is served."),
    Endpoint("/v1/models/{name:path}", "GET", "One model."),
    Endpoint("/tokenize", "POST", "Text to token ids.", TokenizeRequest),
    Endpoint("/detokenize", "POST", "Token ids to text.", DetokenizeRequest),
    Endpoint("/v1/cache", "GET", "Statistics of the cache; for admins."),
    Endpoint(
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
    Endpoint(
        "/v1/cache/tree",
        "GET",
        "What is cached; for admins.",
        parameters=(("max_nodes", "integer"),),
    ),
    Endpoint("/v1/cache/pins", "GET", "What is kept from eviction; for admins."),
    Endpoint("/v1/cache/pins", "POST", "Keep a prefix; for admins.", PinRequest),
    Endpoint("/v1/cache/pins/{name}", "DELETE", "Keep it no longer; for admins."),
    Endpoint(
        "/v1/cache/explain",
        "POST",
        "What a request of any path above would find in the cache; runs nothing.",
        dict,
    ),
    Endpoint("/reset_prefix_cache", "POST", "Evict everything; for admins."),
    Endpoint("/metrics", "GET", "Numbers for Prometheus; for admins.", media=_TEXT),
    Endpoint("/livez", "GET", "Whether the process lives.", is_open=True),
    Endpoint("/readyz", "GET", "Whether requests are served.", is_open=True),
    Endpoint("/health", "GET", "As /readyz.", is_open=True),
    Endpoint("/ping", "GET", "As /readyz.", is_open=True),
    Endpoint("/version", "GET", "The server's version.", is_open=True),
    Endpoint("/openapi.json", "GET", "This document.", is_open=True),
)
