"""Tool calls are parsed from model output, however the text is cut into pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.params import SamplingParams
from ramify.server.tool_calls import (
    BARE_JSON,
    FORMATS,
    ToolCallFormat,
    ToolCallParser,
    detect_format,
    split,
    stop_after_call,
    tool_call_schema,
)

HERMES, MISTRAL, LLAMA3 = FORMATS
NAMES = ["add", "look_up"]
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
OTHER = '{"name": "look_up", "parameters": {"q": "é <tool_call>"}}'


def parsed(
    form: ToolCallFormat, text: str, cuts: list[int], *, forced: bool = False
) -> tuple[str, list[str]]:
    """Feed a text in pieces that end at `cuts`; returns the plain text and the call names."""
    parser, shown, names = ToolCallParser(form, NAMES, forced=forced), "", list[str]()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for begin, end in pairwise(places):
        piece, calls = split(parser.feed(text[begin:end]))
        shown += piece
        names += [call.name for call in calls]
    rest, calls = split(parser.finish())
    return shown + rest, names + [call.name for call in calls]


LISTED = '{"name": "add", "arguments": [1]}'
CASES = [
    (HERMES, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.\n", ["add"]),
    (
        HERMES,
        f"\n<tool_call>{CALL}</tool_call>\n <tool_call>{OTHER}</tool_call>\n",
        "",
        ["add", "look_up"],
    ),
    (HERMES, "\n <tool_call>{}</tool_call>\n", "\n <tool_call>{}</tool_call>\n", []),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone. ", "\n\nDone. ", ["add"]),
    (HERMES, "no < tool_call> here", "no < tool_call> here", []),
    (HERMES, "<tool_call>broken</tool_call> x", "<tool_call>broken</tool_call> x", []),
    (HERMES, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    (HERMES, f"<tool_call>{CALL}", "", ["add"]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", "", ["add", "look_up"]),
    (MISTRAL, "[TOOL", "[TOOL", []),
    (MISTRAL, f"[{CALL}]", "", ["add"]),
    (MISTRAL, '[{"a": 1}]', '[{"a": 1}]', []),
    (MISTRAL, '[TOOL_CALLS]{"a": 1}', '[TOOL_CALLS]{"a": 1}', []),
    (HERMES, f"<tool_call>{LISTED}</tool_call>", f"<tool_call>{LISTED}</tool_call>", []),
    (LLAMA3, CALL, "", ["add"]),
    (LLAMA3, f"<|python_tag|>{CALL}; {OTHER}", "", ["add", "look_up"]),
    (LLAMA3, '{"a": 1}', '{"a": 1}', []),
    (BARE_JSON, f" \n{CALL}", "", ["add"]),
    (BARE_JSON, "plain {text}", "plain {text}", []),
]


@pytest.mark.parametrize(("form", "text", "shown", "names"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_change_nothing(
    form: ToolCallFormat, text: str, shown: str, names: list[str], cuts: list[int]
) -> None:
    """Any split of the text gives the same plain text and the same complete calls."""
    assert parsed(form, text, cuts) == (shown, names)


def test_a_forced_call_is_bare_json() -> None:
    """A forced call is parsed as bare JSON, whatever the model's own format."""
    assert parsed(HERMES, CALL, [3], forced=True) == ("", ["add"])


def test_arguments_are_json_text() -> None:
    """A call's `arguments` is JSON text, as OpenAI clients expect."""
    parser = ToolCallParser(HERMES, NAMES)
    _, [call] = split(parser.feed(f"<tool_call>{CALL}</tool_call>"))
    assert json.loads(call.arguments) == {"a": 1, "b": [2, "}"]}
    assert call.id.startswith("call_")
    text = "<tool_call>" + r'{"name": "add", "arguments": "{\"a\": 2}"}</tool_call>'
    _, [call] = split(parser.feed(text))
    assert json.loads(call.arguments) == {"a": 2}


def test_the_template_tells_the_format() -> None:
    """The tool-call format is detected from the chat template."""
    assert detect_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert detect_format("nothing") is BARE_JSON


def test_a_grammar_allows_the_chosen_tool_only() -> None:
    """The grammar allows only the chosen tool, or every tool if none is chosen."""
    tools = [{"function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    add_schema = tool_call_schema(tools, "add").json_schema
    all_tools_schema = tool_call_schema(tools, None).json_schema
    assert isinstance(add_schema, str)
    assert isinstance(all_tools_schema, str)
    assert "look_up" not in add_schema
    assert "look_up" in all_tools_schema


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (HERMES, f"<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>", ""),
        (HERMES, f"a<tool_call>{CALL}", "a"),  # the end was a stop text
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", ""),
        (LLAMA3, f"{CALL}; {OTHER}", ""),
    ],
)
def test_a_single_call_is_the_first(form: ToolCallFormat, text: str, shown: str) -> None:
    """With `single=True`, calls after the first are dropped, and their text too."""
    parser = ToolCallParser(form, NAMES, single=True)
    plain_text, calls = split([*parser.feed(text), *parser.finish()])
    assert (plain_text, [call.name for call in calls]) == (shown, ["add"])


def test_text_and_calls_keep_their_order() -> None:
    """Text and calls of one piece come out in their order."""
    parser = ToolCallParser(HERMES, NAMES)
    pieces = parser.feed(f"a<tool_call>{CALL}</tool_call>b<tool_call>{OTHER}</tool_call>")
    assert [piece if isinstance(piece, str) else piece.name for piece in pieces] == [
        "a",
        "add",
        "b",
        "look_up",
    ]


def test_a_single_call_ends_the_answer_where_it_can() -> None:
    """A single call adds the format's closing tag as a stop text, if the format has one."""
    params = SamplingParams(stop="x")
    assert stop_after_call(params, HERMES).stop == ("x", "</tool_call>")
    assert stop_after_call(params, MISTRAL) is params
