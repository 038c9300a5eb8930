"""Draws answers that a model of each family can write."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from hypothesis import strategies as st

from tests.pure.model_answers import Call, Family, ModelAnswer

FRAGMENTS = (
    "a", "Z", "7", " ", "  ", "\n", "\n\n", "\t", "é", "🙂", "\u2028", "{", "}", "[", "]", '"', "'",
    "\\", "\\n", "\\u00e9", "\\\"", ":", ",", ";", "<", ">", "</", "<|", "|>", "<｜", "<tool", "[TOOL_",
    "{\"name\": \"rm\"}", "null", "</tool_call", "<think", "</thin", "``", "(", ")", "=", "functions.",
    "add", "call", "to=", "<|chan", "<|mess", "function", "</par", "Here is my",
)  # fmt: skip
# Inside a string of a call, marks are text.
MARKS_IN_STRINGS = (
    "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "</think>", "<think>", "```", "</tool_calls>",
    "{\"name\": \"add\", \"arguments\": {}}", "<|python_tag|>", "</parameter> x", "]\n", "\x00\x1f",
)  # fmt: skip


def words(*extra: str) -> st.SearchStrategy[str]:
    """Text without white space at its ends."""
    fragments = st.sampled_from((*FRAGMENTS, *extra))
    return st.lists(fragments, max_size=8).map(lambda parts: "".join(parts).strip())


def arguments(family: Family) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of the tools' schema."""
    strings = st.lists(st.sampled_from((*FRAGMENTS, *MARKS_IN_STRINGS)), max_size=6).map("".join)
    if family.quotes:
        strings = strings.filter(lambda text: family.quotes not in text)
    numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    keys = st.sampled_from(["a", "arguments", "name", "key_1"])
    values = st.recursive(
        st.none() | st.booleans() | numbers | strings,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "path": strings,
            "count": st.integers(),
            "ratio": st.none() | numbers,
            "flag": st.booleans(),
            "items": st.lists(values, max_size=3),
            "options": st.dictionaries(keys, values, max_size=3),
        },
    )


DUMPS = st.sampled_from(
    [
        json.dumps,
        partial(json.dumps, ensure_ascii=False),
        partial(json.dumps, separators=(",", ":")),
        partial(json.dumps, indent=2, ensure_ascii=False),
    ]
)


def answers(family: Family) -> st.SearchStrategy[ModelAnswer]:
    """Answers that a model of the family can write."""
    hidden = family.form.kept_special_tokens
    shown = [mark for mark in ("<tool_call>", "[TOOL_CALLS]") if mark not in hidden]
    call = st.builds(Call, st.sampled_from(family.names), arguments(family))
    calls = st.lists(call, max_size=3)
    reasoning = words(*shown) if family.is_thinking else st.just("")
    if not family.is_bare:
        return st.builds(ModelAnswer, reasoning, words(*family.fragments), calls, DUMPS)
    return st.builds(ModelAnswer, reasoning, words(), st.just([]), DUMPS) | st.builds(
        ModelAnswer, reasoning, st.just(""), calls, DUMPS
    )
