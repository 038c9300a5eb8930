"""Names of vendors, servers and tenants in the analyser's spelling, without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

# Words in what a gateway calls a vendor; the first match wins. Azure has OpenAI's rules.
_VENDORS = {
    "anthropic": ("anthropic", "claude"),
    "deepseek": ("deepseek",),
    "bedrock": ("bedrock",),
    "gemini": ("gemini", "vertex", "google", "gcp"),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "ramify": ("ramify",),
    "openrouter": ("openrouter",),
    "openai": ("azure", "az.ai", "openai"),
}
_RESELLERS = frozenset({"bedrock", "gemini", "openai", "openrouter"})
# Words in names of models.
_CLAUDE = {"anthropic": ("claude",)}
_MAKERS = _CLAUDE | {
    "deepseek": ("deepseek",),
    "gemini": ("gemini",),
    "openai": ("gpt-", "openai/"),
}
# Parts of the hosts of public APIs.
_HOSTS = {
    "anthropic": ("api.anthropic.com", "anthropic.azure.com"),
    "deepseek": ("api.deepseek.com",),
    "bedrock": ("bedrock-runtime",),
    "gemini": ("generativelanguage.googleapis.com", "aiplatform.googleapis.com"),
    "openrouter": ("openrouter.ai",),
    "openai": ("openai.azure.com", "api.openai.com", "chatgpt.com"),
}


def _first_match(words: Mapping[str, tuple[str, ...]], text: str) -> str | None:
    return next((name for name in words if any(word in text for word in words[name])), None)


def provider_of_name(name: Any, model: Any = None) -> str | None:
    """Provider that a gateway calls `hosted_vllm`, `ANTHROPIC` or `azure_openai`.

    A cloud that resells (Bedrock, Vertex, OpenRouter) is named after the model's maker if the model
    tells it, since the rules of the cache are the maker's.
    """
    if not isinstance(name, str) or not name:
        return None
    provider = _first_match(_VENDORS, name.lower())
    if isinstance(model, str) and provider in _RESELLERS:
        makers = _MAKERS if provider == "openrouter" else _CLAUDE
        return _first_match(makers, model.lower()) or provider
    return provider


def provider_of_url(url: str) -> str | None:
    """Provider whose public API a URL is of; None for other hosts."""
    return _first_match(_HOSTS, _split(url)[0])


def server_of(url: Any) -> str | None:
    """Host and path of a URL without user, query and fragment, which may hold keys."""
    if not isinstance(url, str) or not url.strip():
        return None
    host, path = _split(url.strip())
    return (host + path.rstrip("/")) or None


def url_path(url: Any) -> str:
    """Path of a URL or of a request line, without the query."""
    if not isinstance(url, str):
        return ""
    return _split(url)[1]


def tenant_of(kind: str, identity: Any) -> str:
    """Short digest of an identity (a key, a team), equal for equal identities; "" for none."""
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        return ""
    digest = blake2b(str(identity).encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{kind}:{digest}"


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url if "//" in url or url.startswith("/") else f"//{url}")
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "", ""
    return host + port, parts.path
