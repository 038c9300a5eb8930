"""Tables of gateways: a column with the request body as JSON text, and columns beside it.

`request_json, response_json, model_name, status_code, timestamp` and similar names, as CSV or as
JSON Lines of the same columns. Counters may have columns of their own, such as `cached_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality
from ramify.analysis.readers.bodies.exchanges import FAILED, OWN_CACHE, Exchange, ExchangeReader
from ramify.analysis.readers.bodies.request_bodies import is_body
from ramify.analysis.readers.bodies.usage import parse_usage
from ramify.analysis.readers.bodies.wrapped_bodies import (
    PARENT_KEYS,
    conversation_of_row,
    headers_of,
    is_wrapped,
    response_of,
    times_of,
)
from ramify.analysis.readers.gateways.hosts import provider_of_name, server_of, tenant_of
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import first_text, first_value, mapping_in, merge_usage

REQUEST_COLUMNS = tuple(
    """request_json request_body request_payload raw_request requestBody requestJson request_content
    prompt_json input_json request body input""".split()
)
RESPONSE_COLUMNS = tuple(
    """response_json response_body response_payload raw_response responseBody responseJson
    response_content completion_json output_json response output""".split()
)
_SURE_COLUMNS = REQUEST_COLUMNS[:6]
_MODEL = ("model_name", "model", "modelName", "model_id")
_STATUS = ("status_code", "http_status", "response_status", "response_code", "statusCode", "status")
_ID = ("request_id", "requestId", "id", "log_id", "call_id")
_TENANT = ("tenant", "tenant_id", "team_id", "organization_id", "workspace_id", "account_id")
_KEY = ("api_key_hash", "api_key_id", "key_id", "virtual_key", "api_key")
_REPLICA = tuple("replica deployment deployment_id upstream backend worker pod server".split())
_PATH = ("path", "endpoint", "request_path", "url", "route", "uri")
# `cache_hit` may be of the prompt cache, so that it decides nothing.
_OWN_CACHE = ("cached", "is_cached", "cache_status")
_ERROR = ("error", "error_message", "exception")
_HITS = frozenset({"true", "hit", "1", "yes"})


def is_gateway_row(value: Any) -> bool:
    """Whether a column of a row holds a request body as text, or should by its name."""
    if not isinstance(value, dict):
        return False
    return _body_of(value) is not None or (
        any(_is_text(value.get(name)) for name in _SURE_COLUMNS) and not is_wrapped(value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.isspace() and value != ""


def _body_of(value: Mapping[str, Any]) -> dict[str, Any] | None:
    for name in REQUEST_COLUMNS:
        text = value.get(name)
        if isinstance(text, str) and text.lstrip()[:1] in {"{", '"'}:
            body = decode_nested(text)
            if is_body(body) and isinstance(body, dict):
                return body
    return None


def _exchange_of(value: Mapping[str, Any], quality: ReadQuality) -> Exchange | None:
    """Each row with a body, no failed status and no hit in the gateway's own cache is a request."""
    body = _body_of(value)
    if body is None:
        raise BadRowError(f"none of the columns {', '.join(REQUEST_COLUMNS)} holds a request body")
    if str(first_value(value, _OWN_CACHE)).lower() in _HITS:
        quality.skipped[OWN_CACHE] += 1
        return None
    response, status = response_of(
        {**value, "response": first_value(value, RESPONSE_COLUMNS)}, False
    )
    if response is None and first_value(value, _ERROR) is not None:
        quality.skipped[FAILED] += 1
        return None
    model = first_text(value, _MODEL)
    path = first_text(value, _PATH)
    headers = headers_of(mapping_in(value.get("headers")), mapping_in(value.get("request_headers")))
    numbers = {key: item for key, item in value.items() if isinstance(key, str)}
    return Exchange(
        body=body,
        response=response,
        url=server_of(path) or ("/v1/messages" if "anthropic-version" in headers else ""),
        betas=headers.get("anthropic-beta"),
        usage=merge_usage(parse_usage(mapping_in(value.get("usage"))), parse_usage(numbers)),
        times=times_of(value),
        status=status or first_value(value, _STATUS),
        request_id=first_text(value, _ID),
        conversation=conversation_of_row(value, is_bare=False),
        parent_id=first_text(value, PARENT_KEYS),
        provider=provider_of_name(first_text(value, ("provider", "vendor")), model),
        model=None if body.get("model") else model,
        cache_scope=tenant_of("tenant", first_text(value, _TENANT))
        or tenant_of("key", first_text(value, _KEY)),
        replica=first_text(value, _REPLICA) or server_of(value.get("api_base")),
    )


GATEWAY = LogFormat(
    "gateway", is_gateway_row, partial(ExchangeReader, lambda row: [row], _exchange_of)
)
