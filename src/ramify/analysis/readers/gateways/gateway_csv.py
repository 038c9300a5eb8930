"""Tables of gateways: a column with the request body as JSON text, and columns beside it.

`request_json, response_json, model_name, status_code, timestamp` and similar names, as CSV or as
JSON Lines of the same columns. Counters may have columns of their own, such as `cached_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat
from ramify.analysis.readers.bodies.exchanges import FAILED, OWN_CACHE, Exchange
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
from ramify.analysis.readers.columns import Columns, columns_reader, text_at, value_at
from ramify.analysis.readers.gateways.hosts import server_of
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import mapping_in, merge_usage

_SURE_BODIES = (
    "request_json request_body request_payload raw_request requestBody requestJson".split()
)
BODIES = (*_SURE_BODIES, *"request_content prompt_json input_json request body input".split())
_STATUS = "status_code, http_status, response_status, response_code, statusCode, status"
_HITS = frozenset({"true", "hit", "1", "yes"})
_RESPONSES = """response_json, response_body, response_payload, raw_response, responseBody, responseJson,
    response_content, completion_json, output_json, response, output"""


def is_gateway_row(value: Any) -> bool:
    """Whether a column of a row holds a request body as text, or should by its name."""
    if not isinstance(value, dict):
        return False
    return _body_of(value) is not None or (
        any(_is_text(value.get(name)) for name in _SURE_BODIES) and not is_wrapped(value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.isspace() and value != ""


def _body_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    for name in BODIES:
        text = row.get(name)
        if isinstance(text, str) and text.lstrip()[:1] in {"{", '"'}:
            body = decode_nested(text)
            if is_body(body) and isinstance(body, dict):
                return body
    return None


def _response_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """The response and its status."""
    response, status = response_of({**row, "response": value_at(row, _RESPONSES)}, False)
    return response, status or value_at(row, _STATUS)


def _is_own_cache(row: Mapping[str, Any]) -> bool:
    """Whether the gateway's cache answered; `cache_hit` may be of the prompt cache, and decides nothing."""
    return str(value_at(row, "cached, is_cached, cache_status")).lower() in _HITS


def _has_failed(row: Mapping[str, Any]) -> bool:
    has_error = value_at(row, "error, error_message, exception") is not None
    return has_error and _response_of(row)[0] is None


COLUMNS = Columns(
    skips=((OWN_CACHE, _is_own_cache), (FAILED, _has_failed)),
    url="path, endpoint, request_path, url, route, uri",
    request_id="request_id, requestId, id, log_id, call_id",
    parent_id=", ".join(PARENT_KEYS),
    provider="provider, vendor",
    model="model_name, model, modelName, model_id",
    scopes=(
        ("tenant", "tenant, tenant_id, team_id, organization_id, workspace_id, account_id"),
        ("key", "api_key_hash, api_key_id, key_id, virtual_key, api_key"),
    ),
    replica="replica, deployment, deployment_id, upstream, backend, worker, pod, server",
    server="api_base",
)


def _exchange_of(row: Mapping[str, Any]) -> Exchange:
    body = _body_of(row)
    if body is None:
        raise BadRowError(f"none of the columns {', '.join(BODIES)} holds a request body")
    response, status = _response_of(row)
    headers = headers_of(mapping_in(row.get("headers")), mapping_in(row.get("request_headers")))
    guessed_url = "/v1/messages" if "anthropic-version" in headers else ""
    counts = {name: item for name, item in row.items() if isinstance(name, str)}
    return COLUMNS.exchange(
        row,
        body=body,
        response=response,
        url=server_of(text_at(row, COLUMNS.url)) or guessed_url,
        betas=headers.get("anthropic-beta"),
        usage=merge_usage(parse_usage(mapping_in(row.get("usage"))), parse_usage(counts)),
        times=times_of(row),
        status=status,
        conversation=conversation_of_row(row, is_bare=False),
    )


GATEWAY = LogFormat("gateway", is_gateway_row, partial(columns_reader, COLUMNS, _exchange_of))
