"""`banned_sequences`: what an output does not contain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.logits.banned_sequences import BannedSequences, without_tokens
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.errors import DeadEndError, InvalidParamsError
from ramify.params import SamplingParams

VOCAB = 11
TOKENS = st.integers(0, VOCAB - 1)
SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


def allowed_rows(
    params: SamplingParams, output: list[int], draft: tuple[int, ...]
) -> list[set[int]]:
    processor = LogitsProcessor([1, 2], params, stop_token_ids=frozenset(), vocab_size=VOCAB)
    masks = processor.for_step(output, draft).token_bitmasks
    assert masks is not None
    return [
        {token for token in range(VOCAB) if mask is None or mask[token // 8] >> token % 8 & 1}
        for mask in masks
    ]


@given(SEQUENCES.filter(bool), st.lists(st.integers(0, 3), max_size=8), st.data())
def test_a_token_is_banned_where_it_would_complete_a_sequence(
    sequences: list[list[int]], output: list[int], data: st.DataObject
) -> None:
    """For each row: appending the token makes the output end with a banned sequence."""
    draft = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    params = SamplingParams(banned_sequences=sequences)

    rows = allowed_rows(params, output, draft)

    for index, allowed in enumerate(rows):
        context = output + list(draft[:index])
        expected = {
            token
            for token in range(VOCAB)
            if not any([*context, token][-len(banned) :] == banned for banned in sequences)
        }
        assert allowed == expected


@given(st.sets(TOKENS), st.lists(TOKENS))
def test_without_tokens_clears_their_bits(present: set[int], tokens: list[int]) -> None:
    """The mask given is not changed."""
    mask = np.packbits([token in present for token in range(VOCAB)], bitorder="little")
    before = mask.copy()

    cleared = without_tokens(mask, tokens)

    assert {token for token in range(VOCAB) if cleared[token // 8] >> token % 8 & 1} == (
        present - set(tokens)
    )
    assert (mask == before).all()


def test_nothing_is_banned_before_the_sequence_can_be_complete() -> None:
    """The prompt does not count: the first token is free, unless a sequence is one token."""
    banned = BannedSequences([(1, 2), (3,)])

    assert banned.always == [3]
    assert [banned.after(output) for output in ([], [1], [2])] == [[], [2], []]


def test_a_ban_that_leaves_no_token_is_an_error() -> None:
    """Otherwise every logit would be -inf."""
    params = SamplingParams(allowed_token_ids=[4, 5], banned_sequences=[[4], [5]])

    with pytest.raises(DeadEndError, match="bad_words"):
        LogitsProcessor([1], params, stop_token_ids=frozenset(), vocab_size=VOCAB)


@pytest.mark.parametrize("value", [[[]], [[-1]], [["a"]], 5, [[True]], [[1] * 300_000]])
def test_bans_that_are_no_token_ids_are_refused(value: object) -> None:
    """The error names the option."""
    with pytest.raises(InvalidParamsError, match="banned_sequences"):
        SamplingParams(banned_sequences=value)  # type: ignore[arg-type]
