"""White space that differs between words that two texts share; that of values is part of the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# The white space that the normal form changes.
_BLANKS = " \t\r\n\u00a0\u3000\ufeff" + "".join(map(chr, range(0x2000, 0x200C)))
_IS_BLANK = np.zeros(ord("\ufeff") + 2, np.bool_)  # by code point; the last stands for all beyond
_IS_BLANK[[ord(blank) for blank in _BLANKS]] = True
_MAX_TEXTS = 64  # whose words are kept: a request is compared with a few earlier ones

_Spans = NDArray[np.int64]  # [words, 2]: start and end


@dataclass(frozen=True, slots=True)
class SpacedText:
    """A text, its normal form, and the places of the normal form's values that differ."""

    text: str
    normal: str
    values: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Respaced:
    """Where the white space of two texts differs first."""

    char_a: int
    char_b: int
    normal_char: int  # in the second text's normal form


def find_respaced(a: SpacedText, b: SpacedText) -> Respaced | None:
    """The first difference in white space or Unicode form between words that both texts share."""
    words_a, words_b = _Words.of(a), _Words.of(b)
    if words_a is None or words_b is None:
        return None
    values_a, values_b = _widened(a, b)
    for run_a, run_b in zip(words_a.runs(values_a), words_b.runs(values_b), strict=True):
        if run_a[1] - run_a[0] == run_b[1] - run_b[0]:  # else a value ends within a word
            respaced = _first_respaced(a.text, words_a, run_a, b.text, words_b, run_b)
            if respaced is not None:
                return respaced
    return _respaced_at_end(a, b)


def _widened(a: SpacedText, b: SpacedText) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The values, with the words beside those that only one text has parted: `[ ]` and `[x]`."""
    values_a, values_b = [], []
    for (start_a, end_a), (start_b, end_b) in zip(a.values, b.values, strict=True):
        left = _is_in_word(a.normal, start_a) != _is_in_word(b.normal, start_b)
        right = _is_in_word(a.normal, end_a) != _is_in_word(b.normal, end_b)
        values_a.append((start_a - left, end_a + right))
        values_b.append((start_b - left, end_b + right))
    return values_a, values_b


def _is_in_word(text: str, at: int) -> bool:
    """Whether a place stands between two code points of a word."""
    beside = text[max(0, at - 1) : at + 1]
    return len(beside) == 2 and not any(char in _BLANKS for char in beside)


def _first_respaced(
    text_a: str, a: _Words, run_a: tuple[int, int], text_b: str, b: _Words, run_b: tuple[int, int]
) -> Respaced | None:
    """The first difference within two runs with equally many words."""
    spans_a, spans_b = a.spans[slice(*run_a)], b.spans[slice(*run_b)]
    if not len(spans_a):
        return None
    whole_a = text_a[spans_a[0, 0] : spans_a[-1, 1]]
    if whole_a == text_b[spans_b[0, 0] : spans_b[-1, 1]]:
        return None
    rows_a, rows_b = spans_a.tolist(), spans_b.tolist()
    normal_starts = b.normal_spans[slice(*run_b), 0].tolist()
    for at, (mine, other) in enumerate(zip(rows_a, rows_b, strict=True)):
        if text_a[mine[0] : mine[1]] != text_b[other[0] : other[1]]:
            return Respaced(mine[0], other[0], normal_starts[at])
        if at + 1 < len(rows_a):
            gap = text_a[mine[1] : rows_a[at + 1][0]]
            if gap != text_b[other[1] : rows_b[at + 1][0]]:
                return Respaced(mine[1], other[1], normal_starts[at])
    return None


def _respaced_at_end(a: SpacedText, b: SpacedText) -> Respaced | None:
    """White space at the end of both texts, if the last word of each holds a value."""
    for side in (a, b):
        start, end = side.values[-1] if side.values else (0, 0)
        if start == end or len(side.normal[end:].split()) > 1 or side.normal[end:][:1].isspace():
            return None
    words = [side.text.rstrip(_BLANKS) for side in (a, b)]
    if a.text[len(words[0]) :] == b.text[len(words[1]) :]:
        return None
    return Respaced(len(words[0]), len(words[1]), b.values[-1][1])


def places_in_text(
    text: str, normal: str, places: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Places of the normal form in the text itself; None if their words are not the same."""
    words, normal_words = _word_spans(text), _word_spans(normal)
    if len(words) != len(normal_words) or not len(words):
        return None
    starts, shifts = normal_words[:, 0], words[:, 0] - normal_words[:, 0]
    if not np.array_equal(shifts, words[:, 1] - normal_words[:, 1]):  # words of other lengths
        return None
    spans = []
    for start, end in places:
        first = max(0, int(starts.searchsorted(start, "right")) - 1)
        last = max(first, int(starts.searchsorted(end, "left")) - 1)
        spans.append((start + int(shifts[first]), end + int(shifts[last])))
    return spans


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of a text: places in the text and in its normal form.

    The start and the end of the text count as empty words, so that white space there is compared.
    """

    spans: _Spans
    normal_spans: _Spans

    @classmethod
    def of(cls, side: SpacedText) -> _Words | None:
        """None if the normal form has other words."""
        spans = normal_spans = _word_spans(side.text)
        if side.normal != side.text:
            normal_spans = _word_spans(side.normal)
        if len(spans) != len(normal_spans):
            return None
        end, normal_end = len(side.text), len(side.normal)
        return cls(
            np.concatenate([[(0, 0)], spans, [(end, end)]]),
            np.concatenate([[(-1, -1)], normal_spans, [(normal_end + 1, normal_end + 1)]]),
        )

    def runs(self, values: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Numbers of the first and behind the last word before, between and after the values.

        Words that a value overlaps belong to none.
        """
        beyond = int(self.normal_spans[-1, 1]) + 1
        places = np.array([*values, (beyond, beyond)], np.int64)
        lefts, rights = self.normal_spans[:, 0], self.normal_spans[:, 1]
        starts, stops = places[:, 0], places[:, 1]
        # Values are in order: those that end before a word are the first ones.
        num_before = np.minimum(
            np.searchsorted(stops, lefts, "right"), np.searchsorted(starts, lefts, "left")
        )
        is_free = (rights <= starts[num_before]) | (lefts >= stops[num_before])
        # The words that a value overlaps are the last before it is passed.
        firsts = np.searchsorted(num_before, np.arange(len(places)), "left")
        num_free = np.bincount(num_before[is_free], minlength=len(places))
        return [
            (first, first + num)
            for first, num in zip(firsts.tolist(), num_free.tolist(), strict=True)
        ]


@lru_cache(_MAX_TEXTS)
def _word_spans(text: str) -> _Spans:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_word = np.zeros(len(codes) + 2, np.int8)
    is_word[1:-1] = ~_IS_BLANK[np.minimum(codes, len(_IS_BLANK) - 1)]
    return np.flatnonzero(np.diff(is_word)).reshape(-1, 2)
