"""White space that differs between words that two texts share; that of values is part of the values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The white space that the normal form changes.
_BLANKS = " \t\r\n\u00a0\u3000" + "".join(map(chr, range(0x2000, 0x200C)))
_WORD = re.compile(f"[^{_BLANKS}]+")


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
    runs_a, runs_b = _runs(a), _runs(b)
    if runs_a is None or runs_b is None or len(runs_a) != len(runs_b):
        return None
    for run_a, run_b in zip(runs_a, runs_b, strict=True):
        if len(run_a) != len(run_b):
            continue  # a value ends within a word
        for at, (mine, other) in enumerate(zip(run_a, run_b, strict=True)):
            if a.text[mine[0] : mine[1]] != b.text[other[0] : other[1]]:
                return Respaced(mine[0], other[0], other[2])
            if at + 1 < len(run_a):
                following, other_following = run_a[at + 1], run_b[at + 1]
                gap = a.text[mine[1] : following[0]]
                if gap != b.text[other[1] : other_following[0]]:
                    return Respaced(mine[1], other[1], other[2])
    return _respaced_at_end(a, b)


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


def _runs(side: SpacedText) -> list[list[tuple[int, int, int]]] | None:
    """Words between the values: start and end in the text, start in the normal form.

    The start and the end of the text count as empty words, so that white space there is compared.
    """
    words = [match.span() for match in _WORD.finditer(side.text)]
    normal = [match.span() for match in _WORD.finditer(side.normal)]
    if len(words) != len(normal):
        return None
    end, normal_end = len(side.text), len(side.normal)
    words = [(0, 0), *words, (end, end)]
    normal = [(-1, -1), *normal, (normal_end + 1, normal_end + 1)]
    runs: list[list[tuple[int, int, int]]] = [[]]
    values = iter([*side.values, (normal_end + 2, normal_end + 2)])
    start, stop = next(values)
    for (left, right), (normal_left, normal_right) in zip(words, normal, strict=True):
        while stop <= normal_left and start < normal_left:
            runs.append([])
            start, stop = next(values)
        if normal_right <= start or normal_left >= stop:
            runs[-1].append((left, right, normal_left))
    return runs
