"""Tables of gateways: a column with the request body, mostly one with the response, and others.

`request_json, response_json, model_name, status_code, timestamp` and similar names, as CSV or JSONL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.formats.bodies import is_body
from ramify.analysis.formats.exchanges import OWN_CACHE, Exchange, requests_of_rows
from ramify.analysis.formats.hosts import provider_of_name, server_of, tenant_of
from ramify.analysis.formats.nested_json import decode_nested
from ramify.analysis.formats.row_fields import (
    Times,
    duration,
    first_text,
    first_value,
    later,
    mapping_in,
)
from ramify.analysis.formats.times import time_of
from ramify.analysis.formats.usage import parse_usage
from ramify.analysis.reading import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.records import LoggedRequest

REQUEST_COLUMNS = (
    "request_json", "request_body", "request_payload", "raw_request", "requestBody", "request",
    "request_content", "prompt_json", "input_json", "body",
)  # fmt: skip
RESPONSE_COLUMNS = (
    "response_json", "response_body", "response_payload", "raw_response", "responseBody", "response",
    "response_content", "completion_json", "output_json",
)  # fmt: skip
_STATUS = ("status_code", "http_status", "response_status", "response_code", "statusCode", "status")
_START = (
    "start_time", "request_time", "request_timestamp", "timestamp", "created_at", "createdAt", "ts",
    "time", "date", "startTime",
)  # fmt: skip
_END = ("end_time", "response_time_at", "response_timestamp", "completed_at", "endTime")
_TOTAL_MS = (
    "latency_ms",
    "duration_ms",
    "total_latency_ms",
    "elapsed_ms",
    "response_time_ms",
    "response_time",
)
_TOTAL_S = ("latency_s", "duration_s", "elapsed_s")
_FIRST_MS = ("ttft_ms", "time_to_first_token_ms", "first_token_ms", "time_to_first_token")
_FIRST_S = ("ttft_s", "time_to_first_token_s", "ttft")
_MODEL = ("model_name", "model", "modelName", "model_id")
_ID = ("request_id", "requestId", "id", "log_id", "trace_id")
_CONVERSATION = ("session_id", "sessionId", "conversation_id", "thread_id", "chat_id")
_TENANT = ("tenant", "tenant_id", "team_id", "organization_id", "workspace_id", "account_id")
_KEY = ("api_key_hash", "api_key_id", "key_id", "virtual_key", "api_key")
_REPLICA = (
    "replica",
    "deployment",
    "deployment_id",
    "upstream",
    "backend",
    "worker",
    "pod",
    "server",
)
_PATH = ("path", "endpoint", "request_path", "url", "route")
_CACHED = ("cached", "cache_hit", "is_cached", "cache_status")  # of the gateway's own cache


def is_gateway_row(value: Any) -> bool:
    """Whether a column of a row holds a request body."""
    if not isinstance(value, dict) or is_body(value):
        return False
    return any(is_body(decode_nested(value[name])) for name in REQUEST_COLUMNS if name in value)


class GatewayReader:
    """Each row with a body and no failed status is a request."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        yield from requests_of_rows(row, self._quality, [row.value], self._exchange_of)

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        return iter(())

    def _exchange_of(self, value: Mapping[str, Any]) -> Exchange | None:
        if str(first_value(value, _CACHED)).lower() in {"true", "hit", "1"}:
            self._quality.skipped[OWN_CACHE] += 1
            return None
        body = first_value(value, REQUEST_COLUMNS)
        if not mapping_in(body):
            msg = "request column holds no JSON object"
            raise BadRowError(msg)
        model = first_text(value, _MODEL)
        start_s = time_of(value, *_START)
        total_s = duration(first_value(value, _TOTAL_S))
        if total_s is None:
            total_s = duration(first_value(value, _TOTAL_MS), unit_s=1e-3)
        first_s = duration(first_value(value, _FIRST_S))
        if first_s is None:
            first_s = duration(first_value(value, _FIRST_MS), unit_s=1e-3)
        path = first_text(value, _PATH)
        return Exchange(
            body=body,
            response=first_value(value, RESPONSE_COLUMNS),
            url=server_of(path) or "",
            usage=parse_usage(_numbers(value)),
            times=Times.in_order(
                start_s, later(start_s, first_s), time_of(value, *_END) or later(start_s, total_s)
            ),
            status=first_value(value, _STATUS),
            request_id=first_text(value, _ID),
            conversation=first_text(value, _CONVERSATION),
            provider=provider_of_name(first_text(value, ("provider", "vendor")), model),
            model=None if mapping_in(body).get("model") else model,
            cache_scope=tenant_of("tenant", first_text(value, _TENANT))
            or tenant_of("key", first_text(value, _KEY)),
            replica=first_text(value, _REPLICA) or server_of(value.get("api_base")),
        )


def _numbers(value: Mapping[str, Any]) -> dict[str, Any]:
    """Columns with counters of tokens, an object in one of them included."""
    counts = {key: item for key, item in value.items() if isinstance(key, str) and "token" in key}
    return {**counts, **mapping_in(value.get("usage"))}


GATEWAY = LogFormat("gateway", is_gateway_row, GatewayReader)
