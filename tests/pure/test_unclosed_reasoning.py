"""Reasoning with one delimiter missing: calls in thoughts that never close, thoughts that nothing opens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.server.model_dialects import OutputFormat, named
from ramify.server.model_dialects.events import OutputEvent, ReasoningDelta
from tests.pure.test_model_dialects import summary

Summary = list[tuple[str, ...]]
CALL = ("call", "add", '{"a": 1}', "complete")
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
DEEPSEEK_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
QWEN_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
FAMILIES = {
    "hermes": JSON_CALL,
    "glm": GLM_CALL,
    "kimi_k2": KIMI_CALL,
    "deepseek_v3": DEEPSEEK_CALL,
    "qwen3_coder": QWEN_CALL,
}
HERMES = named("hermes", "think")
OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def parsed(
    form: OutputFormat, text: str, cuts: list[int], prompt_end: str, *, is_streamed: bool
) -> tuple[list[OutputEvent], Summary]:
    """Events before the end of an answer that arrives in pieces, and the summary of all."""
    parser = form.new_parser(["add"], prompt_end=prompt_end, is_streamed=is_streamed)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in pairwise(places) for event in parser.feed(text[start:end])]
    return events, summary([*events, *parser.feed("", is_last=True)])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_a_thought_that_never_closes_has_called(
    family: str, is_streamed: bool, cuts: list[int]
) -> None:
    """Where the thought ends, calls in it are quotations; where the answer ends first, they are calls."""
    form, call = named(family, "think"), FAMILIES[family]
    quoted = call
    for mark in form.calls.hidden:
        quoted = quoted.replace(mark, "")

    def read(text: str, prompt_end: str = "") -> Summary:
        return parsed(form, text, cuts, prompt_end, is_streamed=is_streamed)[1]

    assert read(f"<think>\nSo.\n{call}") == [("reasoning", "So."), CALL]
    assert read(f"So.\n{call}", "<think>\n") == [("reasoning", "So."), CALL]
    assert read(f"<think>So.\n{call}\n{call}") == [("reasoning", "So."), CALL, CALL]
    assert read(f"<think>So.\n{call}\nHm") == [("reasoning", "So."), CALL, ("reasoning", "Hm")]
    assert read(f"<think>So.\n{call}\n</think>\nNo.") == [
        ("reasoning", f"So.\n{quoted}"),
        ("text", "No."),
    ]
    assert read(f"<think>So {call} or</think>{call}") == [("reasoning", f"So {quoted} or"), CALL]


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_what_is_no_call_stays_reasoning(cuts: list[int]) -> None:
    """A thought that is cut off behind the mark of a call, without a call of a tool, is reasoning."""
    for text in (
        "So <tool_call> is the tag",
        'So <tool_call>{"name": "rm"}</tool_call>',
        "So <tool",
    ):
        wanted = [("reasoning", text)]
        assert parsed(HERMES, f"<think>{text}", cuts, "", is_streamed=True)[1] == wanted


def test_reasoning_is_streamed_up_to_the_mark_of_a_call() -> None:
    """What comes before the mark is out at once; from there on nothing is, until it is certain."""
    events, _ = parsed(HERMES, f"<think>So.{JSON_CALL} hm", [10, 40], "", is_streamed=True)

    assert events == [ReasoningDelta("So.")]


@pytest.mark.parametrize("prompt_end", ["", "<|im_start|>assistant\n", OFF])
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_an_end_that_nothing_opened_ends_reasoning(prompt_end: str, cuts: list[int]) -> None:
    """What precedes `</think>` is reasoning; a stream has sent it as text, and drops the mark."""
    text = f"\nHm. So:\n</think>\n\nYes.\n{JSON_CALL}"

    whole = parsed(HERMES, text, cuts, prompt_end, is_streamed=False)[1]
    stream = parsed(HERMES, text, cuts, prompt_end, is_streamed=True)[1]

    assert whole == [("reasoning", "Hm. So:"), ("text", "Yes."), CALL]
    assert stream == [("text", "\nHm. So:\n\n\nYes."), CALL]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes.", [("text", "Yes.")]),
        (" Write <think>a</think>. ", [("text", " Write <think>a</think>. ")]),
        (f"{JSON_CALL}\n</think> ", [CALL, ("text", "</think> ")]),
        ("<think>a</think>b</think>c", [("reasoning", "a"), ("text", "b</think>c")]),
        ("a </thin", [("text", "a </thin")]),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_other_marks_of_reasoning_are_text(
    text: str, expected: Summary, is_streamed: bool, cuts: list[int]
) -> None:
    """Only the first mark, and only before calls, ends reasoning that nothing opened."""
    assert parsed(HERMES, text, cuts, OFF, is_streamed=is_streamed)[1] == expected


def test_a_sentence_ends_no_reasoning_that_nothing_opened() -> None:
    """Granite's marks are words that an answer may begin with."""
    form, text = named("granite", "granite"), "Here is my response: 4"

    assert parsed(form, text, [], "", is_streamed=False)[1] == [("text", text)]
