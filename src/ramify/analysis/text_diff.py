"""Differences of two texts as pairs of values: whole words, dates and paths, not single letters."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import NamedTuple

MAX_LINES, MAX_WORDS = 3000, 1500  # in the middle that differs; beyond, it is one hunk

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_EDGE = frozenset(" \t\r\n\"'<>{}[](),;=|`\u201c\u201d\u3001\uff0c")
# Words of which dates and times are made, beside numbers.
DATE_WORDS = frozenset(
    """january february march april may june july august september october november december
    jan feb mar apr jun jul aug sep sept oct nov dec monday tuesday wednesday thursday friday saturday
    sunday mon tue tues wed thu thur thurs fri sat sun am pm a.m. p.m. utc gmt cet cest est edt pst pdt
    z o'clock noon midnight januar februar märz maerz mai juni juli oktober dezember montag dienstag
    mittwoch donnerstag freitag samstag sonnabend sonntag mo di mi do fr sa so uhr janvier février mars
    avril juin juillet août septembre octobre novembre décembre lundi mardi mercredi jeudi vendredi
    samedi dimanche enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre
    diciembre lunes martes miércoles jueves viernes sábado domingo""".split()
)
_ORDINAL = re.compile(r"\d{1,4}(?:st|nd|rd|th|\.)?,?$", re.IGNORECASE)


class Hunk(NamedTuple):
    """A value that differs: its place in the first text and in the second."""

    start: int
    end: int
    other_start: int
    other_end: int


def common_prefix_len(a: str, b: str) -> int:
    """Code points at the start that are equal."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] is equal, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def find_hunks(a: str, b: str) -> list[Hunk]:
    """Values in which two texts differ, in order; the text between them is equal."""
    if a == b:
        return []
    head = common_prefix_len(a, b)
    tail = common_prefix_len(a[head:][::-1], b[head:][::-1])
    a_end, b_end = len(a) - tail, len(b) - tail
    # The middle grows to whole words, so that no word is compared in parts.
    left = _left_edge(a, head)
    right = _right_edge(a, a_end) - a_end
    middle = _diff(a[left : a_end + right], b[left : b_end + right])
    hunks = [
        Hunk(h.start + left, h.end + left, h.other_start + left, h.other_end + left) for h in middle
    ]
    return _merge([_grow(hunk, a, b) for hunk in hunks], a)


def _diff(a: str, b: str) -> list[Hunk]:
    if "\n" in a and "\n" in b:
        lines_a, lines_b = a.splitlines(keepends=True), b.splitlines(keepends=True)
        if max(len(lines_a), len(lines_b)) > MAX_LINES:
            return [Hunk(0, len(a), 0, len(b))]
        hunks: list[Hunk] = []
        for hunk in _match(lines_a, lines_b):
            inner = _diff_words(a[hunk.start : hunk.end], b[hunk.other_start : hunk.other_end])
            hunks.extend(
                Hunk(
                    h.start + hunk.start,
                    h.end + hunk.start,
                    h.other_start + hunk.other_start,
                    h.other_end + hunk.other_start,
                )
                for h in inner
            )
        return hunks
    return _diff_words(a, b)


def _diff_words(a: str, b: str) -> list[Hunk]:
    words_a, words_b = _WORD.findall(a), _WORD.findall(b)
    if not words_a or not words_b or max(len(words_a), len(words_b)) > MAX_WORDS:
        return [Hunk(0, len(a), 0, len(b))]
    if min(len(words_a), len(words_b)) > 60:
        set_a, set_b = set(words_a), set(words_b)
        if len(set_a & set_b) * 2 < max(len(set_a), len(set_b)):
            return [Hunk(0, len(a), 0, len(b))]  # unrelated texts have words in common by chance
    return _drop_islands(_match(words_a, words_b))


def _drop_islands(hunks: list[Hunk]) -> list[Hunk]:
    """Hunks that only a few equal words part, fewer than differ, as one."""
    kept: list[Hunk] = []
    for hunk in hunks:
        if kept:
            last = kept[-1]
            gap = hunk.start - last.end
            if gap < 20 and gap < max(_size(last), _size(hunk)):
                kept[-1] = Hunk(last.start, hunk.end, last.other_start, hunk.other_end)
                continue
        kept.append(hunk)
    return kept


def _size(hunk: Hunk) -> int:
    return max(hunk.end - hunk.start, hunk.other_end - hunk.other_start)


def _match(a: list[str], b: list[str]) -> list[Hunk]:
    """Hunks of two lists of pieces, as places in the joined texts."""
    starts_a, starts_b = _starts(a), _starts(b)
    return [
        Hunk(starts_a[i1], starts_a[i2], starts_b[j1], starts_b[j2])
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        if tag != "equal"
    ]


def _starts(pieces: list[str]) -> list[int]:
    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    return starts


def _left_edge(text: str, at: int) -> int:
    while at > 0 and text[at - 1] not in _EDGE:
        at -= 1
    return at


def _right_edge(text: str, at: int) -> int:
    while at < len(text) and text[at] not in _EDGE:
        at += 1
    return at


def _grow(hunk: Hunk, a: str, b: str) -> Hunk:
    """The hunk with the rest of its words, and of the date it belongs to; the rest is equal text."""
    if not a[hunk.start : hunk.end].strip() and not b[hunk.other_start : hunk.other_end].strip():
        return hunk  # white space is no value
    left = _left_edge(a, hunk.start)
    right = _right_edge(a, hunk.end)
    if any(map(str.isdigit, a[left:right])) or a[left:right].strip(".,").lower() in DATE_WORDS:
        left, right = _grow_date(a, left, right)
    before, after = hunk.start - left, right - hunk.end
    # Growth stops where the other text is no longer equal: the next hunk begins there.
    while (
        before
        and a[hunk.start - before : hunk.start]
        != b[max(0, hunk.other_start - before) : hunk.other_start]
    ):
        before -= 1
    while after and a[hunk.end : hunk.end + after] != b[hunk.other_end : hunk.other_end + after]:
        after -= 1
    return Hunk(
        hunk.start - before, hunk.end + after, hunk.other_start - before, hunk.other_end + after
    )


def _grow_date(text: str, left: int, right: int) -> tuple[int, int]:
    for _ in range(6):
        gap = 2 if text[max(0, left - 2) : left] == ", " else 1
        start = _left_edge(text, left - gap) if left > gap else left
        if start < left - gap and text[left - 1] == " " and _is_date_word(text[start : left - gap]):
            left = start
        else:
            break
    for _ in range(6):
        gap = 2 if text[right : right + 2] == ", " else 1
        end = _right_edge(text, right + gap)
        if text[right + gap - 1 : right + gap] == " " and _is_date_word(text[right + gap : end]):
            right = end
        else:
            break
    return left, right


def _is_date_word(word: str) -> bool:
    bare = word.strip(".,").lower()
    return bare in DATE_WORDS or bool(_ORDINAL.match(word)) or bool(re.match(r"\d+[:.]\d+", word))


def _merge(hunks: list[Hunk], a: str) -> list[Hunk]:
    """Hunks that touch, or that only a mark or a blank between numbers parts, as one."""
    merged: list[Hunk] = []
    for hunk in hunks:
        if merged:
            last = merged[-1]
            gap = a[last.end : hunk.start]
            if hunk.start <= last.end or (len(gap) <= 2 and "\n" not in gap and not _is_wordy(gap)):
                merged[-1] = Hunk(
                    min(last.start, hunk.start),
                    max(last.end, hunk.end),
                    min(last.other_start, hunk.other_start),
                    max(last.other_end, hunk.other_end),
                )
                continue
        merged.append(hunk)
    return merged


def _is_wordy(gap: str) -> bool:
    return any(map(str.isalnum, gap))
