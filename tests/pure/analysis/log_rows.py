"""Rows of a log for the tests of formats: read them, mutate them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ramify.analysis.reading import BadRowError, LogFormat, ReadQuality, Row
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
