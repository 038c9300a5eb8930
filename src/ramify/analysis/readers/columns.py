"""Gateways as tables: which columns of their rows hold which field of an `Exchange`.

Names of columns stand in a string with commas between, the best first. `metadata.session_id` is a key
of the object, or of the JSON text, in the column `metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from ramify.analysis.reader import ReadQuality, RowReader
from ramify.analysis.readers.bodies.exchanges import Exchange, ExchangeReader
from ramify.analysis.readers.gateways.hosts import provider_of_name, server_of, tenant_of
from ramify.analysis.readers.row_fields import mapping_in, mapping_or_empty, names_in
from ramify.analysis.readers.times import Times, duration, later, parse_time

# Why a row is no request, and whether it is none.
Skip = tuple[str, Callable[[Mapping[str, Any]], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of a gateway's columns, by field of `Exchange`; empty where no column holds the field."""

    skips: tuple[Skip, ...] = ()
    # Rows with an id in the first, and with equal values in all of these, are one request, logged again.
    identity: tuple[str, ...] = ()
    objects: str = ""  # JSON text which other names lead into; decoded once a row
    body: str = ""
    response: str = ""
    url: str = ""
    start: str = ""  # a time in any unit, or a date
    first_output: str = ""
    end: str = ""
    first_output_ms: str = ""  # since the start
    duration_ms: str = ""
    request_id: str = ""
    conversation: str = ""
    parent_id: str = ""
    provider: str = ""
    model: str = ""  # a name in the body goes before it
    response_model: str = ""
    scopes: tuple[tuple[str, str], ...] = ()  # kinds of tenants, with the columns of their ids
    replica: str = ""
    server: str = ""  # URL of the replica
    template: str = ""

    def exchange(self, row: Mapping[str, Any], **fields: Any) -> Exchange:
        """The exchange of a row; `fields` go before what the columns hold."""
        body = fields["body"] if "body" in fields else mapping_in(value_at(row, self.body))
        model = text_at(row, self.model)
        tenants = (tenant_of(kind, text_at(row, names)) for kind, names in self.scopes)
        in_columns: dict[str, Any] = {
            "body": body,
            "response": value_at(row, self.response),
            "url": text_at(row, self.url) or "",
            "times": self._times(row),
            "request_id": text_at(row, self.request_id),
            "conversation": text_at(row, self.conversation),
            "parent_id": text_at(row, self.parent_id),
            "provider": provider_of_name(text_at(row, self.provider), model),
            "model": None if mapping_or_empty(body).get("model") else model,
            "response_model": text_at(row, self.response_model),
            "cache_scope": next(filter(None, tenants), ""),
            "replica": text_at(row, self.replica) or server_of(value_at(row, self.server)),
            "template": text_at(row, self.template),
        }
        return Exchange(**(in_columns | fields))

    def _times(self, row: Mapping[str, Any]) -> Times:
        start_s = _time_at(row, self.start)
        return Times.in_order(
            start_s,
            _time_at(row, self.first_output, start_s, self.first_output_ms),
            _time_at(row, self.end, start_s, self.duration_ms),
        )


def columns_reader(
    columns: Columns,
    exchange_of: Callable[[Mapping[str, Any]], Exchange],
    quality: ReadQuality,
    *,
    rows_of: Callable[[Any], Sequence[Any]] = lambda value: (value,),
) -> RowReader:
    """A reader of rows that need no other rows.

    Args:
        columns: of the rows.
        exchange_of: of a row that is a request, mostly `columns.exchange` with a few fields beside.
        quality: counts what is skipped.
        rows_of: what a value of the log holds, as a page its rows; else the value itself.
    """
    seen: set[int] = set()

    def is_repeated(row: Mapping[str, Any]) -> bool:
        values = [value_at(row, names) for names in columns.identity]
        if not values or values[0] is None:
            return False
        key = hash(tuple(map(str, values)))
        is_known = key in seen
        seen.add(key)
        return is_known

    def exchange_if_request(row: Mapping[str, Any], quality: ReadQuality) -> Exchange | None:
        row = {**row, **{name: mapping_in(row.get(name)) for name in names_in(columns.objects)}}
        reason = next((reason for reason, is_skipped in columns.skips if is_skipped(row)), None)
        if reason is None and is_repeated(row):
            reason = "logged twice"
        if reason is None:
            return exchange_of(row)
        quality.skipped[reason] += 1
        return None

    return ExchangeReader(rows_of, exchange_if_request, quality)


def values_at(row: Mapping[str, Any], names: str) -> Iterator[Any]:
    """Values in these columns that are neither absent nor empty, in the order of the names."""
    for column, *keys in _paths(names):
        value = row.get(column)
        for key in keys:
            value = (value if isinstance(value, dict) else mapping_in(value)).get(key)
        if value not in (None, "", {}, []):
            yield value


@cache
def _paths(names: str) -> tuple[list[str], ...]:
    return tuple(name.split(".") for name in names_in(names))


def value_at(row: Mapping[str, Any], names: str) -> Any:
    """The first value in these columns; None if all are absent or empty."""
    return next(values_at(row, names), None)


def text_at(row: Mapping[str, Any], names: str) -> str | None:
    """The first text or whole number in these columns, as text."""
    for value in values_at(row, names):
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def _time_at(
    row: Mapping[str, Any], names: str, start_s: float | None = None, names_ms: str = ""
) -> float | None:
    """The first duration since the start, else the first time."""
    since_start = (
        later(start_s, duration(value, unit_s=1e-3)) for value in values_at(row, names_ms)
    )
    times = chain(since_start, map(parse_time, values_at(row, names)))
    return next((time for time in times if time is not None), None)
