"""Spans and log records of OTLP JSON as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ramify.analysis.readers.row_fields import mapping_or_empty
from ramify.analysis.readers.times import parse_time

# First parts of keys that Phoenix nests.
NESTED_KEYS = frozenset({"llm", "gen_ai", "openinference"})
MAX_DEPTH = 64  # of nested AnyValues; deeper ones become None


@dataclass(frozen=True, slots=True)
class OtlpItem:
    """A span or a log record."""

    attributes: Mapping[str, Any]
    trace_id: str
    span_id: str
    name: str  # of the span, or of the event that a log record is
    start_s: float | None
    end_s: float | None  # None for log records
    is_span: bool
    is_error: bool = False
    body: Any = None  # of a log record
    events: tuple[OtlpItem, ...] = ()  # of a span


def any_value(value: Any, *, depth: int = 0) -> Any:
    """The plain value of an AnyValue; a value that is none comes back as it is."""
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return None if depth > MAX_DEPTH else value
    if "stringValue" in value:
        return value["stringValue"]
    if "intValue" in value:
        return _integer(value["intValue"])
    for key in ("boolValue", "doubleValue", "bytesValue"):
        if key in value:
            return value[key]
    if "arrayValue" in value:
        inner = value["arrayValue"]
        items = inner.get("values") if isinstance(inner, dict) else None
        if not isinstance(items, list):
            return []
        return [any_value(item, depth=depth + 1) for item in items]
    if "kvlistValue" in value:
        inner = value["kvlistValue"]
        return attributes_of(inner.get("values") if isinstance(inner, dict) else None, depth=depth)
    return value or None


def attributes_of(pairs: Any, *, depth: int = 0) -> dict[str, Any]:
    """Attributes by key, in order, from OTLP's list of pairs or from an object."""
    if isinstance(pairs, dict):  # exporters to files and databases write them flat, or nested
        values = {key: any_value(value, depth=depth + 1) for key, value in pairs.items()}
        return _flattened(values) if not NESTED_KEYS.isdisjoint(values) else values
    if not isinstance(pairs, list):
        return {}
    attributes: dict[str, Any] = {}
    for pair in pairs:
        if isinstance(pair, dict) and isinstance(pair.get("key"), str):
            attributes[pair["key"]] = any_value(pair.get("value"), depth=depth + 1)
    return attributes


def is_export(value: Mapping[str, Any]) -> bool:
    """Whether a value holds spans or log records by resource."""
    if "resourceSpans" in value or "resourceLogs" in value:
        return True
    batches = value.get("batches")
    return isinstance(batches, list) and any(
        isinstance(batch, dict)
        and ("scopeSpans" in batch or "instrumentationLibrarySpans" in batch)
        for batch in batches
    )


def items_of(value: Mapping[str, Any]) -> Iterator[OtlpItem]:
    """The spans and log records of an export request, in order."""
    for group_key, scope_keys, item_key in (
        ("batches", ("scopeSpans", "instrumentationLibrarySpans"), "spans"),  # Tempo
        ("resourceSpans", ("scopeSpans", "instrumentationLibrarySpans"), "spans"),
        ("resourceLogs", ("scopeLogs", "instrumentationLibraryLogs"), "logRecords"),
    ):
        for group in _objects(value.get(group_key)):
            for scope_key in scope_keys:
                for scope in _objects(group.get(scope_key)):
                    for item in _objects(scope.get(item_key)):
                        yield item_of(item, is_span=item_key == "spans")


def item_of(value: Mapping[str, Any], *, is_span: bool) -> OtlpItem:
    """A span or log record; names of fields in OTLP's spelling or with underscores."""

    def get(*names: str) -> Any:
        return next((value[name] for name in names if value.get(name) is not None), None)

    attributes = attributes_of(get("attributes"))
    status = get("status")
    code = status.get("code", status.get("status_code")) if isinstance(status, dict) else status
    context = mapping_or_empty(get("context", "spanContext"))
    name = get("eventName", "event_name") if not is_span else get("name")
    if not is_span and not isinstance(name, str):
        name = attributes.get("event.name")
    start = get("startTimeUnixNano", "start_time_unix_nano", "startTime", "start_time")
    end = get("endTimeUnixNano", "end_time_unix_nano", "endTime", "end_time")
    if not is_span:
        start = get("timeUnixNano", "time_unix_nano", "observedTimeUnixNano", "timestamp")
    return OtlpItem(
        attributes=attributes,
        trace_id=_identity(get("traceId", "trace_id") or context.get("trace_id")),
        span_id=_identity(get("spanId", "span_id") or context.get("span_id")),
        name=name if isinstance(name, str) else "",
        start_s=_time(start),
        end_s=_time(end) if is_span else None,
        is_span=is_span,
        is_error=code in (2, "2", "STATUS_CODE_ERROR", "ERROR"),
        body=any_value(get("body")),
        events=tuple(_event_of(event) for event in _objects(get("events"))) if is_span else (),
    )


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested objects and lists of objects as keys with dots."""
    leaves: dict[str, Any] = {}
    waiting = [("", values)]
    while waiting:
        prefix, node = waiting.pop()
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                waiting.append((f"{name}.", value))
            elif isinstance(value, list) and value and all(isinstance(i, dict) for i in value):
                waiting.extend((f"{name}.{at}.", item) for at, item in enumerate(value))
            else:
                leaves[name] = value
    return leaves


def _event_of(value: Mapping[str, Any]) -> OtlpItem:
    name = value.get("name")
    start = next((value[key] for key in ("timeUnixNano", "timestamp") if key in value), None)
    return OtlpItem(
        attributes=attributes_of(value.get("attributes")),
        trace_id="",
        span_id="",
        name=name if isinstance(name, str) else "",
        start_s=_time(start),
        end_s=None,
        is_span=False,
    )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _time(value: Any) -> float | None:
    """Seconds of a time; nanoseconds are divided as integers, which loses nothing. 0 is unset."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and 18 <= len(value) <= 20:
        return int(value) / 10**9
    return parse_time(value) or None


def _identity(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _integer(value: Any) -> Any:
    if isinstance(value, str) and len(value) < 32:
        try:
            return int(value)
        except ValueError:
            return value
    return value
