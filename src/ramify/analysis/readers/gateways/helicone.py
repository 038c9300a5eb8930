"""Helicone: rows of its export and of its request API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import LogFormat, ReadQuality
from ramify.analysis.readers.bodies.exchanges import FAILED, OWN_CACHE, Exchange, ExchangeReader
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.gateways.hosts import provider_of_name
from ramify.analysis.readers.row_fields import first_text, first_value, mapping_in
from ramify.analysis.readers.times import Times, duration, later, time_of
from ramify.analysis.records import Usage

_NO_ID = "00000000-0000-0000-0000-000000000000"
_SESSION_NAMES = ("helicone-session-id", "session-id", "session_id", "sessionid")
_MODEL_KEYS = ("model_override", "request_model", "model")


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


_KEYS = frozenset(
    """request_body response_body response_status request_path signed_body_url response_id request_id
    request_properties""".split()
)


def _values_of(value: Mapping[str, Any]) -> list[Any]:
    """The rows of a page; else the row itself."""
    rows: list[Any] = [value] if "request_created_at" in value else value["data"]
    return rows


def _exchange_of(value: Mapping[str, Any], quality: ReadQuality) -> Exchange | None:
    """Each row with an answer of the vendor is a request.

    `cache_enabled` and `cache_reference_id` are of Helicone's own cache of responses.
    """
    if value.get("cache_reference_id") not in (None, "", _NO_ID):
        quality.skipped[OWN_CACHE] += 1
        return None
    status = value.get("response_status")
    code = count(status)
    if status not in (None, "") and (code is None or not 200 <= code < 300):
        quality.skipped[FAILED] += 1  # negative for time-outs and what is under way
        return None
    start_s = time_of(value, "request_created_at")
    end_s = later(start_s, duration(first_value(value, ("delay_ms", "latency")), unit_s=1e-3))
    first_s = later(start_s, duration(value.get("time_to_first_token"), unit_s=1e-3))
    model = first_text(value, _MODEL_KEYS)
    whole = mapping_in(value.get("body"))  # the two bodies in one object, as stored by Helicone
    body = mapping_in(first_value(value, ("request_body",)) or whole.get("request"))
    path = first_text(value, ("request_path", "target_url"))
    return Exchange(
        body=body if body or model is None else {"model": model},
        response=first_value(value, ("response_body",)) or whole.get("response"),
        url=path or "",
        usage=_usage_of(value),
        times=Times.in_order(start_s, first_s, end_s or time_of(value, "response_created_at")),
        request_id=first_text(value, ("request_id", "response_id")),
        conversation=_session_of(value),
        provider=provider_of_name(first_text(value, ("provider",)), model),
        model=None if body.get("model") else model,
        response_model=first_text(value, ("response_model",)),
        template=first_text(value, ("prompt_id",)),
    )


def _session_of(value: Mapping[str, Any]) -> str | None:
    for key in ("request_properties", "properties"):
        properties = {
            name.lower(): item
            for name, item in mapping_in(value.get(key)).items()
            if isinstance(name, str)
        }
        session = first_text(properties, _SESSION_NAMES)
        if session is not None:
            return session
    return None


def _usage_of(value: Mapping[str, Any]) -> Usage:
    """Counts of the row, for rows without a response.

    `prompt_tokens` is what Anthropic calls `input_tokens`; of the other vendors, Helicone takes the
    cached tokens out only since 2025, so that their total is unknown where some were read.
    """
    rest = count(value.get("prompt_tokens"))
    read = count(value.get("prompt_cache_read_tokens"))
    written = count(value.get("prompt_cache_write_tokens"))
    cached = (read or 0) + (written or 0)
    is_outside = str(value.get("provider")).upper() in {"ANTHROPIC", "BEDROCK"} or (
        rest is not None and cached > rest
    )
    if cached and rest is not None:
        rest = rest + cached if is_outside else None
    return Usage(
        num_input=rest,
        num_read=read,
        num_written=written,
        num_output=count(value.get("completion_tokens")),
    )


HELICONE = LogFormat("helicone", is_helicone_row, partial(ExchangeReader, _values_of, _exchange_of))
