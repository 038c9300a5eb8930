"""Tokens counted as an output grows are those of the whole output."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.logits.token_counts import TokenCounter, TokenCounts

tokens = st.lists(st.integers(0, 6), max_size=8)


def by_token(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


@given(
    prompt=st.lists(st.integers(0, 9), max_size=8), parts=st.lists(tokens, max_size=5), draft=tokens
)
def test_counts_are_those_of_the_whole_output(
    prompt: list[int], parts: list[list[int]], draft: list[int]
) -> None:
    """Whatever parts an output comes in; earlier counts stay as they were, and drafts are not kept."""
    counter, output = TokenCounter(prompt), list[int]()
    before = []

    for part in parts:
        output += part
        before.append((counter.count(output), dict.fromkeys(prompt, 0) | Counter(output)))
    with_draft = counter.count(output).plus(draft)

    assert by_token(with_draft) == dict.fromkeys(prompt, 0) | Counter(output + draft)
    assert with_draft.ids.dtype == with_draft.counts.dtype == np.int32  # as kernels take them
    for counts, expected in before:
        assert by_token(counts) == expected
