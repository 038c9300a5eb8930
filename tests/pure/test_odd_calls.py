"""Calls that models write in another form than their template asks for, and types behind references."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.server.model_dialects import named
from ramify.server.model_dialects.events import CallStart
from ramify.server.model_dialects.value_types import argument_names, argument_types
from tests.budget import examples
from tests.pure.test_model_dialects import summary

CALL = ("call", "add", '{"a": 1}', "complete")
JSON_CALL = '{"name": "add", "arguments": {"a": 1}}'
SCHEMA: dict[str, Any] = {
    "$defs": {
        "count": {"type": "integer"},
        "choice": {"enum": ["1.10", "2"]},
        "self": {"$ref": "#"},
    },
    "properties": {
        "reference": {"$ref": "#/$defs/count"},
        "all": {"allOf": [{"$ref": "#/$defs/count"}, {"minimum": 1}]},
        "enum": {"enum": [1, 2]},
        "enum_text": {"$ref": "#/$defs/choice"},
        "const": {"const": True},
        "nested": {
            "anyOf": [{"anyOf": [{"type": "array"}, {"$ref": "#/$defs/count"}]}, {"const": None}]
        },
        "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "both": {"type": ["integer", "string"], "allOf": [{"type": "number"}]},
        "object": {"type": "object"},
        "list": {"type": "array"},
        "open": {},
        "text": {"type": "string"},
    },
    "allOf": [{"properties": {"inherited": {"type": "boolean"}}}],
}


def parsed(
    family: str, text: str, cuts: list[int], schema: dict[str, Any] | None = None
) -> list[tuple[str, ...]]:
    parser = named(family, "none").new_parser(["add"], prompt_end="", schemas={"add": schema or {}})
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in pairwise(places) for event in parser.feed(text[start:end])]
    return summary([*events, *parser.feed("", is_last=True)])


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("reference", {"integer"}),
        ("all", {"integer"}),
        ("enum", {"integer"}),
        ("enum_text", {"string"}),
        ("const", {"boolean"}),
        ("nested", {"array", "integer", "null"}),
        ("either", {"string", "number"}),
        ("both", {"integer"}),
        ("open", set()),
        ("inherited", {"boolean"}),
        ("unknown", set()),
    ],
)
def test_types_are_found_behind_references(name: str, types: set[str]) -> None:
    """References, unions, intersections and constants give the types of an argument."""
    assert argument_types(SCHEMA, name) == types
    assert argument_types(
        {"$ref": "#/$defs/a", "$defs": {"a": SCHEMA | {"$defs": {}}}}, "const"
    ) == {"boolean"}


def test_hostile_schemas_have_no_types() -> None:
    """Circles, targets that are none and unions without end are read in bounded time."""
    circle = {"properties": {"a": {"$ref": "#/properties/a"}}, "allOf": [{"$ref": "#"}]}
    wide: dict[str, Any] = {
        "$defs": {"n0": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/n60"}},
    }
    for level in range(60):
        wide["$defs"][f"n{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/n{level}"}] * 2}

    assert argument_types(circle, "a") == argument_types(wide, "a") == set()
    assert argument_types({"properties": {"a": {"$ref": "#/$defs/none"}}}, "a") == set()
    assert argument_names(circle) == {"a"}


VALUES = [
    ("reference", "5", 5),
    ("reference", "5.5", 5.5),
    ("all", "7", 7),
    ("enum", "2", 2),
    ("enum_text", "1.10", "1.10"),
    ("const", "True", True),
    ("nested", "null", None),
    ("nested", "[1]", [1]),
    ("either", "1.10", "1.10"),
    ("either", "1.5", 1.5),
    ("either", "1e5", "1e5"),
    ("open", "1.10", "1.10"),
    ("open", "12", 12),
    ("object", "{'a': True, 'b': None}", {"a": True, "b": None}),
    ("list", "['x', (1, 2)]", ["x", [1, 2]]),
    ("open", "['x']", "['x']"),
    ("inherited", "false", False),
    ("text", "5", "5"),
]


@pytest.mark.parametrize(("name", "written", "value"), VALUES)
def test_a_tagged_value_has_the_type_of_its_schema(name: str, written: str, value: object) -> None:
    """Two families' tags; a number that Python would write otherwise stays text where text may be."""
    qwen = f"<tool_call><function=add><parameter={name}>\n{written}\n</parameter></function></tool_call>"
    glm = (
        f"<tool_call>add\n<arg_key>{name}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    )

    for family, text in (("qwen3_coder", qwen), ("glm", glm)):
        [(_, _, arguments, state)] = parsed(family, text, [], SCHEMA)
        assert state == "complete"
        read = json.loads(arguments)
        assert read == {name: value}
        assert type(read[name]) is type(value)


TWO = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\nx\n<parameter=b>\ny\n</function>\n</tool_call>",
            '{"a": "x", "b": "y"}',
        ),
        ("qwen3_coder", "<function=add><parameter=a>x</function>", '{"a": "x"}'),
        (
            "qwen3_coder",
            "<function=add><parameter=a>\n<parameter=c> is no tag </function> here\n</parameter></function>",
            '{"a": "<parameter=c> is no tag </function> here"}',
        ),
        (
            "glm",
            "<tool_call>add\n<arg_key>a</arg_key><arg_value>x<arg_key>b</arg_key><arg_value>y</tool_call>",
            '{"a": "x", "b": "y"}',
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call><invoke name="add"><parameter name="a">x<parameter name="b">y</parameter>'
                "</invoke></minimax:tool_call>"
            ),
            '{"a": "x", "b": "y"}',
        ),
    ],
)
@settings(max_examples=examples(30), deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_forgotten_end_of_a_value(
    family: str, text: str, arguments: str, cuts: list[int]
) -> None:
    """The next parameter of the tool, or the end of the call, ends a value too."""
    assert parsed(family, text, cuts, TWO) == [("call", "add", arguments, "complete")]


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", JSON_CALL, [CALL]),
        ("hermes", f"```json\n{JSON_CALL}\n```", [CALL]),
        (
            "hermes",
            f"I add.\n```json\n{JSON_CALL}\n```\nDone",
            [("text", "I add."), CALL, ("text", "Done")],
        ),
        ("hermes", f"<tools>\n{JSON_CALL}\n</tools>", [CALL]),
        ("hermes", f"I add.\n\n{JSON_CALL}", [("text", "I add."), CALL]),
        ("hermes", '{"name": "Ann", "age": 4}', [("text", '{"name": "Ann", "age": 4}')]),
        ("hermes", 'See {"name": "rm"}.', [("text", 'See {"name": "rm"}.')]),
        (
            "hermes",
            "<tool_call>{'name': 'add', 'arguments': {'a': 1}}</tool_call>",
            [CALL],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": True, "b": [None, False, "None"]}}</tool_call>',
            [("call", "add", '{"a": true, "b": [null, false, "None"]}', "complete")],
        ),
        ("llama3_json", 'Sure. {"name": "add", "parameters": {"a": 1}}', [("text", "Sure."), CALL]),
        (
            "llama3_json",
            'So: {"type": "function", "name": "add", "parameters": {"a": 1}}',
            [("text", "So:"), CALL],
        ),
        ("json", f"So:\n{JSON_CALL}", [("text", "So:"), CALL]),
        *(
            (
                "kimi_k2",
                f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{{body}}}",
                [call],
            )
            for call in (CALL,)
            for body in ('"a": 1',)
            for written in ("add", "functions.add", "functions.add:0", "add:3", " functions.add_2 ")
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{'a': True}",
            [("call", "add", '{"a": true}', "complete")],
        ),
    ],
)
@settings(max_examples=examples(30), deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_calls_in_other_forms(
    family: str, text: str, expected: list[tuple[str, ...]], cuts: list[int]
) -> None:
    """Bare and fenced JSON, prose before it, odd ids and literals of Python, wherever the text is cut."""
    assert parsed(family, text, cuts) == expected


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "json"])
def test_json_within_a_format_is_no_call(family: str) -> None:
    """Of an answer that must match a format: an object in it may look like a call."""
    text = f'{{"next": {JSON_CALL}}}'

    def read(*, has_format: bool) -> Any:
        parser = named(family).new_parser(["add"], prompt_end="", has_format=has_format)
        return summary(parser.feed(text, is_last=True))

    assert read(has_format=True) == [("text", text)]
    assert CALL in read(has_format=False)


def test_no_two_calls_of_an_answer_have_one_id() -> None:
    """Kimi's ids hold the name; results name their call by its id."""
    ids = ("add", "add", "functions.add:0", "functions.add:0", "functions.add:4")
    text = "".join(
        f'<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
        for call_id in ids
    )

    events = named("kimi_k2").new_parser(["add"], prompt_end="").feed(text, is_last=True)

    assert [event.id for event in events if isinstance(event, CallStart)] == [
        "add",
        "functions.add:1",
        "functions.add:0",
        "functions.add:3",
        "functions.add:4",
    ]
