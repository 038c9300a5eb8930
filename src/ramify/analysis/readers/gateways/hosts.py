"""Names of vendors, servers and tenants in the analyser's spelling, without secrets."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

# First match wins: `azure_openai` is Azure's own cache but OpenAI's rules.
_PROVIDER_WORDS = (
    ("anthropic", "anthropic"),
    ("claude", "anthropic"),
    ("deepseek", "deepseek"),
    ("bedrock", "bedrock"),
    ("gemini", "gemini"),
    ("vertex", "gemini"),
    ("google", "gemini"),
    ("gcp", "gemini"),
    ("sglang", "sglang"),
    ("vllm", "vllm"),
    ("ramify", "ramify"),
    ("openrouter", "openrouter"),
    ("azure", "openai"),
    ("az.ai", "openai"),
    ("openai", "openai"),
)
_RESELLERS = frozenset({"bedrock", "gemini", "openai", "openrouter"})
_MAKERS = (
    ("claude", "anthropic"),
    ("deepseek", "deepseek"),
    ("gemini", "gemini"),
    ("gpt-", "openai"),
    ("openai/", "openai"),
)
_PROVIDER_HOSTS = (
    ("api.anthropic.com", "anthropic"),
    ("anthropic.azure.com", "anthropic"),
    ("api.deepseek.com", "deepseek"),
    ("bedrock-runtime", "bedrock"),
    ("generativelanguage.googleapis.com", "gemini"),
    ("aiplatform.googleapis.com", "gemini"),
    ("openrouter.ai", "openrouter"),
    ("openai.azure.com", "openai"),
    ("api.openai.com", "openai"),
    ("chatgpt.com", "openai"),
)


def provider_of_name(name: Any, model: Any = None) -> str | None:
    """Provider that a gateway calls `hosted_vllm`, `ANTHROPIC` or `azure_openai`.

    A cloud that resells (Bedrock, Vertex, OpenRouter) is named after the model's maker if the model
    tells it, since the rules of the cache are the maker's.
    """
    if not isinstance(name, str) or not name:
        return None
    lowered = name.lower()
    provider = next((value for word, value in _PROVIDER_WORDS if word in lowered), None)
    if isinstance(model, str) and provider in _RESELLERS:
        makers = _MAKERS if provider == "openrouter" else _MAKERS[:1]
        return next((value for word, value in makers if word in model.lower()), provider)
    return provider


def provider_of_url(url: str) -> str | None:
    """Provider whose public API a URL is of; None for other hosts."""
    host = _split(url)[0]
    return next((value for part, value in _PROVIDER_HOSTS if part in host), None)


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
