"""Bodies of the APIs as people log them: bare, or wrapped with the response and other fields.

A row is a body, or an object with a body under one of `REQUEST_KEYS` (an object, or JSON in a
string; `{"url", "headers", "body"}` around it is unwrapped). The response is under one of
`RESPONSE_KEYS`. Beside them, and beside the keys of a bare body, these are read:

- start: `START_KEYS`; end: `END_KEYS`; a duration: `DURATION_KEYS`, in milliseconds if the name ends
  in `ms`, else in seconds, or milliseconds from 1,000 on; first output: `FIRST_OUTPUT_KEYS`
- conversation: `CONVERSATION_KEYS`; id: `ID_KEYS`; parent: `PARENT_KEYS`
- whose cache it is: `TENANT_KEYS`; who answered: `REPLICA_KEYS`; vendor: `provider`, `vendor`
- HTTP: `url` or `path`, `status` or `status_code`, `headers`; an `error` in place of a response
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.exchanges import FAILED, Exchange, requests_of_exchange
from ramify.analysis.readers.bodies.request_bodies import is_body
from ramify.analysis.readers.bodies.usage import parse_usage
from ramify.analysis.readers.gateways.hosts import provider_of_name
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.row_fields import first_text, first_value, mapping_in
from ramify.analysis.readers.row_values import RowByRow
from ramify.analysis.readers.times import Times, duration, later, time_of
from ramify.analysis.records import LoggedRequest, Usage

REQUEST_KEYS = tuple(
    "request request_body requestBody request_json raw_request req body payload kwargs params input "
    "data llm_request".split()
)
RESPONSE_KEYS = tuple(
    "response response_body responseBody response_json raw_response resp output completion result "
    "answer llm_response".split()
)
START_KEYS = tuple(
    "start_time startTime start_s started_at startedAt start requested_at request_time timestamp ts "
    "time created_at createdAt created datetime date @timestamp".split()
)
END_KEYS = tuple("end_time endTime end_s ended_at endedAt end completed_at finished_at".split())
DURATION_KEYS = tuple(
    "duration_ms latency_ms elapsed_ms durationMs latencyMs response_time_ms duration_s latency_s "
    "elapsed_s duration latency elapsed response_time".split()
)
FIRST_OUTPUT_KEYS = tuple("ttft_ms time_to_first_token_ms ttft_s time_to_first_token ttft".split())
CONVERSATION_KEYS = tuple(
    "session_id sessionId conversation_id conversationId thread_id threadId chat_id chatId session "
    "conversation".split()
)
ID_KEYS = ("request_id", "requestId", "id", "call_id")
PARENT_KEYS = ("parent_request_id", "parent_id", "parentId")
TENANT_KEYS = tuple(
    "tenant tenant_id workspace workspace_id organization organization_id org org_id".split()
)
REPLICA_KEYS = tuple(
    "replica deployment deployment_id server backend worker upstream api_base".split()
)
_INNER_KEYS = ("body", "json", "data", "content", "inputBodyJson", "outputBodyJson")
_ENVELOPE_KEYS = ("status_code", "statusCode", "headers", "outputBodyJson", "outputBodyS3Path")
_INVOCATION_COUNTS = (
    ("inputTokenCount", "inputTokens"), ("cacheReadInputTokenCount", "cacheReadInputTokens"),
    ("cacheWriteInputTokenCount", "cacheWriteInputTokens"), ("outputTokenCount", "outputTokens"),
)  # fmt: skip
_OPENINGS = ('"messages"', '"prompt"', '"input"', '"contents"')
_ANTHROPIC_PATH, _CHAT_PATH = "/v1/messages", "/v1/chat/completions"
_SESSION_HEADER = "x-claude-code-session-id"


def is_wrapped(value: Any) -> bool:
    """Whether a row has a body under a key."""
    return isinstance(value, dict) and any(
        key in value and _holds_body(value[key]) for key in REQUEST_KEYS
    )


def _holds_body(value: object) -> bool:
    if isinstance(value, str):
        return value.lstrip()[:1] in {"{", '"'} and any(
            opening in value.replace('\\"', '"') for opening in _OPENINGS
        )
    if not isinstance(value, dict):
        return False
    return is_body(value) or any(
        key in value and (is_body(value[key]) or _is_body_text(value[key])) for key in _INNER_KEYS
    )


def _is_body_text(value: object) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] == "{" and _holds_body(value)


def is_row(value: Any) -> bool:
    """Whether a row is a body, or has one under a key."""
    return is_wrapped(value) or is_body(value) or _is_invocation(value)


def _is_invocation(value: Any) -> bool:
    """Whether a row is of Bedrock's log of invocations, whose large bodies are stored elsewhere."""
    return isinstance(value, dict) and value.get("schemaType") == "ModelInvocationLog"


def read_bodies(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """The requests of a row that is a body, or has one under a key."""
    value = row.value
    if not isinstance(value, dict):
        raise BadRowError("row is no object")
    for key in REQUEST_KEYS:
        if key in value and _holds_body(value[key]):
            inner = decode_nested(value[key])
            http: Mapping[str, Any] = {}
            if isinstance(inner, dict) and not is_body(inner):
                http = inner
                inner = decode_nested(first_value(inner, _INNER_KEYS))
            if not is_body(inner):
                raise BadRowError(f"{key} holds no body of a known API")
            return _requests(row, quality, inner, value, http)
    if _is_invocation(value):
        return _requests(row, quality, {}, value, {})
    if not is_body(value):
        raise BadRowError(
            f"row is no body of a known API, and has none under {', '.join(REQUEST_KEYS)}"
        )
    return _requests(row, quality, value, value, {})


def _requests(
    row: Row,
    quality: ReadQuality,
    body: dict[str, Any],
    beside: dict[str, Any],
    http: Mapping[str, Any],
) -> Iterator[LoggedRequest]:
    is_bare = body is beside
    response, status = response_of(beside, is_bare)
    if not response and first_value(beside, ("error", "errorCode")) and not is_bare:
        quality.skipped[FAILED] += 1
        return
    headers = headers_of(http.get("headers"), beside.get("headers"), beside.get("request_headers"))
    url = first_text(http, ("url", "path")) or first_text(
        beside, ("url", "path", "endpoint", "request_path", "uri")
    )
    usage, provider = beside.get("usage"), first_text(beside, ("provider", "vendor"))
    if _is_invocation(beside):
        counts = {**mapping_in(beside.get("input")), **mapping_in(beside.get("output"))}
        usage, provider = {name: counts.get(key) for key, name in _INVOCATION_COUNTS}, "bedrock"
    model = None if isinstance(body.get("model"), str) else first_text(beside, ("model", "modelId"))
    exchange = Exchange(
        body=body,
        response=response,
        url=url or _url_guess(headers, response),
        betas=headers.get("anthropic-beta"),
        usage=parse_usage(usage) if isinstance(usage, Mapping) else Usage(),
        times=times_of(beside),
        status=status,
        request_id=first_text(beside, ID_KEYS if not is_bare else ID_KEYS[:2]),
        conversation=conversation_of_row(beside, is_bare) or headers.get(_SESSION_HEADER),
        parent_id=first_text(beside, PARENT_KEYS),
        provider=provider_of_name(provider),
        model=model,
        response_model=first_text(beside, ("response_model",)),
        cache_scope=_scope(beside),
        replica=first_text(beside, REPLICA_KEYS),
    )
    yield from requests_of_exchange(row, quality, exchange)


def response_of(beside: dict[str, Any], is_bare: bool) -> tuple[Any, Any]:
    """The response without its HTTP envelope, and the status."""
    status = first_value(beside, ("status_code", "statusCode", "http_status", "response_status"))
    if status is None and not is_bare:
        status = beside.get("status")
    response = first_value(beside, RESPONSE_KEYS)
    if isinstance(response, str):
        response = decode_nested(response)
    if isinstance(response, dict):
        inner = first_value(response, _INNER_KEYS)
        is_envelope = not response.keys().isdisjoint(_ENVELOPE_KEYS)
        if is_envelope or (isinstance(response.get("status"), int) and inner is not None):
            status = first_value(response, ("status_code", "statusCode", "status")) or status
            response = inner
    return response, status


def times_of(beside: Mapping[str, Any]) -> Times:
    """Start, first output and end, each from the others and a duration where it is not logged."""
    start_s = time_of(beside, *START_KEYS)
    end_s = time_of(beside, *END_KEYS)
    seconds = _duration(beside, DURATION_KEYS)
    if end_s is None:
        end_s = later(start_s, seconds)
    elif start_s is None and seconds is not None:
        start_s = end_s - seconds
    return Times.in_order(start_s, later(start_s, _duration(beside, FIRST_OUTPUT_KEYS)), end_s)


def _duration(beside: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    for key in keys:
        seconds = duration(beside.get(key))
        if seconds is not None:
            is_ms = key.endswith(("_ms", "Ms")) or (seconds >= 1000 and not key.endswith("_s"))
            return seconds / 1000 if is_ms else seconds
    return None


def conversation_of_row(beside: Mapping[str, Any], is_bare: bool) -> str | None:
    """Conversation beside a body or in the row's metadata."""
    keys = CONVERSATION_KEYS[:-1] if is_bare else CONVERSATION_KEYS
    conversation = first_text(beside, keys)
    if conversation is None and not is_bare:
        conversation = first_text(mapping_in(beside.get("metadata")), CONVERSATION_KEYS)
    return conversation


def _scope(beside: Mapping[str, Any]) -> str:
    tenant = first_text(beside, TENANT_KEYS)
    return "" if tenant is None else f"tenant={tenant}"


def headers_of(*sources: object) -> dict[str, str]:
    """The headers that matter here, by lower-case name; others, as keys, are not kept."""
    wanted = ("anthropic-beta", "anthropic-version", _SESSION_HEADER)
    headers: dict[str, str] = {}
    for source in sources:
        if isinstance(source, Mapping):
            for name, value in source.items():
                if isinstance(name, str) and name.lower() in wanted and isinstance(value, str):
                    headers.setdefault(name.lower(), value)
    return headers


def _url_guess(headers: Mapping[str, str], response: object) -> str:
    """Path of the API whose headers or response a row has: bodies of two APIs can be equal."""
    if "anthropic-version" in headers:
        return _ANTHROPIC_PATH
    if isinstance(response, str):
        return _ANTHROPIC_PATH if "message_start" in response[:200] else ""
    if not isinstance(response, dict):
        return ""
    if response.get("type") == "message":
        return _ANTHROPIC_PATH
    return _CHAT_PATH if response.get("object") == "chat.completion" else ""


BODIES = LogFormat("bodies", is_row, partial(RowByRow, read_bodies))
