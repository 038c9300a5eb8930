"""Differences in white space between words that two texts share."""

import random

import pytest

from ramify.analysis.compare.normal_forms import normalise_spaces
from ramify.analysis.compare.spacing import Respaced, SpacedText, find_respaced
from ramify.analysis.compare.text_diff import find_hunks

WORDS = ["a", "bb", "x.", "\u00e9", "(q)", "\U0001f600", "=", "Z"]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", " \n", "\u00a0", "\u3000", "\u2009"]


def respaced(a: str, b: str) -> Respaced | None:
    normals = [normalise_spaces(text) for text in (a, b)]
    hunks = find_hunks(*normals)
    return find_respaced(
        SpacedText(a, normals[0], [(hunk.start, hunk.end) for hunk in hunks]),
        SpacedText(b, normals[1], [(hunk.other_start, hunk.other_end) for hunk in hunks]),
    )


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        ("on 2025-01-01 we met twice", "on 2025-01-02 we met  twice", Respaced(21, 21, 1)),
        ("on 2025-01-01 we met twice", "on 2025-01-02 we met twice", None),
        ("on 2025-01-01  we met", "on 2025-01-02 we met", None),
        ("To do: [ ] read the mail", "To do: [x] read  the mail", Respaced(16, 16, 1)),
        ("caf\u00e9 of 2025-01-01", "cafe\u0301 of 2025-01-02", Respaced(3, 3, 0)),
        ("at 2025-01-01 \n", "at 2025-01-02", Respaced(13, 13, 1)),
        ("\n2025-01-01 it is", "2025-01-02 it is", Respaced(0, 0, 0)),
    ],
    ids=["behind", "equal", "beside", "box", "unicode", "end", "start"],
)
def test_the_first_respaced_gap_is_found_beside_values(
    a: str, b: str, gap: Respaced | None
) -> None:
    """Values that differ and the blanks beside them do not count; other blanks and Unicode forms do."""
    assert respaced(a, b) == gap


def test_any_respaced_gap_is_found() -> None:
    """In random texts the first gap that differs is found, unless a value stands beside it."""
    rng = random.Random(3)
    num_gaps = 0
    for _ in range(6000):
        words = rng.sample(WORDS, rng.randrange(4, 9))
        place = rng.randrange(len(words))
        others = [*words[:place], rng.choice(["1", "77"]), *words[place + 1 :]]
        gaps = [rng.choice(BLANKS) for _ in words]
        other_gaps = [rng.choice([gap, rng.choice(BLANKS)]) for gap in gaps]
        texts = [
            "".join(word + gap for word, gap in zip(*side, strict=True)).rstrip()
            for side in ((words, gaps), (others, other_gaps))
        ]
        beside = {place - 1, place, len(words) - 1}
        differs = [
            at for at in range(len(words)) if gaps[at] != other_gaps[at] and at not in beside
        ]
        # A line end in place of a blank is another normal form, so that find_hunks has it as a value.
        if any(
            ("\n" in gap) != ("\n" in other) for gap, other in zip(gaps, other_gaps, strict=True)
        ):
            continue

        gap = respaced(*texts)

        assert (gap is not None) == bool(differs), texts
        if gap is not None:
            num_gaps += 1
            first = sum(
                len(word + blank) for word, blank in zip(words[: differs[0]], gaps, strict=False)
            )
            end = first + len(words[differs[0]])
            assert end <= gap.char_a <= end + 2, texts
    assert num_gaps > 300
