"""Fields of the rows of gateways and tracers, which have many names for the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from functools import cache
from typing import Any

from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.records import Segment, TextForm, Usage

# Whole texts that stand for a text which was not stored.
_REDACTED = frozenset(
    """redacted-by-litellm REDACTED_BY_LITELM REDACTED_BY_LITELLM __REDACTED__ [REDACTED] <redacted>
    [TRUNCATED] [Truncated] [REMOVED]""".split()
)
_MAX_REDACTED_CHARS = max(map(len, _REDACTED))


def mapping_in(value: Any) -> Mapping[str, Any]:
    """The object that a value is or, as JSON text, holds; empty if there is none.

    A map of Parquet is a list of pairs.
    """
    value = decode_nested(value)
    if isinstance(value, list) and value and all(map(_is_pair, value)):
        return dict(value)
    return value if isinstance(value, dict) else {}


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


@cache
def names_in(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def first_value(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Value of the first name for which the row has a value; None if it has none."""
    for name in names:
        value = row.get(name)
        if value is not None and value != "":
            return value
    return None


def first_text(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """As `first_value` for texts and whole numbers; None for every other value."""
    value = first_value(row, names)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def merge_usage(first: Usage, other: Usage) -> Usage:
    """Counts of the first, and of the other where the first has none."""
    pairs = zip(astuple(first), astuple(other), strict=True)
    return Usage(*(spare if known is None else known for known, spare in pairs))


def is_redacted(segments: Iterable[Segment]) -> bool:
    """Whether a text of a prompt was replaced by a placeholder before it was stored."""
    return any(
        len(segment.text) <= _MAX_REDACTED_CHARS
        and segment.form is TextForm.TEXT
        and segment.text in _REDACTED
        for segment in segments
    )
