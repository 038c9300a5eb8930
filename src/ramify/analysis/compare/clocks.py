"""Dates and times in any notation: by their shape, or by how they follow the times of requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from ramify.analysis.compare.text_diff import DATE_WORDS

_SHAPES = re.compile(
    r"""(?ix)
    \d{4}[-/.]\d{1,2}[-/.]\d{1,2}        # 2026-03-04
    | \b\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})\b   # 4.3.2026, 3/4/26
    | \b\d{1,2}[./ ][IVX]{1,4}[./ ]\d{4}\b   # 4/III/2026
    | \b\d{1,2}:\d{2}(?::\d{2})?\b       # 14:05
    | \b\d{1,2}(?:h|\s?uhr)\s?\d{2}\b    # 14h05
    | \b(?:19|20)\d{6}(?:T?\d{4,6})?Z?\b # 20260304T140500
    | \b1[4-9]\d{8}(?:\.\d+)?\b | \b1[4-9]\d{11}\b | \b1[4-9]\d{14,17}\b   # seconds, ms, µs, ns
    | \b\d{4}-?W\d{2}(?:-?\d)?\b         # 2026-W10-3
    | \b(?:19|20)\d{2}-\d{3}T\d         # day of the year
    | \b1\.[4-9]\d{6,}e\+?0?9\b | \b63\d{16}\b   # seconds with an exponent, ticks of .NET
    | \d{1,4}\s?[년월일시분](?!\d) | [월화수목금토일]요일
    | 星期[一二三四五六日天] | [周週][一二三四五六日] | [月火水木金土日]曜
    | \b(?:\d+|an?|one|two|few)\s+(?:second|minute|hour|day|week|month|year)s?\s+ago\b
    | \bjust\s+now\b | \byesterday\b
    | \b\d{1,2}\s?[ap]\.?m\b
    | [\d〇一二三四五六七八九十]{1,4}(?:年|時) | [\d一二三四五六七八九十]{1,3}月[\d一二三四五六七八九十]{1,3}日
    """
)
_DURATION = re.compile(
    r"(?:\d{1,3}\s?d(?:ays?)?\s?)?(?:\d{1,3}\s?h(?:rs?)?\s?)?(?:\d{1,3}\s?m(?:ins?)?\s?)?(?:\d{1,2}\s?s)?"
)
_VERSION = re.compile(r"(?i)\b(?:version|release|revision)\W{0,3}$")
# A name with a colon, or a measure.
_NAMED = re.compile(
    r"(?i)[^\W\d_]{3,}\s?[:=]\s?$|\b(?:rate|ratio|rating|score|factor|level)\W{0,2}$"
)
_COUNTED = re.compile(r" (?:(?:out )?of \d|[^\W\d_]{3,})|/\d")
MAX_OTHER_WORDS = 8
_NUMBERS = re.compile(r"\d+")
_WORDS = re.compile(r"[^\W\d_]+")
# Numbers, parts of a day and small words of dates that are spelt out.
_SPOKEN_NUMBERS = frozenset(
    """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty hundred thousand first second third fourth fifth
    sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth
    eighteenth nineteenth twentieth thirtieth half quarter
    eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn
    siebzehn achtzehn neunzehn zwanzig dreißig halb viertel erste zweite dritte vierte fünfte sechste siebte
    achte neunte zehnte elfte zwölfte
    un une deux trois quatre cinq sept huit neuf dix onze douze treize quatorze quinze seize vingt trente
    demie quart premier deuxième troisième
    uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince veinte treinta media
    cuarto primero""".split()
)
_PARTS_OF_DAY = frozenset(
    """o'clock noon midnight morning afternoon evening night tonight uhr mittag mitternacht morgens vormittags
    nachmittags abends nachts matin soir heures mañana tarde noche""".split()
)
_FILLERS = frozenset(
    """the of a an and in on at to past after before till shortly just nearly almost about exactly der den
    dem am um kurz vor nach le la les du de des et à el los y en menos""".split()
)
_ORDINAL_ENDING = re.compile(r"(?<=[a-zß]{3})(?:e[rnsm])$")  # German: dritter, dritten


def numbers_in(value: str) -> tuple[int, ...]:
    """The whole numbers in a text."""
    return tuple(map(int, _NUMBERS.findall(value)))


def looks_like_clock(value: str) -> bool:
    """Whether a text is a date or a time and little else."""
    if len(value) > 80:
        return False
    if _SHAPES.search(value) or is_duration(value):
        return True
    words = [word.lower() for word in _WORDS.findall(value)]
    dates = [word for word in words if word in DATE_WORDS]
    return bool(dates) and len(dates) * 2 >= len(words)


def is_duration(value: str) -> bool:
    """Whether a text is a time span in two units or more: 3h12m."""
    bare = value.strip(" .,;")
    return len(_NUMBERS.findall(bare)) > 1 and bool(_DURATION.fullmatch(bare))


def is_version(line_before: str) -> bool:
    """Whether the text before a number says that it is a version."""
    return bool(_VERSION.search(line_before))


def is_count(line_before: str, after: str) -> bool:
    """Whether the words around a number say that it counts or measures things."""
    return bool(_NAMED.search(line_before)) or bool(_COUNTED.match(after))


def is_spelt_out(value: str, line: str) -> bool:
    """Whether a text is a date or a time in words, or a number in words in a line that names one."""
    words = [_without_case(word) for word in _WORDS.findall(value)]
    if not words or len(words) > 14 or any(map(str.isdigit, value)):
        return False
    marks = [word for word in words if word in _PARTS_OF_DAY or _names_day(word)]
    numbers = [word for word in words if word in _SPOKEN_NUMBERS]
    if any(map(_is_other, words)) or not (marks or numbers):
        return False
    return bool(marks) or names_date(line) or not _PARTS_OF_DAY.isdisjoint(line.lower().split())


def is_prose(value: str) -> bool:
    """Whether a text has more words than a date or a time could have beside its own."""
    words = map(_without_case, _WORDS.findall(value))
    return sum(map(_is_other, words)) > MAX_OTHER_WORDS


def _is_other(word: str) -> bool:
    """Whether a word in lower case is no word of a date or a time."""
    is_known = word in DATE_WORDS or word in _FILLERS or word in _SPOKEN_NUMBERS
    return not is_known and word not in _PARTS_OF_DAY


def _without_case(word: str) -> str:
    """A word in lower case, a German ordinal without its ending: `Dritten` is `dritte`."""
    lower = word.lower()
    ending = _ORDINAL_ENDING.search(lower)
    return lower[:-1] if ending and lower[:-1] in _SPOKEN_NUMBERS else lower


def _names_day(word: str) -> bool:
    return len(word) > 3 and word in DATE_WORDS


def names_date(line: str) -> bool:
    """Whether a line names a month or a weekday."""
    return any(_names_day(word.lower()) for word in _WORDS.findall(line))


def grows_unevenly(values: Sequence[str]) -> bool:
    """Whether values grow in the order of requests by different steps, as the parts of a time do."""
    rows = list(map(numbers_in, values))
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
    numbers = [numbers_in(value) for value, _ in pairs]
    if min(map(len, numbers)) < 2 or pairs[0][1] < 1e8:
        return False
    for quarter_hours in range(-48, 57):
        offset = timedelta(minutes=15 * quarter_hours)
        hits = sum(
            _calendar(time, offset).issuperset(row)
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
