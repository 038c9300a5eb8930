"""Helicone: rows of its export and of its request API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.bodies.exchanges import FAILED, OWN_CACHE, Exchange
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.columns import Columns, columns_reader, text_at
from ramify.analysis.readers.row_fields import mapping_in
from ramify.analysis.records import Usage

_NO_ID = "00000000-0000-0000-0000-000000000000"
_SESSION_NAMES = "helicone-session-id, session-id, session_id, sessionid"
_KEYS = frozenset(
    """request_body response_body response_status request_path signed_body_url response_id request_id
    request_properties""".split()
)


def is_helicone_row(value: Any) -> bool:
    """Whether a row, or each row of a page, is of Helicone."""
    if not isinstance(value, dict):
        return False
    if "request_created_at" in value:
        return not _KEYS.isdisjoint(value)
    rows = value.get("data")
    return isinstance(rows, list) and any(
        isinstance(item, dict) and "request_created_at" in item for item in rows
    )


def _rows_of(value: Mapping[str, Any]) -> list[Any]:
    """The rows of a page; else the row itself."""
    rows: list[Any] = [value] if "request_created_at" in value else value["data"]
    return rows


def _is_own_cache(row: Mapping[str, Any]) -> bool:
    """Whether Helicone's cache of responses answered; `cache_enabled` says only that it could."""
    return row.get("cache_reference_id") not in (None, "", _NO_ID)


def _has_failed(row: Mapping[str, Any]) -> bool:
    """Whether the status, negative for time-outs and what is under way, is not 2xx."""
    status = row.get("response_status")
    code = count(status)
    return status not in (None, "") and (code is None or not 200 <= code < 300)


COLUMNS = Columns(
    skips=((OWN_CACHE, _is_own_cache), (FAILED, _has_failed)),
    objects="body",
    body="request_body, body.request",
    response="response_body, body.response",
    url="request_path, target_url",
    start="request_created_at",
    end="response_created_at",
    first_output_ms="time_to_first_token",
    duration_ms="delay_ms, latency",
    request_id="request_id, response_id",
    provider="provider",
    model="model_override, request_model, model",
    response_model="response_model",
    template="prompt_id",
)


def _exchange_of(row: Mapping[str, Any]) -> Exchange:
    return COLUMNS.exchange(row, usage=_usage_of(row), conversation=_session_of(row))


def _session_of(row: Mapping[str, Any]) -> str | None:
    properties = {**mapping_in(row.get("properties")), **mapping_in(row.get("request_properties"))}
    return text_at({str(name).lower(): item for name, item in properties.items()}, _SESSION_NAMES)


def _usage_of(row: Mapping[str, Any]) -> Usage:
    """Counts of the row, for rows without a response.

    `prompt_tokens` is what Anthropic calls `input_tokens`; of the other vendors, Helicone takes the
    cached tokens out only since 2025, so that their total is unknown where some were read.
    """
    rest = count(row.get("prompt_tokens"))
    read = count(row.get("prompt_cache_read_tokens"))
    written = count(row.get("prompt_cache_write_tokens"))
    cached = (read or 0) + (written or 0)
    is_outside = str(row.get("provider")).upper() in {"ANTHROPIC", "BEDROCK"} or (
        rest is not None and cached > rest
    )
    if cached and rest is not None:
        rest = rest + cached if is_outside else None
    return Usage(rest, read, written, num_output=count(row.get("completion_tokens")))


HELICONE = LogFormat(
    "helicone",
    is_helicone_row,
    partial(columns_reader, COLUMNS, _exchange_of, rows_of=_rows_of),
)
