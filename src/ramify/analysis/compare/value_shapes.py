"""Shapes of values that change: dates and times, ids, paths, lines of a status block."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CLOCK = 80  # code points of a date or a time
MAX_SHORT_WORD = 3  # letters of a date word that is another word too: may, sun, am
MIN_RANDOM_DIGITS = 9  # behind the point of a random number; a time has fewer
# English names of days and months, and what stands beside them; other languages show by their behaviour.
DATE_WORDS = frozenset(
    """january february march april may june july august september october november december
    jan feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday
    sunday mon tue tues wed thu thur thurs fri sat sun am pm a.m. p.m. utc gmt z o'clock noon midnight""".split()
)
_CLOCK = re.compile(
    r"""(?ix)
    \d{4}[-/.]\d{1,2}[-/.]\d{1,2}                          # 2026-03-04
    | \b\d{1,2}[-/.](?:\d{1,2}|[IVX]{1,4})[-/.](?:\d{4}|\d{2})\b  # 4.3.2026, 3/4/26
    | (?:\b|(?<=\dT))\d{1,2}:\d{2}\b                       # 14:05
    | \b(?:19|20)\d{6}(?:T?\d{4,6})?Z?\b                   # 20260304T140500
    | \b1[4-9]\d{8}(?:\.\d+)?\b | \b1[4-9]\d{11}\b | \b1[4-9]\d{14,17}\b  # seconds, ms, µs, ns
    | \b\d{4}-?W\d{2}(?:-?\d)?\b                           # 2026-W10-3
    | \bT(?:[01]\d|2[0-3])[0-5]\d(?:[0-5]\d)?Z?\b           # T0915
    | \b\d{1,2}\s?[ap]\.?m\b                               # 10am
    | \d{1,4}\s?[年月日時分년월일시분](?!\d)                 # 3月4日
    | \b(?:\d+|an?|one|two|few)\s+(?:second|minute|hour|day|week|month|year)s?\s+ago\b
    | \bjust\s+now\b | \byesterday\b
    """
)
_NUMBERS = re.compile(r"\d+")
_LETTERS = re.compile(r"[^\W\d_]+")
_DECIMAL = re.compile(r"\D?\d+\.(\d+)")
_MIXED = re.compile(r"\b(?=\w{4})\d+[A-Za-z]+\d")
_HEX = re.compile(r"(?:[0-9a-f]{2,}-)*[0-9a-f]{6,}", re.IGNORECASE)
_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/][\w.@~+-]+[\\/]|~/|\w+://|^\.{0,2}/\w|\w/\w+/\w")
_FILE = re.compile(r"[\w.@+-]*[a-zA-Z][\w.@+-]*/[\w.@+-]*[a-zA-Z_]\.[a-zA-Z]\w{0,5}$")
_DATE = re.compile(r"(?<![\w/])\d{1,4}/(?:\d{1,2}|[IVX]{1,4}|[A-Za-z]{3,9})/\d{1,4}(?![\w/])")
_CHECK_BOX = re.compile(r"(?:[-*+]|\d+[.)])?\s*(?:\[[ xX~/-]?\]|[☐☑☒✅⬜✓✔✗✘])(?:\s|$)")
# A file behind the letters of its state. Behind a single letter a word could be prose: `A plum`.
_CHANGED_FILE = re.compile(
    r"(?:\?\?|!!|[MTADRCU]{1,2}) (?=\S*[./])\S+(?: -> \S+)?(?:<|$)|(?:\?\?|!!) \S"
)
_CHANGED = re.compile(r"(?:\?\?|!!|[MTADRCU]{1,2}) \S")
_GIT_STATUS = re.compile(r"(?i)\bgit[ _]?status\b|^status:", re.MULTILINE)
_LISTED_FILE = re.compile(r"[-*+•│├└─\s]*+[\w@.+-]*(?:/[\w@.+/-]*|[a-zA-Z_]\.[a-zA-Z]\w{0,5})$")
_STATUS_HEADER = re.compile(
    r"(?i)(?:^|[<\s#*_-])(?:status|state|todos?|todo[ _]list|task[ _]list|recent[ _]commits|"
    r"open[ _](?:files|tabs)|(?:modified|changed|staged|untracked)[ _]files)\b[^\n:>]{0,24}[:>]\W*$"
)


def numbers_in(value: str) -> tuple[int, ...]:
    """The whole numbers in a text, in digits of any script."""
    return tuple(map(int, _NUMBERS.findall(value)))


def has_digits(value: str) -> bool:
    """Whether a text has a digit of any script."""
    return any(map(str.isnumeric, value))


def is_number(value: str) -> bool:
    """Whether a text has digits, and not more letters than digits."""
    return has_digits(value) and sum(map(str.isalpha, value)) <= sum(map(str.isdigit, value))


def looks_like_clock(value: str) -> bool:
    """Whether a text is a date or a time and little else."""
    if len(value) > MAX_CLOCK:
        return False
    if _CLOCK.search(value):
        return True
    words = [word.lower() for word in _LETTERS.findall(value)]
    dates = [word for word in words if word in DATE_WORDS]
    names = [word for word in dates if len(word) > MAX_SHORT_WORD]
    return len(dates) * 2 >= max(1, len(words)) or len(names) * 3 >= max(1, len(words))


def names_date(text: str) -> bool:
    """Whether a text names a month or a weekday."""
    words = map(str.lower, _LETTERS.findall(text))
    return any(len(word) > MAX_SHORT_WORD and word in DATE_WORDS for word in words)


def is_random(value: str) -> bool:
    """Whether a text is a word or two with the entropy of an id, or a number of four digits or more."""
    words = value.split()
    if len(value) > 120 or len(words) > 2:
        return False
    has_digit = any(map(str.isdigit, value))
    is_mixed = any(any(map(str.isalpha, word)) and any(map(str.isdigit, word)) for word in words)
    bare = value.strip(".,:;")
    if decimal := _DECIMAL.fullmatch(bare):
        return len(decimal[1]) >= MIN_RANDOM_DIGITS
    if has_digit and (_HEX.search(bare) or _MIXED.search(bare) or (is_mixed and len(bare) >= 5)):
        return True
    return bare.isdigit() and len(bare) >= 4


def are_random(values: Sequence[str]) -> bool:
    """Whether all values are random; of 24 letters and digits, 1 in 75 has no digit."""
    lengths = {len(value) for value in values if is_random(value)}
    return all(
        is_random(value) or (len(value) in lengths and len(value.split()) == 1 and len(value) >= 8)
        for value in values
    )


def is_path(value: str) -> bool:
    """Whether a word is a path of a file or a URL, and no date with slashes."""
    bare = _DATE.sub("", value)
    return bool(_PATH.search(bare) or _FILE.match(bare))


def are_state_lines(lines: Sequence[str], before: str) -> bool:
    """Whether all lines are items with check boxes or changed files of Git.

    Args:
        lines: whole lines that a value is in or holds.
        before: the text before the value.
    """
    changed = _CHANGED if _GIT_STATUS.search(before) else _CHANGED_FILE
    return bool(lines) and all(
        _CHECK_BOX.match(line.strip()) or changed.match(line.strip()) for line in lines
    )


def are_listed_files(lines: Sequence[str], before: str, after: str) -> bool:
    """Whether all lines are file names, as is a line beside them."""
    beside = [*before.split("\n")[-2:-1], *after.split("\n")[1:2]]
    return (
        bool(lines)
        and all(_LISTED_FILE.match(line.strip()) for line in lines)
        and any(_LISTED_FILE.match(line.strip()) for line in beside)
    )


def is_in_status_block(before: str) -> bool:
    """Whether the lines up to the value, without a blank line, begin with a status block's header."""
    for line in reversed(before.split("\n")[:-1]):
        if not line.strip() or "</" in line:
            return False
        if _STATUS_HEADER.search(line):
            return True
        if line.rstrip().endswith((":", ">")):
            return False
    return False
