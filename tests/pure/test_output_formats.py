"""Reasoning, text and calls are separated in an answer, however it is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import ConfigError
from ramify.server.output_formats import OutputFormat, detect, named
from ramify.server.output_formats.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)

TOOLS = ("add", "look_up")
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
OTHER = '{"name": "look_up", "parameters": {"q": "é <tool_call>"}}'
OTHER_ARGUMENTS = '{"q": "é <tool_call>"}'


def summary(events: list[OutputEvent]) -> list[tuple[str, ...]]:
    """Events as (kind, content), neighbouring deltas joined; a call is (name, arguments, state)."""
    parts: list[tuple[str, ...]] = []
    for event in events:
        match event:
            case CallStart(_, name, _):
                parts.append(("call", name, "", "open"))
            case ArgumentsDelta(_, text):
                call, name, arguments, state = parts[-1]
                parts[-1] = (call, name, arguments + text, state)
            case CallEnd(_, is_complete):
                call, name, arguments, _ = parts[-1]
                parts[-1] = (call, name, arguments, "complete" if is_complete else "cut")
            case TextDelta(text) | ReasoningDelta(text):
                kind = "text" if isinstance(event, TextDelta) else "reasoning"
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
    return parts


def parsed(
    form: OutputFormat, text: str, cuts: list[int], *, prompt_end: str = "", forced: bool = False
) -> list[tuple[str, ...]]:
    """Feed a text in pieces that end at `cuts`; returns the summary of all events."""
    parser = form.new_parser(TOOLS, prompt_end=prompt_end, forced=forced)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in pairwise(places) for event in parser.feed(text[start:end])]
    return summary(events + parser.feed("", is_last=True))


HERMES, LLAMA3, JSON = named("hermes", "think"), named("llama3_json"), named("json")
MISTRAL = named("mistral", "mistral")
ADD, LOOK_UP = (
    ("call", "add", ARGUMENTS, "complete"),
    ("call", "look_up", OTHER_ARGUMENTS, "complete"),
)
CASES = [
    (HERMES, f"See.\n<tool_call>\n{CALL}\n</tool_call>", [("text", "See."), ADD]),
    (HERMES, f"\n<tool_call>{CALL}</tool_call>\n <tool_call>{OTHER}</tool_call>\n", [ADD, LOOK_UP]),
    (HERMES, "\n <tool_call>{}</tool_call>\n", [("text", "\n <tool_call>{}</tool_call>\n")]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone. ", [ADD, ("text", "Done. ")]),
    (HERMES, "no < tool_call> here", [("text", "no < tool_call> here")]),
    (HERMES, "<tool_call>no</tool_call> x", [("text", "<tool_call>no</tool_call> x")]),
    (HERMES, '<tool_call>{"name": "rm"}', [("text", '<tool_call>{"name": "rm"}')]),
    (HERMES, f"<tool_call>{CALL}", [ADD]),
    (HERMES, f"<tool_call>{CALL[:39]}", [("call", "add", CALL[29:39], "cut")]),
    (HERMES, f"<tool_call>{CALL}</tool_", [ADD]),
    (
        HERMES,
        f"<think>\nI <tool_call>{CALL}</tool_call>\n</think>\n\nYes.",
        [("reasoning", f"I <tool_call>{CALL}</tool_call>"), ("text", "Yes.")],
    ),
    (HERMES, "a <think>b</think>", [("text", "a <think>b</think>")]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", [ADD, LOOK_UP]),
    (
        MISTRAL,
        f"[THINK]Hm[/THINK]ok[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]look_up[CALL_ID]12[ARGS]{OTHER_ARGUMENTS}",
        [("reasoning", "Hm"), ("text", "ok"), ADD, LOOK_UP],
    ),
    (MISTRAL, "[TOOL", [("text", "[TOOL")]),
    (MISTRAL, f"[{CALL}]", [ADD]),
    (MISTRAL, '[{"a": 1}]', [("text", '[{"a": 1}]')]),
    (MISTRAL, '[TOOL_CALLS]{"a": 1}', [("text", '{"a": 1}')]),
    (LLAMA3, CALL, [ADD]),
    (LLAMA3, f"<|python_tag|>{CALL}; {OTHER}", [ADD, LOOK_UP]),
    (LLAMA3, '{"a": 1}', [("text", '{"a": 1}')]),
    (JSON, f" \n{CALL}", [ADD]),
    (JSON, "plain {text}", [("text", "plain {text}")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_cuts_change_nothing(
    form: OutputFormat, text: str, expected: list[tuple[str, ...]], cuts: list[int]
) -> None:
    """Any cut of an answer gives the same reasoning, text and calls."""
    assert parsed(form, text, cuts) == expected


def test_the_template_tells_the_format() -> None:
    """Formats of calls and reasoning are detected from the chat template."""
    form = detect("{% if tools %}<tool_call>{% endif %}{{ content.split('</think>') }}")

    assert (form.calls.name, form.reasoning.name) == ("hermes", "think")
    assert (detect("nothing").calls.name, detect("nothing").reasoning.name) == ("json", "none")


def test_a_format_is_named() -> None:
    """A format goes by its own name or another server's; an unknown name lists what there is."""
    assert named("qwen25").calls.name == "hermes"
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser lama: .* granite, harmony, hermes, hunyuan"
    ):
        named("lama")
