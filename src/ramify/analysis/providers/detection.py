"""The provider whose cache a request met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ramify.analysis.corpus import StoredRequest
from ramify.analysis.providers.rules import plain_model_name
from ramify.analysis.records import LoggedRequest

DEFAULT = "openai"
_API_PROVIDERS = {
    "anthropic-messages": "anthropic",
    "openai-chat": "openai",
    "openai-completions": "openai",
    "openai-responses": "openai",
}
_MODEL_PREFIXES = (
    ("claude", "anthropic"),
    ("deepseek", "deepseek"),
    ("gemini", "gemini"),
    ("gpt-", "openai"),
    ("chatgpt-", "openai"),
    ("o1", "openai"),
    ("o3", "openai"),
    ("o4", "openai"),
)
_ALIASES = {
    "aws_bedrock": "bedrock",
    "aws.bedrock": "bedrock",
    "azure": "openai",
    "azure_openai": "openai",
    "azure.ai.openai": "openai",
    "az.ai.openai": "openai",
    "claude": "anthropic",
    "gcp.gemini": "gemini",
    "google": "gemini",
    "gcp.vertex_ai": "gemini",
    "vertex_ai": "gemini",
    "hosted_vllm": "vllm",
}


def provider_of(info: LoggedRequest, known: Iterable[str]) -> str | None:
    """The provider that a request names, or that its model or API belongs to; None: unknown."""
    name = (info.provider or "").lower()
    name = _ALIASES.get(name, name)
    model = plain_model_name(info.response_model or info.model or "")
    if name == "gemini" and model.startswith("claude"):  # Claude on Google Cloud
        return "anthropic"
    if name in known:
        return name
    for prefix, provider in _MODEL_PREFIXES:
        if model.startswith(prefix):
            return provider
    if info.hashed is not None:
        return "ramify"
    return _API_PROVIDERS.get(info.api or "")


def provider_of_log(requests: Iterable[StoredRequest], known: Iterable[str]) -> str:
    """The provider of most requests."""
    names = frozenset(known)
    counts = Counter(provider_of(request.info, names) for request in requests)
    del counts[None]
    return counts.most_common(1)[0][0] or DEFAULT if counts else DEFAULT
