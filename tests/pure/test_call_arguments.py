"""Arguments of calls that clients send back: whole, cut off, encoded twice, or no object at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.answers.partial_json import completed_object
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

CUT = '{"path": "a.txt", "lines": [1, 2], "text": "half of a li'
COMPLETED = {"path": "a.txt", "lines": [1, 2], "text": "half of a li"}
TEXTS = st.text('abé😀 \n{}"\\', min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        (CUT, COMPLETED),
        ("{", {}),
        ('{"a', {}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ('{"a": "x\\\\u12', {"a": "x\\u12"}),
        ('{"a": "x\\u12', {"a": "x"}),
        ('{"a": "x\\ud83dy", "\\udc00": 1}', {"a": "x\ufffdy", "\ufffd": 1}),
        ('{"a": "\\\\ud83d \\ud83d\\ude00"}', {"a": "\\ud83d 😀"}),
        ('{"a": "\\ud83d x", "b": "y\\ud83d\\ud', {"a": "\ufffd x", "b": "y"}),
        (json.dumps('{"a": "\\ud83d"}'), {"a": "\ufffd"}),
        ("ls -l", {"arguments": "ls -l"}),
        ("[1, 2]", {"arguments": [1, 2]}),
        (7, {"arguments": 7}),
    ],
)
def test_arguments_are_an_object(value: object, arguments: dict[str, Any]) -> None:
    """Nothing that a client sends back is refused, and no text that has a value is dropped."""
    assert call_arguments(value, "x") == arguments


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3), st.floats(0, 1), st.booleans())
def test_a_cut_object_is_completed_to_a_beginning(
    value: dict[str, Any], share: float, ascii_only: bool
) -> None:
    """Wherever it is cut: an object with the first members, texts shortened, valid as Unicode."""
    text = json.dumps(value, ensure_ascii=ascii_only)

    completed = completed_object(text[: max(1, int(share * len(text)))])

    assert completed is not None
    assert list(completed) == list(value)[: len(completed)]
    assert list(completed.values())[:-1] == list(value.values())[: len(completed)][:-1]
    json.dumps(completed, ensure_ascii=False).encode()


def bodies() -> dict[str, dict[str, Any]]:
    """A turn after an answer that was cut off inside a call, with and without a result."""
    function = {"name": "f", "arguments": CUT}
    call = {"id": "c", "type": "function", "function": function}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": CUT},
    ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": CUT}
    claude = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [use]}]
    end: dict[str, Any] = {"role": "user", "content": "go on"}
    output = {"type": "function_call_output", "call_id": "c", "output": "cut"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "cut"}
    return {
        "/v1/chat/completions": {"max_tokens": 2, "messages": [*chat, end]},
        "/v1/chat/completions?": {
            "max_tokens": 2,
            "messages": [*chat, {"role": "tool", "tool_call_id": "c", "content": "cut"}],
        },
        "/v1/responses": {"max_output_tokens": 2, "input": [*items, end]},
        "/v1/responses?": {
            "max_output_tokens": 2,
            "input": [items[0], items[1] | {"status": "incomplete"}, output],
        },
        "/v1/messages": {"model": "tiny", "max_tokens": 2, "messages": [*claude, end]},
        "/v1/messages?": {
            "model": "tiny",
            "max_tokens": 2,
            "messages": [*claude, {"role": "user", "content": [result]}],
        },
    }


def test_a_call_that_was_cut_off_stays_in_the_conversation() -> None:
    """In all three APIs the next turn is served, and the model sees what it wrote."""

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE).running() as bench:
            for path, body in bodies().items():
                answer = await bench.post(path, body)

                assert answer.status == 200, (path, answer.body)
                prompt = bench.ended[-1].request.prompt.text
                call = prompt.partition("<tool_call>")[2].partition("</tool_call>")[0]
                assert json.loads(call)["arguments"] == COMPLETED, path

    run(main())


def test_limits_of_arguments_name_a_field_of_the_request() -> None:
    """Arguments that are nested too deep: the error's path exists in the request."""
    deep = "[" * 500
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    item = {"type": "function_call", "name": "f", "call_id": "c", "arguments": deep}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": deep}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "messages[0].tool_calls[0].function.arguments": (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        ),
        "input[0].arguments": ("/v1/responses", {"input": [item]}),
        "messages[0].content[0].input": (
            "/v1/messages",
            {"max_tokens": 2, "messages": [{"role": "assistant", "content": [use]}]},
        ),
    }

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE).running() as bench:
            for param, (path, body) in requests.items():
                answer = await bench.post(path, {"model": "tiny", **body})

                assert answer.status == 400
                assert param in answer.body.decode(), (path, answer.body)

    run(main())
