"""Dates and times in any notation: by their shape, or by how they follow the times of requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from ramify.analysis.text_diff import DATE_WORDS

_SHAPES = re.compile(
    r"""(?ix)
    \d{4}[-/.]\d{1,2}[-/.]\d{1,2}        # 2026-03-04
    | \b\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})\b   # 4.3.2026, 3/4/26
    | \b\d{1,2}:\d{2}(?::\d{2})?\b       # 14:05
    | \b\d{1,2}(?:h|\s?uhr)\s?\d{2}\b    # 14h05
    | \b(?:19|20)\d{6}(?:T?\d{4,6})?Z?\b # 20260304T140500
    | \b1[4-9]\d{8}(?:\.\d+)?\b | \b1[4-9]\d{11}\b | \b1[4-9]\d{14,17}\b   # seconds, ms, µs, ns
    | \b\d{4}-?W\d{2}(?:-?\d)?\b         # 2026-W10-3
    | \b(?:\d+|an?|one|two|few)\s+(?:second|minute|hour|day|week|month|year)s?\s+ago\b
    | \bjust\s+now\b | \byesterday\b
    | \b\d{1,2}\s?[ap]\.?m\b
    | \d{4}年|\d{1,2}月\d{1,2}日|\d{1,2}時
    """
)
_NUMBERS = re.compile(r"\d+")
_WORDS = re.compile(r"[^\W\d_]+")
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()


def looks_like_clock(value: str) -> bool:
    """Whether a text is a date or a time and little else."""
    if len(value) > 80:
        return False
    if _SHAPES.search(value):
        return True
    words = [word.lower() for word in _WORDS.findall(value)]
    dates = [word for word in words if word in DATE_WORDS]
    if not dates:
        return False
    has_number = bool(_NUMBERS.search(value))
    return len(dates) * 2 >= len(words) and (has_number or len(dates) >= 1)


def names_date(line: str) -> bool:
    """Whether a line names a month or a weekday."""
    return any(len(word) > 3 and word.lower() in DATE_WORDS for word in _WORDS.findall(line))


def grows_unevenly(values: Sequence[str]) -> bool:
    """Whether values grow in the order of requests by different steps, as the parts of a time do."""
    rows = [tuple(int(number) for number in _NUMBERS.findall(value)) for value in values]
    if len(set(rows)) < 5 or not all(rows) or len(set(map(len, rows))) > 1:
        return False
    steps = [(b > a) - (b < a) for a, b in pairwise(rows)]
    sizes = {b[-1] - a[-1] for a, b in pairwise(rows)}
    return steps.count(1) >= 0.8 * (len(steps) - steps.count(0)) and len(sizes) > 2


def follows_times(values: Sequence[str], times: Sequence[float | None]) -> bool:
    """Whether the numbers in the values are those of the request times, or grow in proportion.

    Dates and times of day may be those of any time zone.
    """
    pairs = [
        (value, time)
        for value, time in zip(values, times, strict=True)
        if time is not None and value
    ]
    if len({value for value, _ in pairs}) < 3 or pairs[-1][1] <= pairs[0][1]:
        return False
    return _has_calendar_numbers(pairs) or _grows_with_time(pairs)


def _has_calendar_numbers(pairs: Sequence[tuple[str, float]]) -> bool:
    numbers = [[int(n) for n in _NUMBERS.findall(value)] for value, _ in pairs]
    if min(map(len, numbers)) < 2 or pairs[0][1] < 1e8:
        return False
    for quarter_hours in range(-48, 57):
        offset = timedelta(minutes=15 * quarter_hours)
        hits = sum(
            all(number in _calendar(time, offset) for number in row)
            for row, (_, time) in zip(numbers, pairs, strict=True)
        )
        if hits >= 0.9 * len(pairs):
            return True
    return False


def _calendar(time: float, offset: timedelta) -> frozenset[int]:
    moment = datetime.fromtimestamp(time, UTC) + offset
    return frozenset(
        {
            moment.year,
            moment.year % 100,
            moment.month,
            moment.day,
            moment.hour,
            (moment.hour - 1) % 12 + 1,
            moment.minute,
            moment.second,
            moment.timetuple().tm_yday,
            moment.isocalendar().week,
            moment.isoweekday(),
            moment.microsecond // 1000,
        }
    )


def _grows_with_time(pairs: Sequence[tuple[str, float]]) -> bool:
    """Whether the values are one number that is a linear function of time, and no serial number."""
    if len(pairs) < 4:
        return False
    numbers: list[float] = []
    for value, _ in pairs:
        try:
            numbers.append(float(value.replace(",", "")))
        except ValueError:
            return False
    steps = [b - a for a, b in pairwise(numbers)]
    if any(step < 0 for step in steps) or len(set(steps)) <= 2:
        return False
    times = [time for _, time in pairs]
    slope = (numbers[-1] - numbers[0]) / (times[-1] - times[0])
    if slope <= 0:
        return False
    span = numbers[-1] - numbers[0]
    return all(
        abs(numbers[0] + slope * (time - times[0]) - number) <= max(1.0, 0.002 * span)
        for number, time in zip(numbers, times, strict=True)
    )
