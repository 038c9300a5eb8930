"""Values of a decoded row by name; a value of another type makes the row bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError, ReadQuality, Row, RowReader
from ramify.analysis.readers.times import parse_time
from ramify.analysis.records import LoggedRequest

MAX_QUOTED = 40  # characters of a bad value in a message


def quoted(value: object) -> str:
    """A value for an error message, cut."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def mapping_of(value: object, name: str) -> Mapping[str, Any]:
    """The value, which has to be an object."""
    if isinstance(value, Mapping):
        return value
    raise BadRowError(f"{name} is {quoted(value)}, not an object")


def list_of(value: object, name: str) -> list[Any]:
    """The value, which has to be an array."""
    if isinstance(value, list):
        return value
    raise BadRowError(f"{name} is {quoted(value)}, not an array")


def get_text(row: Mapping[str, Any], name: str) -> str | None:
    """A string, or None if it is absent or null."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRowError(f"{name} is {quoted(value)}, not a string")


def get_name(row: Mapping[str, Any], name: str) -> str | None:
    """A string or an integer as a string, or None if it is absent or null."""
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
        return str(value)
    return get_text(row, name)


def get_number(row: Mapping[str, Any], name: str) -> float | None:
    """A finite number, or None if it is absent or null."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise BadRowError(f"{name} is {quoted(value)}, not a finite number")


def get_time(row: Mapping[str, Any], name: str) -> float | None:
    """Seconds since the epoch of a number or an ISO 8601 text, or None if it is absent or null."""
    value = row.get(name)
    if value is None:
        return None
    time = parse_time(value)
    if time is None:
        raise BadRowError(f"{name} is {quoted(value)}, not a time")
    return time


def ids_of(value: object, name: str) -> tuple[int, ...]:
    """Integers of an array.

    Ids have at most 64 bits.
    """
    ids = list_of(value, name)
    if not set(map(type, ids)) <= {int}:
        bad = next(item for item in ids if type(item) is not int)
        raise BadRowError(f"{name} has {quoted(bad)}, not an integer")
    if ids and not (min(ids) >= -(1 << 63) and max(ids) < 1 << 64):
        raise BadRowError(f"{name} has an integer of more than 64 bits")
    return tuple(ids)


class LineIndices:
    """Numbers the requests of a line, which may have several rows."""

    def __init__(self) -> None:
        self._place: tuple[str, int] | None = None
        self._next = 0

    def take(self, row: Row) -> int:
        """The next number of the row's line."""
        place = (row.file, row.line)
        if place != self._place:
            self._place, self._next = place, 0
        self._next += 1
        return self._next - 1


class RowByRow(RowReader):
    """A `RowReader` whose rows need no other rows; an index of a request is one in its row."""

    def __init__(
        self,
        read: Callable[[Row, ReadQuality], Iterator[LoggedRequest]],
        quality: ReadQuality,
    ) -> None:
        self._read, self._quality = read, quality
        self._indices = LineIndices()

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for request in self._read(row, self._quality):
            if request.index is None:
                yield request
            else:
                yield replace(request, index=self._indices.take(row))
