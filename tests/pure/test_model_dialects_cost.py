"""Parsing costs the same for each character, whatever was written before."""

from __future__ import annotations

import time
from functools import cache

import pytest

from ramify.server.model_dialects import OutputFormat, named
from ramify.server.model_dialects.events import ArgumentsDelta, CallEnd, TextDelta

NUM_CHARS = 100_000
HERMES, MISTRAL, JSON = named("hermes", "think"), named("mistral"), named("json")
BEGUN = '<tool_call>{"name": "add", "arguments": '
HOSTILE = {
    "blanks before a call": (HERMES, "", " "),
    "blanks in thoughts": (HERMES, "<think>a", "\n"),
    "blanks in a call": (HERMES, "<tool_call>", " "),
    "blanks after a call": (HERMES, '<tool_call>{"name": "add"}', " "),
    "partial marks": (HERMES, "", "<tool_call"),
    "marks": (HERMES, "", "<tool_call>"),
    "calls that are none": (HERMES, "", '<tool_call>{"name": "'),
    "arguments before a name": (HERMES, '<tool_call>{"arguments": {"a": "', "x"),
    "brackets": (HERMES, BEGUN + '{"a":', "["),
    "backslashes": (HERMES, BEGUN + '{"a":"', "\\"),
    "surrogates": (HERMES, BEGUN + '{"a":"', "\\ud800"),
    "arguments in a string": (HERMES, BEGUN + '"{', '\\"\\\\'),
    "list brackets": (MISTRAL, "", "["),
    "calls": (HERMES, "", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    "calls without an end": (named("qwen3_coder"), "", "<function="),
    "names": (MISTRAL, "[TOOL_CALLS]", "add"),
    "fences": (JSON, "", "```json\n{"),
    "headers": (named("openai"), "<|channel|>", "commentary "),
    "header marks": (named("openai"), "", "<|channel|>commentary to="),
    "recipients": (named("openai"), "<|start|>assistant to=", "x"),
    "end tags": (named("qwen3_coder"), "<function=add><parameter=a>", "</parameter> "),
    "keys": (named("qwen3_coder"), "<function=add><parameter=", "a"),
    "values": (named("glm"), "<tool_call>add<arg_key>a</arg_key><arg_value>", "[1"),
    "literals": (named("pythonic"), "[add(a=", "["),
    "words": (named("pythonic"), "[add(a=", "9"),
    "quotes": (named("pythonic"), "[add(a=", "'"),
    "commas": (named("pythonic"), "[add(a=[", ","),
    "thoughts": (named("deepseek_v3", "think"), "<think>", "</think"),
    "calls in thoughts": (HERMES, "<think>", '<tool_call>{"name": "add", "arguments": {}}'),
}  # fmt: skip


def seconds(form: OutputFormat, text: str, piece_len: int = 1) -> float:
    """Seconds of processor time to parse a text that arrives in pieces."""
    parser = form.new_parser(["add"], prompt_end="")
    start = time.process_time()
    for position in range(0, len(text), piece_len):
        parser.feed(text[position : position + piece_len])
    parser.feed("", is_last=True)
    return time.process_time() - start


@cache
def plain_seconds() -> float:
    """Seconds for a text without marks."""
    return seconds(HERMES, "a" * NUM_CHARS)


@pytest.mark.parametrize("name", HOSTILE)
def test_cost_is_linear(name: str) -> None:
    """A text that arrives in many pieces or in one costs a bounded multiple of plain text."""
    form, begin, repeated = HOSTILE[name]
    num_repeats = NUM_CHARS // len(repeated)
    plain = plain_seconds()

    hostile = seconds(form, begin + repeated * num_repeats)

    assert hostile < 15 * plain, f"{hostile:.2f} s, plain text {plain:.2f} s"
    assert seconds(form, begin + repeated * num_repeats, piece_len=NUM_CHARS) < 15 * plain


def test_a_million_brackets_are_parsed() -> None:
    """Depth costs no recursion, in one piece or in many."""
    parser = HERMES.new_parser(["add"], prompt_end="")

    events = parser.feed(BEGUN + '{"a": ' + "[" * 1_000_000)
    events += parser.feed("]" * 1_000_000 + "}}</tool_call>ok", is_last=True)

    num_chars = sum(len(event.text) for event in events if isinstance(event, ArgumentsDelta))
    assert num_chars == 2_000_007
    assert CallEnd() in events
    assert events[-1] == TextDelta("ok")
