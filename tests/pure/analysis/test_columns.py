"""A gateway that is nothing but a table of columns."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.columns import Columns, columns_reader, text_at, value_at
from ramify.analysis.readers.gateways.hosts import tenant_of
from tests.pure.analysis.log_rows import read_rows

BODY = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}
COLUMNS = Columns(
    skips=(("no answer", lambda row: row.get("state") == "lost"),),
    identity=("id, uuid", "at"),
    objects="meta",
    body="request, meta.request",
    start="at",
    end="until",
    duration_ms="took_ms",
    request_id="id, uuid",
    conversation="meta.thread.id, meta.session",
    scopes=(("team", "meta.team"), ("key", "key")),
    server="meta.url",
)
TABLE = LogFormat(
    "table",
    lambda value: isinstance(value, dict),
    partial(columns_reader, COLUMNS, COLUMNS.exchange),
)


def row(**changes: Any) -> dict[str, Any]:
    """A row whose details are JSON text."""
    meta = {"request": BODY, "session": "s", "thread": {}, "url": "https://me:pw@eu.example.com/v1"}
    fields = {"uuid": "r", "at": "2026-05-01T10:00:00Z", "took_ms": 2500, "key": "k"}
    return fields | {"meta": json.dumps(meta)} | changes


def test_a_table_of_columns_reads_a_gateway() -> None:
    """Names lead into JSON text, the best first; durations give the end; keys are not kept."""
    [request], quality = read_rows(TABLE, [row()])

    assert request.segments[-1].text == "hi"
    assert (request.request_id, request.conversation) == ("r", "s")
    assert (request.start_s, request.end_s) == (1777629600.0, 1777629602.5)
    assert request.cache_scope == tenant_of("key", "k")
    assert request.replica == "eu.example.com/v1"
    assert not quality.skipped


def test_skipped_and_repeated_rows_are_counted_by_reason() -> None:
    """A row with another time, or without an id, is another request."""
    rows = [row(), row(state="lost"), row(), row(at=1777629700), row(uuid=None), row(uuid=None)]

    requests, quality = read_rows(TABLE, rows)

    assert [request.line for request in requests] == [1, 4, 5, 6]
    assert quality.skipped == {"no answer": 1, "logged twice": 1}


def test_empty_values_and_other_types_give_way_to_the_next_name() -> None:
    """A text may be a whole number; what is empty counts as absent."""
    values: dict[str, Any] = {"a": "", "b": {}, "c": [1], "d": True, "e": 7, "f": "x"}

    assert value_at(values, "a, b, missing, c, e") == [1]
    assert text_at(values, "a, b, c, d, e, f") == "7"
    assert text_at(values, "a, e.deeper") is None
