"""`NgramIndex`: drafts continue the longest earlier occurrence of the last tokens."""

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.speculation.ngram import MAX_CANDIDATES, MAX_COMPARED, NgramIndex
from tests.budget import examples


def of(text: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(text)
    return index


def scan(text: list[int]) -> int:
    """The last index at which the longest suffix of the text ended before, or -1; by brute force."""
    best, longest = -1, 1
    for end in range(len(text) - 2, 0, -1):
        length = 0
        while length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length > longest:
            best, longest = end, length
    return best


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([], []),
        ([1], []),
        ([1, 1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 9, 2], []),  # one token is no match
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], [8, 6, 1, 2, 9]),  # 3 tokens agree, not only 2
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9, 1]),  # the latest of two matches
    ],
)
def test_the_longest_suffix_that_occurred_before_is_continued(
    text: list[int], draft: list[int]
) -> None:
    """A draft longer than what followed the match repeats it."""
    assert list(of(text).propose(5)) == draft
    assert list(of(text).propose(1)) == draft[:1]
    assert of(text).propose(0) == ()


@settings(max_examples=examples(60), deadline=None)
@given(text=st.lists(st.integers(0, 3), max_size=30), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_however_a_text_grows_the_draft_is_that_of_a_scan(text: list[int], cuts: list[int]) -> None:
    """By one token or several, with or without a draft in between."""
    index, at = NgramIndex(), 0
    for cut in [*cuts, *[1] * len(text)]:
        index.extend(text[at : at + cut])
        at += cut

        match = scan(text[:at])
        expected = (text[:at][match + 1 :] * 9)[:9] if match >= 0 else []
        if cut != 3:
            assert list(index.propose(9)) == expected


def test_the_work_for_a_token_is_bounded() -> None:
    """`propose` compares a bounded number of tokens, however long and repetitive the text is."""
    reads = 0

    class Counted(array):
        def __getitem__(self, key: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().__getitem__(key)

    rng = random.Random(0)
    index = of([token for _ in range(3000) for token in (rng.randrange(5), 1, 2)])
    index.tokens = Counted("i", index.tokens)
    index._match = -1

    assert index.propose(4)

    assert 0 < reads <= MAX_CANDIDATES * (2 * MAX_COMPARED + 2) + 3


def test_the_index_is_in_proportion_to_the_text() -> None:
    """One entry for each token at most, whether or not the text repeats itself."""
    distinct, same = of(list(range(5000))), of([3] * 5000)

    assert len(distinct._last) == len(distinct._earlier) == 5000
    assert len(same._last) == 2
    assert len(same._earlier) == 5000
