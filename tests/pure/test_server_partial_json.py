"""The arguments of a call that was cut off: what is complete of a JSON object."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ramify.server.answers.partial_json import partial_object

TEXTS = st.text('abé \n{}"\\', min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=3), st.floats(0, 1), st.booleans())
def test_a_cut_object_has_what_is_complete(
    value: dict[str, Any], share: float, ascii_only: bool
) -> None:
    """A cut JSON object gives its complete members only, in order; a whole one is itself."""
    text = json.dumps(value, ensure_ascii=ascii_only)

    cut = partial_object(text[: int(share * len(text))])

    assert partial_object(text) == value
    assert_part_of(cut, value)


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    """Models write it, and no response can hold it."""
    assert partial_object(r'{"a": "x\ud800y", "b": "\ud83d\ude00"}') == {"a": "x\ufffdy", "b": "😀"}


def assert_part_of(cut: Any, value: Any) -> None:
    """`cut` is the beginning of `value`: equal but for the last entry, which is its beginning."""
    if isinstance(cut, dict):
        assert list(cut) == list(value)[: len(cut)]
        cut, value = list(cut.values()), list(value.values())
    if isinstance(cut, list):
        assert cut[:-1] == value[: len(cut)][:-1]
        if cut:
            assert_part_of(cut[-1], value[len(cut) - 1])
    else:
        assert cut == value


def test_texts_that_are_no_object_are_empty() -> None:
    """No text raises, and the time is linear in its length."""
    texts = ["", "null", "[1]", "}", '{"a"', "{,}", "[" * 100_000, '{"a":' * 50_000]
    texts += ['"' + '\\"' * 200_000, '{"a": "' + "\\" * 200_001]

    assert [partial_object(text) for text in texts] == [{}] * len(texts)
