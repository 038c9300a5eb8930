"""HAR: what browsers, mitmproxy and other proxies save of HTTP exchanges.

Of the headers, only those are read that say which cache a request belongs to; keys and cookies are
never kept. Exchanges with other hosts and paths than a model's API are skipped.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality
from ramify.analysis.readers.bodies.exchanges import FAILED, NO_REQUEST, Exchange, ExchangeReader
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.gateways.hosts import (
    provider_of_name,
    provider_of_url,
    server_of,
    tenant_of,
    url_path,
)
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import first_text, mapping_or_empty
from ramify.analysis.readers.times import Times, duration, later, parse_time

_ENDPOINTS = tuple(
    """/chat/completions /completions /responses /messages /converse /converse-stream /invoke
    /invoke-with-response-stream :generateContent :streamGenerateContent /api/chat""".split()
)
# Gemini and Bedrock name the model in the path.
_MODEL_IN_PATH = re.compile(r"/models?/([^/]+?)(?:/|:(?:stream)?[gG]enerateContent$)")
_CONVERSATION_HEADERS = tuple(
    """x-claude-code-session-id x-session-id session_id session-id conversation_id
    x-conversation-id helicone-session-id x-litellm-session-id""".split()
)
# Name of the account, which vendors put into responses; a key only where there is no name.
_ACCOUNT_HEADERS = ("anthropic-organization-id", "openai-organization", "openai-project")
_KEY_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")


def is_har_row(value: Any) -> bool:
    """Whether a row is an archive, or one of its entries."""
    return isinstance(value, dict) and (
        isinstance(_entries_of(value), list)
        or ("startedDateTime" in value and isinstance(value.get("request"), dict))
    )


def _entries_of(value: Mapping[str, Any]) -> Any:
    return mapping_or_empty(value.get("log")).get("entries")


def _values_of(value: Mapping[str, Any]) -> list[Any]:
    """The entries of an archive; else the row, which is an entry."""
    entries = _entries_of(value)
    return entries if isinstance(entries, list) else [value]


def _exchange_of(entry: Mapping[str, Any], quality: ReadQuality) -> Exchange | None:
    """Each answered POST to a model's endpoint is a request."""
    request, response = (
        mapping_or_empty(entry.get("request")),
        mapping_or_empty(entry.get("response")),
    )
    url = request.get("url")
    path = url_path(url).rstrip("/")
    if str(request.get("method")).upper() != "POST" or not path.endswith(_ENDPOINTS):
        quality.skipped[NO_REQUEST] += 1
        return None
    status = count(response.get("status"))
    if not status or not 200 <= status < 300:
        quality.skipped[FAILED] += 1
        return None
    sent, received = _headers(request), _headers(response)
    body = decode_nested(_text_of(mapping_or_empty(request.get("postData"))))
    if not isinstance(body, dict):
        raise BadRowError("postData holds no JSON object")
    model = None if body.get("model") else _model_in(path)
    return Exchange(
        body=body,
        response=_text_of(mapping_or_empty(response.get("content"))) or None,
        url=server_of(url) or "",
        betas=sent.get("anthropic-beta"),
        times=_times_of(entry),
        model=model,
        conversation=first_text(sent, _CONVERSATION_HEADERS),
        provider=provider_of_name(
            provider_of_url(url if isinstance(url, str) else ""), model or body.get("model")
        ),
        cache_scope=_scope_of(sent, received),
        replica=_replica_of(url),
    )


def _model_in(path: str) -> str | None:
    match = _MODEL_IN_PATH.search(path)
    return None if match is None else unquote(match[1])


def _headers(message: Mapping[str, Any]) -> dict[str, str]:
    """Values of headers by name in lower case."""
    headers = message.get("headers")
    by_name: dict[str, str] = {}
    for header in headers if isinstance(headers, list) else ():
        name, value = mapping_or_empty(header).get("name"), mapping_or_empty(header).get("value")
        if isinstance(name, str) and isinstance(value, str):
            name = name.lower()
            by_name[name] = f"{by_name[name]},{value}" if name in by_name else value
    return by_name


def _text_of(content: Mapping[str, Any]) -> str:
    """The text of a body, decoded if it is base64."""
    text = content.get("text")
    if not isinstance(text, str):
        return ""
    if content.get("encoding") != "base64":
        return text
    try:
        return base64.b64decode(text, validate=False).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""


def _times_of(entry: Mapping[str, Any]) -> Times:
    start_s = parse_time(entry.get("startedDateTime"))
    total_s = duration(entry.get("time"), unit_s=1e-3)
    received_s = duration(mapping_or_empty(entry.get("timings")).get("receive"), unit_s=1e-3)
    waited_s = None
    if total_s is not None and received_s is not None and received_s <= total_s:
        waited_s = total_s - received_s
    return Times.in_order(start_s, later(start_s, waited_s), later(start_s, total_s))


def _scope_of(sent: Mapping[str, str], received: Mapping[str, str]) -> str:
    """The account; OAuth tokens change within a conversation and are no account."""
    account = first_text(received, _ACCOUNT_HEADERS) or first_text(sent, _ACCOUNT_HEADERS)
    if account is not None:
        return tenant_of("account", account)
    key = first_text(sent, _KEY_HEADERS)
    if key is None:
        scheme, _, token = sent.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.startswith("sk-") and "-oat" not in token[:12]:
            key = token
    return tenant_of("key", key)


def _replica_of(url: Any) -> str | None:
    """The server, unless it is a vendor's, behind whose name there are many."""
    if not isinstance(url, str) or provider_of_url(url) is not None:
        return None
    server = server_of(url)
    return server.partition("/")[0] or None if server else None


HAR = LogFormat("har", is_har_row, partial(ExchangeReader, _values_of, _exchange_of))
