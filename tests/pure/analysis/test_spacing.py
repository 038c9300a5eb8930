"""Differences in white space between words that two texts share."""

import random
import re

from ramify.analysis.compare.normal_forms import normalise_spaces
from ramify.analysis.compare.spacing import Respaced, SpacedText, find_respaced
from ramify.analysis.compare.text_diff import find_hunks

WORDS = [
    "a",
    "bb",
    "c1",
    "2025-01-02",
    "x.",
    "\u00e9",
    "e\u0301",
    "(q)",
    "\U0001f600",
    "=",
    "12:30",
]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", " \n", "\u00a0", "\u3000", "\u2009", "\x0b", "\u2028", ""]
WORD = re.compile("[^ \t\r\n\u00a0\u3000\u2000-\u200b]+")


def test_the_first_respaced_gap_is_found_beside_values() -> None:
    """Values that differ do not count; blanks between equal words do, at their place in each text."""
    a, b = "on 2025-01-01 we met twice", "on 2025-01-02 we met  twice"
    values_a, values_b = [(3, 13)], [(3, 13)]

    gap = find_respaced(SpacedText(a, a, values_a), SpacedText(b, normalise_spaces(b), values_b))

    assert gap == Respaced(20, 20, 17)
    assert find_respaced(SpacedText(a, a, values_a), SpacedText(a, a, values_b)) is None


def test_any_two_texts_are_compared_as_word_by_word() -> None:
    """The same result as a plain walk over the words, for texts of blanks, values and composed letters."""
    rng = random.Random(3)
    num_found = 0
    for _ in range(6000):
        pieces = [(rng.choice(WORDS), rng.choice(BLANKS)) for _ in range(rng.randrange(1, 14))]
        other = list(pieces)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(other))
            word = rng.choice([other[at][0], other[at][0], rng.choice(WORDS)])
            other[at : at + rng.randrange(1, 5) // 2] = [(word, rng.choice(BLANKS))]
        sides = ["".join(map("".join, side)) for side in (pieces, other)]
        normals = [normalise_spaces(text) for text in sides]
        hunks = find_hunks(*normals)
        a = SpacedText(sides[0], normals[0], [(hunk.start, hunk.end) for hunk in hunks])
        b = SpacedText(sides[1], normals[1], [(hunk.other_start, hunk.other_end) for hunk in hunks])
        expected = walk(*widened(a, b))
        num_found += expected is not None
        gap = find_respaced(a, b)
        if expected is not None or gap is None or gap.char_a < len(a.text.rstrip()):
            assert gap == expected, (a, b)
    assert num_found > 500


def test_a_word_that_only_one_text_parts_belongs_to_the_value() -> None:
    """An empty box has two words and a checked box one; the words around them are compared."""
    a, b = "To do: [ ] read the mail", "To do: [x] read  the mail"

    gap = find_respaced(SpacedText(a, a, [(8, 9)]), SpacedText(b, normalise_spaces(b), [(8, 9)]))

    assert gap == Respaced(15, 15, 11)


def widened(a: SpacedText, b: SpacedText) -> tuple[SpacedText, SpacedText]:
    """The texts with values that take in the words that they part in one text only."""
    sides = (a, b)
    values: list[list[tuple[int, int]]] = [[], []]
    for pair in zip(a.values, b.values, strict=True):
        rows = list(zip(sides, pair, strict=True))
        left = len({is_within_word(side.normal, start) for side, (start, _) in rows}) == 2
        right = len({is_within_word(side.normal, end) for side, (_, end) in rows}) == 2
        for row, (start, end) in zip(values, pair, strict=True):
            row.append((start - left, end + right))
    return SpacedText(a.text, a.normal, values[0]), SpacedText(b.text, b.normal, values[1])


def is_within_word(text: str, at: int) -> bool:
    """Whether a place stands between two code points of a word."""
    return any(match.start() < at < match.end() for match in WORD.finditer(text))


def walk(a: SpacedText, b: SpacedText) -> Respaced | None:
    """Word by word; what stands behind the last word of all is left out."""
    runs_a, runs_b = runs(a), runs(b)
    if runs_a is None or runs_b is None:
        return None
    for run_a, run_b in zip(runs_a, runs_b, strict=True):
        if len(run_a) != len(run_b):
            continue
        for at, (mine, other) in enumerate(zip(run_a, run_b, strict=True)):
            if a.text[mine[0] : mine[1]] != b.text[other[0] : other[1]]:
                return Respaced(mine[0], other[0], other[2])
            if at + 1 < len(run_a):
                gap = a.text[mine[1] : run_a[at + 1][0]]
                if gap != b.text[other[1] : run_b[at + 1][0]]:
                    return Respaced(mine[1], other[1], other[2])
    return None


def runs(side: SpacedText) -> list[list[tuple[int, int, int]]] | None:
    """Words between values: start and end in the text, start in the normal form."""
    words = [match.span() for match in WORD.finditer(side.text)]
    normal = [match.span() for match in WORD.finditer(side.normal)]
    if len(words) != len(normal):
        return None
    end, normal_end = len(side.text), len(side.normal)
    words = [(0, 0), *words, (end, end)]
    normal = [(-1, -1), *normal, (normal_end + 1, normal_end + 1)]
    word_runs: list[list[tuple[int, int, int]]] = [[]]
    values = list(side.values)
    for (left, right), (normal_left, normal_right) in zip(words, normal, strict=True):
        while values and values[0][1] <= normal_left and values[0][0] < normal_left:
            word_runs.append([])
            del values[0]
        if not values or normal_right <= values[0][0] or normal_left >= values[0][1]:
            word_runs[-1].append((left, right, normal_left))
    return word_runs
