"""Text without what opens a call: no tokens can write an opening, and nothing else is forbidden."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.errors import DeadEndError, InvalidParamsError
from ramify.params import FreeText, StructuredOutput
from tests.budget import examples
from tests.cpu.family_calls import (
    END,
    encoded,
    grammars,
    is_allowed,
    num_accepted,
    start,
    tokenizer,
)

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

# Openings that have a token where the vocabulary has the families' marks, or a token in their middle,
# or none; two begin alike.
OPENINGS = ("<tool_call>", "<tools>", "<｜tool▁call▁begin｜>", "<｜DSML｜function_calls>")
ALPHABET = "abtols_c<>｜\n é"


def text_without_calls(*, has_marks: bool) -> StructuredOutput:
    """The format of an answer that must not call."""
    return grammars("hermes", "", has_marks=has_marks).without_calls(OPENINGS)


def in_pieces(text: str, seed: int, *, has_marks: bool) -> list[int]:
    """Tokens of a text that is cut at random places, which may split an opening."""
    rng, ids = random.Random(seed), []
    while text:
        cut = rng.choice((1, 2, 3, 5, 8, 30))
        ids += encoded(text[:cut], has_marks=has_marks)
        text = text[cut:]
    return ids


def num_without_opening(ids: list[int], *, has_marks: bool) -> int:
    """How many of the tokens can be written before an opening is complete."""
    decode = tokenizer(has_marks=has_marks).decode
    texts = (decode(ids[: end + 1], skip_special_tokens=False) for end in range(len(ids)))
    have_opening = [any(opening in text for opening in OPENINGS) for text in texts]
    return have_opening.index(True) if True in have_opening else len(ids)


@pytest.mark.parametrize("has_marks", [True, False])
@settings(max_examples=examples(60), deadline=None)
@given(
    before=st.text(ALPHABET, max_size=12),
    opening=st.sampled_from(OPENINGS),
    seed=st.integers(0, 10_000),
)
def test_an_opening_cannot_be_completed_in_any_tokens(
    before: str, opening: str, seed: int, has_marks: bool
) -> None:
    """The token that completes it is forbidden, none before it, and the answer may end instead."""
    ids = in_pieces(f"{before}{opening} and more", seed, has_marks=has_marks)
    num_free = num_without_opening(ids, has_marks=has_marks)
    spec = text_without_calls(has_marks=has_marks)

    matcher = start(spec, has_marks=has_marks)

    assert num_free < len(ids)
    assert num_accepted(matcher, ids) == num_free
    assert is_allowed(matcher, ids[:num_free], END)
    with pytest.raises(DeadEndError):
        start(spec, has_marks=has_marks).advance(ids[: num_free + 1])


@pytest.mark.parametrize("has_marks", [True, False])
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(ALPHABET, max_size=30), seed=st.integers(0, 10_000))
def test_other_text_is_free(text: str, seed: int, has_marks: bool) -> None:
    """Where no token would complete an opening, all tokens are allowed: also bytes, and special ones."""
    ids = in_pieces(text, seed, has_marks=has_marks)
    ids = ids[: num_without_opening(ids, has_marks=has_marks)]
    rng = random.Random(seed)
    vocab_size = tokenizer(has_marks=has_marks).get_vocab_size()
    spec = text_without_calls(has_marks=has_marks)

    matcher = start(spec, has_marks=has_marks)

    assert num_accepted(matcher, ids) == len(ids)
    for token in rng.sample(range(vocab_size), 40):
        is_free = num_without_opening([*ids, token], has_marks=has_marks) > len(ids)
        assert is_allowed(matcher, ids, token) == is_free


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_drafts_change_no_mask(seed: int) -> None:
    """The masks after draft tokens are those of a fresh matcher."""
    ids = in_pieces("so <tool <tool_call>{", seed, has_marks=True)
    matcher = start(text_without_calls(has_marks=True), has_marks=True)

    for end in range(num_without_opening(ids, has_marks=True)):
        masks = matcher.token_bitmasks(ids[:end], ids[end:])
        fresh = start(text_without_calls(has_marks=True), has_marks=True)
        for position, mask in enumerate(masks):
            [expected] = fresh.token_bitmasks(ids[: end + position], ())
            assert (mask is None) == (expected is None)
            assert mask is None or expected is None or mask.tolist() == expected.tolist()


def test_text_that_opens_nothing_costs_no_mask() -> None:
    """Without a token that contains an opening, there is a mask only behind the beginning of one."""
    matcher = start(text_without_calls(has_marks=False), has_marks=False)
    ids = encoded("so < ", has_marks=False)

    masks = [matcher.token_bitmasks(ids[:end], ())[0] for end in range(len(ids) + 1)]

    assert masks == [None] * len(masks)


@pytest.mark.parametrize(
    "options",
    [{"resumes": True}, {"begins_after": True}, {"must_trigger": True}, {"ignored": ((), ("b",))}],
)
def test_forbidden_triggers_take_no_other_option(options: dict[str, Any]) -> None:
    """All others say where the format counts, which it does nowhere."""
    with pytest.raises(InvalidParamsError, match="forbids_triggers"):
        FreeText(triggers=(("a",),), forbids_triggers=True, **options)
