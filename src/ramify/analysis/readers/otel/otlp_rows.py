"""OpenTelemetry GenAI: spans and log records of OTLP JSON, whole exports or one a line."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, Place, ReadQuality, Row
from ramify.analysis.readers.bodies.exchanges import CUT, FAILED, NO_PROMPT, NO_REQUEST
from ramify.analysis.readers.otel.otel_dialects import is_message_event
from ramify.analysis.readers.otel.otel_requests import (
    DETAILS_EVENT,
    has_content,
    is_agent_call,
    is_inference,
    request_of,
)
from ramify.analysis.readers.otel.otlp_values import (
    NESTED_KEYS,
    OtlpItem,
    is_export,
    item_of,
    items_of,
)
from ramify.analysis.records import LoggedRequest

MAX_PENDING = 20_000  # spans and events that wait for the other; the oldest is given up
_FLAT_PREFIXES = ("gen_ai.", "llm.input_messages.", "llm.model_name", "openinference.", "ai.prompt")


def is_otel_row(value: Any) -> bool:
    """Whether a row is an OTLP export, a single span or log record, or flat `gen_ai.*` keys."""
    if not isinstance(value, dict):
        return False
    if is_export(value):
        return True
    attributes = value.get("attributes")
    if isinstance(attributes, list):
        pairs = (pair.get("key") for pair in attributes if isinstance(pair, dict))
        return any(_is_llm_key(key) for key in pairs)
    if isinstance(attributes, dict):
        return not NESTED_KEYS.isdisjoint(attributes) or any(map(_is_llm_key, attributes))
    return any(_is_llm_key(key) for key in value)


def _is_llm_key(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(_FLAT_PREFIXES)


@dataclass(slots=True)
class _Pending:
    """A span without its prompt, or the events that hold a prompt without their span."""

    place: Place
    span: OtlpItem | None = None
    events: list[OtlpItem] = field(default_factory=list)


class OtelReader:
    """Each span of an inference, or the events of a span that is not logged, is a request.

    Where the prompt is in log records, a span waits for them and they wait for it, by trace and
    span id; both are one request, at the line that came first.
    """

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._pending: OrderedDict[tuple[str, str], _Pending] = OrderedDict()
        self._done: set[int] = set()
        self._of_agents: set[int] = set()  # those done by events of an agent's telemetry

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`; a span that cannot be read does not spoil the others of its row."""
        if is_export(row.value):
            items = list(items_of(row.value))
        else:
            items = [_flat_item(row.value)]
        may_be_several = sum(map(_may_be_request, items)) > 1
        errors: list[BadRowError] = []
        index = 0
        for item in items:
            place = (row.file, row.line, index if may_be_several else row.index)
            index += _may_be_request(item)
            try:
                yield from self._feed_item(item, place)
            except BadRowError as error:
                errors.append(error)
        if errors:
            if len(items) == 1:
                raise errors[0]
            self._quality.add_bad_line(row.file, row.line, str(errors[0]))

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        while self._pending:
            _, pending = self._pending.popitem(last=False)
            try:
                yield from self._give_up(pending)
            except BadRowError as error:
                self._quality.add_bad_line(*pending.place[:2], str(error))

    def _feed_item(self, item: OtlpItem, place: Place) -> Iterator[LoggedRequest]:
        if item.is_span:
            if not is_inference(item):
                self._quality.skipped[NO_REQUEST] += 1
            elif item.is_error or "error.type" in item.attributes:
                self._quality.skipped[FAILED] += 1
                self._pending.pop((item.trace_id, item.span_id), None)
                self._done.add(hash((item.trace_id, item.span_id)))  # its events are no request
            else:
                yield from self._feed_span(item, place)
        elif item.name == DETAILS_EVENT or is_message_event(item.name):
            yield from self._feed_event(item, place)
        elif is_agent_call(item):
            yield from self._feed_agent_event(item, place)
        elif is_inference(item) and has_content(item):
            yield from self._emit(item, [], place)
        elif item.name != "gen_ai.choice":
            self._quality.skipped[NO_REQUEST] += 1

    def _feed_agent_event(self, event: OtlpItem, place: Place) -> Iterator[LoggedRequest]:
        """A request, unless its own span is logged; the span of a task has one event for each request."""
        key = hash((event.trace_id, event.span_id))
        if event.span_id and key in self._done and key not in self._of_agents:
            self._quality.skipped["logged twice"] += 1
            return
        if event.span_id:
            self._of_agents.add(key)
        yield from self._emit(event, [], place)

    def _feed_span(self, span: OtlpItem, place: Place) -> Iterator[LoggedRequest]:
        key = (span.trace_id, span.span_id)
        if is_agent_call(span) and hash(key) in self._done:
            self._quality.skipped["logged twice"] += 1
            return
        waiting = self._pending.pop(key, None)
        if waiting is not None:
            yield from self._emit(span, waiting.events, waiting.place)
        elif has_content(span) or is_agent_call(span) or not all(key):
            yield from self._emit(span, [], place)
        else:
            yield from self._wait(key, _Pending(place, span))

    def _feed_event(self, event: OtlpItem, place: Place) -> Iterator[LoggedRequest]:
        key = (event.trace_id, event.span_id)
        if hash(key) in self._done:
            return  # the span held the same prompt
        waiting = self._pending.get(key)
        if event.name == DETAILS_EVENT and (not all(key) or (waiting and waiting.span)):
            self._pending.pop(key, None)
            span = waiting.span if waiting else None
            yield from self._emit(span or event, [event], waiting.place if waiting else place)
        elif not all(key):
            self._quality.skipped["event without a span"] += 1
        elif waiting is None:
            yield from self._wait(key, _Pending(place, events=[event]))
        else:
            waiting.events.append(event)

    def _wait(self, key: tuple[str, str], pending: _Pending) -> Iterator[LoggedRequest]:
        self._pending[key] = pending
        if len(self._pending) > MAX_PENDING:
            yield from self._give_up(self._pending.popitem(last=False)[1])

    def _give_up(self, pending: _Pending) -> Iterator[LoggedRequest]:
        if pending.span is not None:
            yield from self._emit(pending.span, pending.events, pending.place)
            return
        details = [event for event in pending.events if event.name == DETAILS_EVENT]
        first = details[0] if details else pending.events[0]
        if "error.type" in first.attributes:
            self._quality.skipped[FAILED] += 1
            return
        yield from self._emit(first, details or pending.events, pending.place)

    def _emit(
        self, item: OtlpItem, events: list[OtlpItem], place: Place
    ) -> Iterator[LoggedRequest]:
        if item.span_id:
            self._done.add(hash((item.trace_id, item.span_id)))
        request = request_of(item, events, place)
        if not request.has_full_text:
            has_text = any(segment.path.startswith("messages") for segment in request.segments)
            self._quality.notes[CUT if has_text or has_content(item) else NO_PROMPT] += 1
        yield request


def _may_be_request(item: OtlpItem) -> bool:
    if item.is_span:
        return is_inference(item)
    return item.name == DETAILS_EVENT or is_agent_call(item)


def _flat_item(value: Mapping[str, Any]) -> OtlpItem:
    """A single span or log record, or a row whose columns are the attributes."""
    if isinstance(value.get("attributes"), dict | list):
        is_log = not any(key in value for key in ("endTimeUnixNano", "end_time", "endTime"))
        is_log = is_log and any(
            key in value for key in ("timeUnixNano", "body", "eventName", "severityNumber")
        )
        return item_of(value, is_span=not is_log)
    item = item_of({**value, "attributes": value}, is_span=True)
    return replace(item, name=item.name or "span")


OTEL = LogFormat("otel", is_otel_row, OtelReader)
