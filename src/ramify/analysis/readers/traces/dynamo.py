"""Dynamo's request traces: a row at the end of each request, and optionally a row with its body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.request_bodies import parse_bodies, requests_of
from ramify.analysis.readers.bodies.responses import parse_response
from ramify.analysis.readers.pending_rows import PendingRows
from ramify.analysis.readers.row_values import get_name, get_text, mapping_of
from ramify.analysis.readers.traces import trace_columns
from ramify.analysis.readers.traces.hashed_prompts import (
    block_ids_of,
    check_block_size,
    hashed_prompt,
)
from ramify.analysis.records import HashedPrompt, LoggedRequest

SCHEMA = "dynamo.request.trace.v1"
NO_PROMPT = "rows without replay hashes and without a payload have no prompt"


def is_dynamo(value: Any) -> bool:
    """Whether a row has the schema, bare or in the envelope of a sink."""
    return isinstance(value, Mapping) and (
        value.get("schema") == SCHEMA
        or (isinstance(value.get("event"), Mapping) and value["event"].get("schema") == SCHEMA)
    )


class DynamoReader:
    """Joins `request_end` and `request_payload` by request id, in either order."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._pending: PendingRows[tuple[str, LoggedRequest]] = PendingRows()

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        if isinstance(value.get("event"), Mapping):
            value = value["event"]
        kind = get_text(value, "event_type")
        if kind not in ("request_end", "request_payload"):
            self._quality.skipped[f"event {kind}"] += 1
            return
        request = _ended(row, value) if kind == "request_end" else self._with_body(row, value)
        if request is None:
            return
        if request.request_id is None:
            yield request
            return
        other = self._pending.take(request.request_id)
        if other is not None and other[0] != kind:
            ended, body = (request, other[1]) if kind == "request_end" else (other[1], request)
            yield _joined(ended, body)
            return
        if other is not None:
            yield self._alone(other[1])
        for _, given_up in self._pending.add(request.request_id, (kind, request)):
            yield self._alone(given_up)

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for _, request in self._pending.take_all():
            yield self._alone(request)

    def _with_body(self, row: Row, value: Mapping[str, Any]) -> LoggedRequest | None:
        payload = mapping_of(value.get("payload"), "payload")
        if payload.get("request") is None:
            self._quality.skipped["payload dropped"] += 1
            return None
        bodies = parse_bodies(mapping_of(payload["request"], "payload.request"))
        response = parse_response(payload.get("response"))
        requests = requests_of(
            row,
            self._quality,
            bodies,
            response,
            request_id=get_name(payload, "request_id"),
            start_s=trace_columns.DYNAMO.seconds(value, "event_time_unix_ms"),
        )
        return next(requests, None)

    def _alone(self, request: LoggedRequest) -> LoggedRequest:
        if request.hashed is None and not request.segments:
            self._quality.notes[NO_PROMPT] += 1
        return request


def _ended(row: Row, value: Mapping[str, Any]) -> LoggedRequest:
    fields = mapping_of(value.get("request"), "request")
    context = mapping_of(value.get("agent_context") or {}, "agent_context")
    hashed = None
    if fields.get("replay") is not None:
        hashed = _hashed(mapping_of(fields["replay"], "replay"))
        fields = {**fields, "input_length": hashed.num_tokens}
    request = trace_columns.DYNAMO.request(
        row,
        fields,
        hashed=hashed,
        conversation=get_name(context, "session_id"),
        has_full_text=hashed is not None,
    )
    if request.end_s is None:
        request = replace(request, end_s=trace_columns.DYNAMO.seconds(value, "event_time_unix_ms"))
    return request


def _hashed(replay: Mapping[str, Any]) -> HashedPrompt:
    num_tokens = trace_columns.DYNAMO.usage(replay).num_input
    if num_tokens is None:
        raise BadRowError("replay has no input_length")
    size = check_block_size(replay.get("trace_block_size"), "trace_block_size")
    ids = block_ids_of(replay.get("input_sequence_hashes"), "input_sequence_hashes")
    return hashed_prompt(size, ids, num_tokens)


def _joined(ended: LoggedRequest, body: LoggedRequest) -> LoggedRequest:
    """The body's text with the times and counts of the end."""
    first = min(ended, body, key=lambda request: request.line)
    counts = ended.usage
    return replace(
        body,
        file=first.file,
        line=first.line,
        index=first.index,
        conversation=ended.conversation or body.conversation,
        start_s=body.start_s if ended.start_s is None else ended.start_s,
        first_output_s=ended.first_output_s,
        end_s=ended.end_s,
        usage=body.usage if counts.num_input is None else counts,
    )


DYNAMO = LogFormat("dynamo", is_dynamo, DynamoReader)
