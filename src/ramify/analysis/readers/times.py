"""Times of logs: numbers in any unit and texts of ISO 8601 as seconds since the epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

# A date after 1973 in milliseconds, microseconds and nanoseconds is above these bounds.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


@dataclass(frozen=True, slots=True)
class Times:
    """When a request began, answered first and ended, in seconds since the epoch."""

    start_s: float | None = None
    first_output_s: float | None = None
    end_s: float | None = None

    @classmethod
    def in_order(
        cls, start_s: float | None, first_output_s: float | None, end_s: float | None
    ) -> Times:
        """The times that make sense: a first output or an end before the start is left out."""
        if start_s is not None and first_output_s is not None and first_output_s < start_s:
            first_output_s = None
        if start_s is not None and end_s is not None and end_s < start_s:
            end_s = None
        return cls(start_s, first_output_s, end_s)


def parse_time(value: object) -> float | None:
    """Seconds of a number (s, ms, µs or ns by its magnitude), an ISO text or a `datetime` of Parquet.

    Without a zone it is UTC.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, datetime):
        return _timestamp(value)
    if isinstance(value, int | float):
        return _seconds(float(value)) if abs(value) < 1e300 else None
    if not isinstance(value, str) or not value or len(value) > 64:
        return None
    try:
        return _seconds(float(value))
    except ValueError:
        pass
    text = value.strip()
    if text.endswith(" UTC"):
        text = text.removesuffix(" UTC") + "+00:00"
    try:
        return _timestamp(datetime.fromisoformat(_six_digits(text)))
    except ValueError:
        return None


def _timestamp(moment: datetime) -> float | None:
    try:
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        return None


def _seconds(number: float) -> float | None:
    if not math.isfinite(number) or number < 0:
        return None
    for bound, per_second in _UNITS:
        if number >= bound:
            return number / per_second
    return number


def _six_digits(text: str) -> str:
    """ISO text with at most six digits of a second; nanoseconds are cut."""
    head, dot, tail = text.partition(".")
    if not dot:
        return text
    digits = len(tail) - len(tail.lstrip("0123456789"))
    return f"{head}.{tail[: min(digits, 6)]}{tail[digits:]}" if digits else text


def time_of(row: Mapping[str, Any], *keys: str) -> float | None:
    """The first of these keys that holds a time."""
    for key in keys:
        if key in row:
            time = parse_time(row[key])
            if time is not None:
                return time
    return None


def duration(value: Any, *, unit_s: float = 1.0) -> float | None:
    """A duration of `value` units in seconds, from a number or its text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) * unit_s if 0 <= value < 1e12 else None


def later(start_s: float | None, seconds: float | None) -> float | None:
    """A time some seconds after another; None if either is unknown."""
    return None if start_s is None or seconds is None else start_s + seconds
