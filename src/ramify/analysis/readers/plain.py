"""Plain text: each row is a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.row_values import RowByRow, quoted
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind


def is_plain(value: Any) -> bool:
    """Whether a row is text that no other format has decoded."""
    return isinstance(value, str)


def read_plain(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """A request for a row of text; an empty row is none."""
    if not isinstance(row.value, str):
        raise BadRowError(f"row is {quoted(row.value)}, not text")
    if not row.value.strip():
        quality.skipped["empty line"] += 1
        return
    segment = Segment("prompt", SegmentKind.MESSAGE, row.value)
    yield LoggedRequest(*row.place, segments=(segment,))


PLAIN = LogFormat("plain", is_plain, partial(RowByRow, read_plain), is_text=True)
