"""Responses of every API, whole and streamed: usage, verdict, answer."""

import json
from typing import Any

import pytest

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.responses import parse_response
from ramify.analysis.records import Usage, VendorVerdict


def sse(*events: dict[str, Any], with_names: bool = False) -> str:
    lines = []
    for event in events:
        if with_names:
            lines.append(f"event: {event['type']}")
        lines += [f"data: {json.dumps(event)}", ""]
    return "\n".join([*lines, ""])


ANTHROPIC_EVENTS: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-opus-5",
            "content": [],
            "usage": {
                "input_tokens": 3,
                "cache_creation_input_tokens": 20,
                "cache_read_input_tokens": 100,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 20,
                    "ephemeral_1h_input_tokens": 0,
                },
                "output_tokens": 1,
            },
        },
    },
    {"type": "ping"},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": '{"a":'},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": " 1}"},
    },
    {"type": "content_block_stop", "index": 1},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use"},
        "usage": {"output_tokens": 42, "cache_read_input_tokens": None},
    },
    {"type": "message_stop"},
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_stream_of_anthropic_has_input_and_output_usage(line_end: str) -> None:
    """Input counts come from `message_start`, output counts from `message_delta`."""
    text = sse(*ANTHROPIC_EVENTS, with_names=True).replace("\n", line_end)

    response = parse_response(text)

    assert response.usage == Usage(
        num_input=123, num_read=100, num_written=20, num_written_1h=0, num_output=42
    )
    assert (response.response_id, response.model, response.provider) == (
        "msg_1",
        "claude-opus-5",
        "anthropic",
    )
    assert [(item.path, item.text) for item in response.output] == [
        ("messages[0].content[0]", "Hello"),
        (
            "messages[0].content[1]",
            '{"type":"tool_use","id":"toolu_1","name":"f","input":{"a":1}}',
        ),
    ]


def test_a_cut_stream_has_what_came() -> None:
    """Half an event at the end is left out."""
    text = (
        sse(*ANTHROPIC_EVENTS[:5], with_names=True) + 'event: message_delta\ndata: {"type": "mess'
    )

    response = parse_response(text)

    assert response.usage.num_input == 123
    assert [item.text for item in response.output] == ["Hello"]


def test_a_stream_of_chat_has_the_usage_of_its_last_chunk() -> None:
    """Deltas are joined, tool calls by index; `usage: null` of other chunks does not hide it."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "gpt-4o"}

    def chunk(delta: dict[str, Any]) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta}], "usage": None}

    text = (
        sse(
            chunk({"role": "assistant", "content": ""}),
            chunk({"content": "a"}),
            chunk({"content": "b"}),
            chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
            {
                **head,
                "choices": [],
                "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
            },
        )
        + "data: [DONE]\n\n"
    )

    response = parse_response(text)

    assert response.usage == Usage(num_input=9, num_read=8)
    assert response.created_s == 5
    assert [item.text for item in response.output] == [
        "ab",
        '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}',
    ]


def test_a_stream_of_responses_ends_with_the_response() -> None:
    """The events before `response.completed` add nothing to it."""
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x"}],
    }
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "output": [], "usage": None}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.completed",
            "response": {
                "id": "resp_1",
                "output": [item],
                "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}},
            },
        },
    ]

    whole = parse_response(sse(*events))
    cut = parse_response(events[:2])

    assert whole.usage == Usage(num_input=9, num_read=0)
    assert whole.output == cut.output
    assert cut.usage == Usage()


def test_verdicts_of_vendors() -> None:
    """Anthropic's `cache_miss_reason` and OpenAI's diagnostics become a reason and a count."""
    anthropic = {
        "type": "message",
        "diagnostics": {
            "cache_miss_reason": {"type": "messages_changed", "cache_missed_input_tokens": 6455}
        },
    }
    openai = {
        "object": "response",
        "prompt_cache_diagnostics": {
            "type": "cache_miss",
            "reason": "tools_changed",
            "cache_missed_tokens": 12,
        },
    }
    pending = {"type": "message", "diagnostics": {"cache_miss_reason": None}}

    assert parse_response(anthropic).verdict == VendorVerdict("messages_changed", 6455)
    assert parse_response(openai).verdict == VendorVerdict("tools_changed", 12)
    assert parse_response(pending).verdict is None


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"type": "invalid_request_error", "message": "no"}},
        {"type": "error", "error": {"type": "overloaded_error"}},
        {"object": "error", "message": "no", "code": 400},
        {"detail": "Not Found"},
        {"id": "resp_1", "object": "response", "status": "failed", "usage": None},
        'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}\n\n',
    ],
)
def test_errors_are_failures(body: object) -> None:
    """An error in place of an answer is a failed attempt."""
    assert parse_response(body).is_failure


def test_an_answer_that_says_error_is_no_failure() -> None:
    """`error: null` beside an answer, and usage beside an error, are an answered request."""
    assert not parse_response({"id": "resp_1", "error": None, "output": []}).is_failure
    assert not parse_response({"error": {"code": "x"}, "usage": {"prompt_tokens": 1}}).is_failure


@pytest.mark.parametrize("value", [3, "plain text", ["a"], "data: 5\n\n"])
def test_what_is_no_response_is_a_bad_row(value: object) -> None:
    """Values of other kinds are refused."""
    with pytest.raises(BadRowError):
        parse_response(value)
