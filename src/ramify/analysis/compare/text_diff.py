"""Differences of two texts as pairs of values: whole words, dates and paths, not single letters."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from ramify.analysis.compare.value_shapes import DATE_WORDS

MAX_LINES = 3000  # in the middle that differs; beyond, it is one hunk
MAX_EDITS = 80  # pieces removed or added in a range without anchors
MAX_DATE = 60  # code points of a date beside a value
MAX_WORD_CHARS = 700  # of texts that are compared word by word

_WORD = re.compile(r"\w+ ?|\s+|[^\w\s] ?")
_SENTENCE = re.compile(r"[^\n.!?;]*(?:[.!?;]+\s?|\n+|$)")
_EDGE = frozenset(" \t\r\n\"'<>{}[](),;=|`\u201c\u201d\u3001\uff0c")
_CLOSING = frozenset("])}>\"'`\u201d\u3001")
_ID = re.compile(r"(?=[^\d]*\d)(?=(?:[^a-zA-Z]*[a-zA-Z]){3})[\w-]{10,}")
_DAY = re.compile(r"\d{4}-?\d{2}-?\d{2}(?!\w{8})")
_LABEL = re.compile(r"\n\w|\w[:=] ?$")  # a line's first word, or a name before a value
_DATE_WORD = (
    r"(?:\d+[:./-]\d[^\s,;]*|\d{1,4}(?:st|nd|rd|th|\.)?|(?:"
    + "|".join(map(re.escape, sorted(DATE_WORDS, key=len, reverse=True)))
    + r")\.?)(?!\w)"
)
_DATE = re.compile(rf"(?i)(?<!\w){_DATE_WORD}(?:,? {_DATE_WORD})+")  # two words of a date or more


class Hunk(NamedTuple):
    """A value that differs: its place in the first text and in the second."""

    start: int
    end: int
    other_start: int
    other_end: int

    def texts(self, a: str, b: str) -> tuple[str, str]:
        """The value in both texts."""
        return a[self.start : self.end], b[self.other_start : self.other_end]

    def moved(self, by: int, other_by: int) -> Hunk:
        """The hunk in texts that begin so many code points earlier."""
        return Hunk(
            self.start + by, self.end + by, self.other_start + other_by, self.other_end + other_by
        )

    def joined(self, other: Hunk) -> Hunk:
        """The hunk from the start of the first to the end of the last."""
        return Hunk(
            min(self.start, other.start),
            max(self.end, other.end),
            min(self.other_start, other.other_start),
            max(self.other_end, other.other_end),
        )


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
    return _merge([_grow(hunk.moved(left, left), a, b) for hunk in middle], a)


def shares_sentences(a: str, b: str) -> bool:
    """Whether at least a third of the second text stands in the first, sentence by sentence."""
    known = set(_SENTENCE.findall(a))
    equal = sum(len(piece) for piece in _SENTENCE.findall(b) if piece in known)
    return equal * 3 >= len(b)


def _diff(a: str, b: str) -> list[Hunk]:
    """Hunks of sentences first, then of words within them."""
    if max(len(a), len(b)) <= MAX_WORD_CHARS:
        return _diff_words(a, b)
    lines_a, lines_b = _SENTENCE.findall(a), _SENTENCE.findall(b)
    if max(len(lines_a), len(lines_b)) > MAX_LINES:
        return [Hunk(0, len(a), 0, len(b))]
    hunks: list[Hunk] = []
    for hunk in _match(lines_a, lines_b):
        inner = _diff_words(*hunk.texts(a, b))
        hunks += [words.moved(hunk.start, hunk.other_start) for words in inner]
    return hunks


def _diff_words(a: str, b: str) -> list[Hunk]:
    if not a or not b or max(len(a), len(b)) > MAX_WORD_CHARS:
        return [Hunk(0, len(a), 0, len(b))]
    return _drop_islands(_match(_WORD.findall(a), _WORD.findall(b)), a, b)


def _drop_islands(hunks: list[Hunk], a: str, b: str) -> list[Hunk]:
    """Hunks that only a few equal words part, fewer than differ, as one; numbers, ids and labelled values stay apart."""
    kept: list[Hunk] = []
    for hunk in hunks:
        if kept:
            last = kept[-1]
            gap = hunk.start - last.end
            is_apart = (
                _is_word(last, a, b)
                and _is_word(hunk, a, b)
                and (_parts_words(a, last, hunk) or _are_apart(last, hunk, a))
            ) or bool(_LABEL.search(a[last.end : hunk.start]))
            if gap < 20 and gap < max(_size(last), _size(hunk)) and not is_apart:
                kept[-1] = last.joined(hunk)
                continue
        kept.append(hunk)
    return kept


def _is_word(hunk: Hunk, a: str, b: str) -> bool:
    """Whether a hunk is one word in both texts, with digits in one of them."""
    values = hunk.texts(a, b)
    return all(len(value.split()) == 1 for value in values) and any(
        any(map(str.isdigit, value)) for value in values
    )


def _parts_words(text: str, left: Hunk, right: Hunk) -> bool:
    """Whether a word stands between two hunks."""
    between = text[left.end : right.start]
    return any(map(str.isalpha, between)) and not _EDGE.isdisjoint(between)


def _size(hunk: Hunk) -> int:
    return max(hunk.end - hunk.start, hunk.other_end - hunk.other_start)


def _match(a: list[str], b: list[str]) -> list[Hunk]:
    """Hunks of two lists of pieces, as places in the joined texts."""
    starts_a, starts_b = (list(accumulate(map(len, pieces), initial=0)) for pieces in (a, b))
    return [
        Hunk(starts_a[i1], starts_a[i2], starts_b[j1], starts_b[j2])
        for i1, i2, j1, j2 in _unmatched(a, b)
    ]


def _unmatched(a: list[str], b: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """Ranges that differ: a patience diff, linear but for the small ranges left between anchors."""
    ranges = [(0, len(a), 0, len(b))]
    while ranges:
        i1, i2, j1, j2 = ranges.pop()
        while i1 < i2 and j1 < j2 and a[i1] == b[j1]:
            i1, j1 = i1 + 1, j1 + 1
        while i1 < i2 and j1 < j2 and a[i2 - 1] == b[j2 - 1]:
            i2, j2 = i2 - 1, j2 - 1
        if i1 == i2 or j1 == j2:
            if (i1, j1) != (i2, j2):
                yield i1, i2, j1, j2
            continue
        anchors = _anchors(a, b, i1, i2, j1, j2)
        if anchors:
            cuts = [(i1, j1), *((i + 1, j + 1) for i, j in anchors)]
            ends = [*anchors, (i2, j2)]
            ranges += [
                (i, end_i, j, end_j)
                for (i, j), (end_i, end_j) in zip(cuts[::-1], ends[::-1], strict=True)
            ]
        elif (edits := _few_edits(a[i1:i2], b[j1:j2])) is not None:
            for x1, x2, y1, y2 in edits:
                yield i1 + x1, i1 + x2, j1 + y1, j1 + y2
        else:
            yield i1, i2, j1, j2


def _anchors(
    a: list[str], b: list[str], i1: int, i2: int, j1: int, j2: int
) -> list[tuple[int, int]]:
    """Pieces that both ranges have once, as far as they are in the same order."""
    counts_a, counts_b = Counter(a[i1:i2]), Counter(b[j1:j2])
    place_b = {b[j]: j for j in range(j1, j2) if counts_b[b[j]] == 1}
    pairs = [(i, place_b[a[i]]) for i in range(i1, i2) if counts_a[a[i]] == 1 and a[i] in place_b]
    tails: list[int] = []
    ends: list[int] = []
    before = [-1] * len(pairs)
    for at, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        before[at] = ends[length - 1] if length else -1
        tails[length : length + 1] = [j]
        ends[length : length + 1] = [at]
    chain: list[tuple[int, int]] = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _few_edits(a: list[str], b: list[str]) -> list[tuple[int, int, int, int]] | None:
    """Ranges that differ in the shortest edit script (Myers), if it has at most `MAX_EDITS` edits.

    Where pieces repeat, the longest equal run may be of other repeats than those that stayed.
    """
    size_a, size_b = len(a), len(b)
    reach = {1: 0}  # by diagonal: how far into `a` the script has come
    trail: list[dict[int, int]] = []
    for num_edits in range(min(MAX_EDITS, size_a + size_b) + 1):
        trail.append(dict(reach))
        for diagonal in range(-num_edits, num_edits + 1, 2):
            is_down = diagonal == -num_edits or (
                diagonal != num_edits and reach[diagonal - 1] < reach[diagonal + 1]
            )
            i = reach[diagonal + 1] if is_down else reach[diagonal - 1] + 1
            j = i - diagonal
            while i < size_a and j < size_b and a[i] == b[j]:
                i, j = i + 1, j + 1
            reach[diagonal] = i
            if i >= size_a and j >= size_b:
                return _ranges(trail, size_a, size_b)
    return None


def _ranges(
    trail: list[dict[int, int]], size_a: int, size_b: int
) -> list[tuple[int, int, int, int]]:
    """The ranges that an edit script changes, in order; edits that touch are one range."""
    i, j = size_a, size_b
    ranges: list[tuple[int, int, int, int]] = []
    for num_edits in range(len(trail) - 1, 0, -1):
        reach, diagonal = trail[num_edits], i - j
        is_down = diagonal == -num_edits or (
            diagonal != num_edits and reach[diagonal - 1] < reach[diagonal + 1]
        )
        before = diagonal + 1 if is_down else diagonal - 1
        start_a = reach[before]
        start_b = start_a - before
        end_a, end_b = (start_a, start_b + 1) if is_down else (start_a + 1, start_b)
        if ranges and ranges[-1][0] == end_a and ranges[-1][2] == end_b:
            ranges[-1] = (start_a, ranges[-1][1], start_b, ranges[-1][3])
        else:
            ranges.append((start_a, end_a, start_b, end_b))
        i, j = start_a, start_b
    return ranges[::-1]


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
    if not any(map(str.strip, hunk.texts(a, b))):
        return hunk  # white space is no value
    if _is_whole_lines(hunk, a, b):
        return hunk
    hunk = _without_last_blank(hunk, a, b)
    left = _left_edge(a, hunk.start)
    right = _right_edge(a, hunk.end)
    word = a[left:right]
    is_date = any(map(str.isdigit, word)) or word.strip(".,").lower() in DATE_WORDS
    if is_date and not _is_id(word):
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


def _is_whole_lines(hunk: Hunk, a: str, b: str) -> bool:
    """Whether a hunk adds or removes lines and changes none."""
    value, other = hunk.texts(a, b)
    at_start = hunk.start == 0 or a[hunk.start - 1] == "\n"
    return at_start and not (value and other) and (value + other).endswith("\n")


def _without_last_blank(hunk: Hunk, a: str, b: str) -> Hunk:
    """The hunk without a blank that both its texts end with: the next word is not of the value."""
    value, other = hunk.texts(a, b)
    if not (value.endswith(" ") and other.endswith(" ") and value.strip() and other.strip()):
        return hunk
    return hunk._replace(end=hunk.end - 1, other_end=hunk.other_end - 1)


def _grow_date(text: str, left: int, right: int) -> tuple[int, int]:
    """The value with the words of a date beside it."""
    line = text.rfind("\n", 0, left) + 1
    for match in _DATE.finditer(text, max(line, left - MAX_DATE), right + MAX_DATE):
        if match.start() < right and left < match.end():
            return min(left, match.start()), max(right, match.end())
    return left, right


def _merge(hunks: list[Hunk], a: str) -> list[Hunk]:
    """Hunks that touch, or that only a mark or a blank between numbers parts, as one."""
    merged: list[Hunk] = []
    for hunk in hunks:
        if merged:
            last = merged[-1]
            gap = a[last.end : hunk.start]
            is_near = len(gap) <= 2 and "\n" not in gap and not any(map(str.isalnum, gap))
            if hunk.start <= last.end or (is_near and not _are_apart(last, hunk, a)):
                merged[-1] = last.joined(hunk)
                continue
        merged.append(hunk)
    return merged


def _are_apart(left: Hunk, right: Hunk, text: str) -> bool:
    """Whether one of two neighbours ends with its bracket or quote, or is an id and the other none."""
    if not _CLOSING.isdisjoint(text[left.end : right.start]):
        return True
    values = (text[left.start : left.end].strip(), text[right.start : right.end].strip())
    is_id = [_is_id(value) for value in values]
    return left.end < right.start and is_id[0] != is_id[1]


def _is_id(word: str) -> bool:
    """Whether a word mixes letters and digits as an id does, and a date does not."""
    return bool(_ID.fullmatch(word)) and not _DAY.match(word)
