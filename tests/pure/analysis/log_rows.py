"""Rows of a log for the tests of formats: read them, mutate them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.records import LoggedRequest


def read_rows(
    log_format: LogFormat, values: Iterable[Any], *, file: str = "log.jsonl"
) -> tuple[list[LoggedRequest], ReadQuality]:
    """Requests of rows that are on lines 1, 2, 3, …; a bad row is counted."""
    quality = ReadQuality()
    reader = log_format.reader(quality)
    requests: list[LoggedRequest] = []
    for number, value in enumerate(values, 1):
        try:
            requests.extend(reader.feed(Row(file, number, value)))
        except BadRowError as error:
            quality.add_bad_line(file, number, str(error))
    requests.extend(reader.close())
    return requests, quality


def jsonl(text: str) -> list[Any]:
    """Values of the lines of a text."""
    return [json.loads(line) for line in text.strip().splitlines()]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def mutate(data: st.DataObject, value: Any) -> Any:
    """The value with one part replaced, dropped or doubled."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 3)):
            return value | {key: mutate(data, value[key])}
        return {name: item for name, item in value.items() if name != key}
    if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], mutate(data, value[index]), *value[index:]]
    return data.draw(JSON)
