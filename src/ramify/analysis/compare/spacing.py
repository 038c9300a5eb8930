"""White space that differs between words that two texts share; that of values is part of the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.compare.text_diff import common_prefix_len

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
    num_values: int  # that stand before it


def find_respaced(a: SpacedText, b: SpacedText) -> Respaced | None:
    """The first difference in white space or Unicode form outside of the values."""
    parts_a, parts_b = _parts_between(a), _parts_between(b)
    if parts_a is None or parts_b is None:
        return None
    for number, ((start_a, end_a), (start_b, end_b)) in enumerate(
        zip(parts_a, parts_b, strict=True)
    ):
        part_a, part_b = a.text[start_a:end_a], b.text[start_b:end_b]
        if part_a != part_b:
            char = common_prefix_len(part_a, part_b)
            return Respaced(start_a + char, start_b + char, number)
    return None


def _parts_between(side: SpacedText) -> list[tuple[int, int]] | None:
    """The parts of the text before, between and behind the values, without the white space beside a value."""
    text, spans = side.text, places_in_text(side.text, side.normal, side.values)
    if spans is None:
        return None
    starts = [0, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), len(text)]
    parts = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = text[start:end]
        is_first, is_last, is_blank = number == 0, number == len(spans), not part.strip(_BLANKS)
        # White space alone at the start or the end of a text is compared.
        left = 0 if is_first or (is_last and is_blank) else len(part) - len(part.lstrip(_BLANKS))
        right = len(part) if is_last or (is_first and is_blank) else len(part.rstrip(_BLANKS))
        parts.append((start + left, start + max(left, right)))
    return parts


def places_in_text(
    text: str, normal: str, places: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Places of the normal form in the text itself; None if the normal form has other words."""
    words, normal_words = _word_spans(text), _word_spans(normal)
    if len(words) != len(normal_words) or not len(words):
        return None
    starts, shifts = normal_words[:, 0], words - normal_words
    spans = []
    for start, end in places:
        first = max(0, int(starts.searchsorted(start, "right")) - 1)
        last = max(first, int(starts.searchsorted(end, "left")) - 1)
        begin = start + int(shifts[first, 0])
        spans.append((begin, max(begin, end + int(shifts[last, 1]))))
    return spans


@lru_cache(_MAX_TEXTS)
def _word_spans(text: str) -> _Spans:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_word = np.zeros(len(codes) + 2, np.int8)
    is_word[1:-1] = ~_IS_BLANK[np.minimum(codes, len(_IS_BLANK) - 1)]
    return np.flatnonzero(np.diff(is_word)).reshape(-1, 2)
