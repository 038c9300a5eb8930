"""Spans and events of OpenTelemetry GenAI, in today's and older spellings."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.otel.otlp_rows import OTEL
from ramify.analysis.records import LoggedRequest, Segment, TextForm
from tests.budget import examples
from tests.pure.analysis.gateway_rows import (
    END_S,
    START_S,
    anthropic_bodies,
    attribute,
    chat_bodies,
    dumps,
    nanoseconds,
    otlp_export,
    otlp_logs,
    otlp_prompt,
    otlp_span,
)
from tests.pure.analysis.log_rows import read_rows

DETAILS = "gen_ai.client.inference.operation.details"
MESSAGES = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
PROMPT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "gpt-5.1",
    "gen_ai.input.messages": json.dumps(MESSAGES),
}


def only(*rows: Any) -> LoggedRequest:
    requests, quality = read_rows(OTEL, rows)
    assert all(OTEL.is_row(row) for row in rows)
    assert not quality.bad_lines
    (request,) = requests
    return request


def without_calls(segments: tuple[Segment, ...]) -> list[Segment]:
    """Segments that OpenTelemetry and Anthropic spell alike: all but calls of tools."""
    return [item for item in segments if '"type":"tool_' not in item.text]


@settings(max_examples=examples(60))
@given(anthropic_bodies())
def test_structured_and_text_messages_are_the_messages_that_were_sent(body: dict[str, Any]) -> None:
    """Text, thinking, images, results, system and tools are the segments of the body itself."""
    prompt = otlp_prompt(body)
    as_text = {k: dumps(v) if isinstance(v, list) else v for k, v in prompt.items()}

    structured, text = only(otlp_export(otlp_span(prompt))), only(otlp_export(otlp_span(as_text)))

    assert text.segments == structured.segments
    expected = parse_bodies(body)[0].segments
    assert without_calls(text.segments) == without_calls(expected)
    assert [item.path for item in text.segments] == [item.path for item in expected]


@settings(max_examples=examples(60))
@given(chat_bodies())
def test_openllmetry_keys_are_a_chat_body(body: dict[str, Any]) -> None:
    """`gen_ai.prompt.N.*` and `llm.request.functions.N.*` give the body's messages and tools."""
    attributes = {"llm.request.type": "chat", "gen_ai.request.model": body["model"]}
    if "reasoning_effort" in body:
        attributes["gen_ai.request.reasoning_effort"] = body["reasoning_effort"]
    for at, message in enumerate(body["messages"]):
        for key, value in message.items():
            prefix = f"gen_ai.prompt.{at}.{key}"
            if key == "tool_calls":
                for number, call in enumerate(value):
                    attributes[f"{prefix}.{number}.id"] = call["id"]
                    attributes[f"{prefix}.{number}.name"] = call["function"]["name"]
                    attributes[f"{prefix}.{number}.arguments"] = call["function"]["arguments"]
            elif value is not None:
                attributes[prefix] = value if isinstance(value, str) else dumps(value)
    for at, tool in enumerate(body.get("tools", ())):
        for key, value in tool["function"].items():
            attributes[f"llm.request.functions.{at}.{key}"] = (
                value if isinstance(value, str) else dumps(value)
            )

    request = only(otlp_export(otlp_span(attributes)))

    assert request.segments == parse_bodies(body)[0].segments


@settings(max_examples=examples(60))
@given(chat_bodies())
def test_openinference_keys_are_a_chat_body(body: dict[str, Any]) -> None:
    """`llm.input_messages.N.*` and `llm.tools.N.*` give the body's messages, tools and settings."""
    parameters = {k: v for k, v in body.items() if k not in {"messages", "tools"}}
    attributes: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "llm.model_name": body["model"],
        "llm.invocation_parameters": json.dumps(parameters),
        "session.id": "session-1",
        "llm.token_count.prompt": 2000,
        "llm.token_count.prompt_details.cache_read": 1500,
    }
    for at, message in enumerate(body["messages"]):
        head = f"llm.input_messages.{at}.message"
        for key, value in message.items():
            if key == "tool_calls":
                for number, call in enumerate(value):
                    inner = f"{head}.tool_calls.{number}.tool_call"
                    attributes[f"{inner}.id"] = call["id"]
                    attributes[f"{inner}.function.name"] = call["function"]["name"]
                    attributes[f"{inner}.function.arguments"] = call["function"]["arguments"]
            elif isinstance(value, list):
                for number, block in enumerate(value):
                    inner = f"{head}.contents.{number}.message_content"
                    attributes[f"{inner}.type"] = "text" if block["type"] == "text" else "image"
                    if block["type"] == "text":
                        attributes[f"{inner}.text"] = block["text"]
                    else:
                        attributes[f"{inner}.image.image.url"] = block["image_url"]["url"]
            elif value is not None:
                attributes[f"{head}.{key}"] = value
    for at, tool in enumerate(body.get("tools", ())):
        attributes[f"llm.tools.{at}.tool.json_schema"] = dumps(tool)

    request = only(otlp_export(otlp_span(attributes)))

    assert request.segments == parse_bodies(body)[0].segments
    assert (request.usage.num_input, request.usage.num_read) == (2000, 1500)
    assert request.conversation == "session-1"


@settings(max_examples=examples(40))
@given(chat_bodies())
def test_events_of_single_messages_are_a_chat_body(body: dict[str, Any]) -> None:
    """A log record for each message is joined with its span by trace and span id."""
    span = otlp_span({
        "gen_ai.operation.name": "chat", "gen_ai.system": "openai",
        "gen_ai.request.model": body["model"], "gen_ai.usage.input_tokens": 9,
    })  # fmt: skip
    records = []
    for message in body["messages"]:
        fields = {k: v for k, v in message.items() if k not in {"role", "tool_call_id"}}
        if "tool_call_id" in message:
            fields["id"] = message["tool_call_id"]
        records.append({
            "eventName": f"gen_ai.{message['role']}.message", "traceId": span["traceId"],
            "spanId": span["spanId"], "timeUnixNano": "1764000000000000000",
            "body": attribute("", fields)["value"],
        })  # fmt: skip
    expected = [item for item in parse_bodies(body)[0].segments if item.path.startswith("messages")]

    for rows in (
        [otlp_logs(*records), otlp_export(span)],
        [otlp_export(span), otlp_logs(*records)],
    ):
        request = only(*rows)

        assert [item for item in request.segments if item.path.startswith("messages")] == expected
        assert request.usage.num_input == 9
        assert request.line == 1


def test_span_and_details_event_are_one_request() -> None:
    """The event has the prompt, the span the times; whichever is first, they are one request."""
    metadata = {k: v for k, v in PROMPT.items() if k != "gen_ai.input.messages"}
    span = otlp_span(metadata | {"gen_ai.usage.input_tokens": 7})
    record = {
        "eventName": DETAILS, "traceId": span["traceId"], "spanId": span["spanId"],
        "timeUnixNano": nanoseconds(END_S),
        "attributes": [attribute(k, v) for k, v in (PROMPT | {"gen_ai.input.messages": MESSAGES}).items()],
    }  # fmt: skip

    for rows in ([otlp_export(span), otlp_logs(record)], [otlp_logs(record), otlp_export(span)]):
        request = only(*rows)

        assert [item.path for item in request.segments] == [
            "settings.model",
            "messages[0].content[0]",
        ]
        assert (request.start_s, request.end_s, request.usage.num_input) == (START_S, END_S, 7)

    alone = only(otlp_logs(record))
    assert (alone.start_s, alone.end_s) == (None, END_S)
    assert alone.has_full_text


def test_what_an_inference_says_beside_the_prompt() -> None:
    """Conversation, response, first output, server and all counters are read; absent ones unknown."""
    request = only(otlp_export(otlp_span(PROMPT | {
        "gen_ai.conversation.id": "conv-1", "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "gpt-5.1-2025-11-13", "gen_ai.response.time_to_first_chunk": 1,
        "server.address": "eu.example.com", "server.port": 8443,
        "gen_ai.usage.input_tokens": 2000, "gen_ai.usage.cache_read.input_tokens": 1500,
        "gen_ai.request.reasoning.level": "high",
    })))  # fmt: skip

    assert request.conversation == "conv-1"
    assert request.request_id == "chatcmpl-1"
    assert request.response_model == "gpt-5.1-2025-11-13"
    assert request.first_output_s == START_S + 1
    assert request.replica == "eu.example.com:8443"
    assert request.provider == "openai"
    assert (request.usage.num_input, request.usage.num_read) == (2000, 1500)
    assert request.usage.num_written is request.usage.num_output is None
    assert [item.path for item in request.segments[:2]] == [
        "settings.model",
        "settings.reasoning_effort",
    ]


@pytest.mark.parametrize(("logged", "total"), [(200, 2000), (2000, 2000)])
def test_input_that_leaves_out_cached_tokens_is_recognised(logged: int, total: int) -> None:
    """An exporter that sends Anthropic's own `input_tokens`, less than was read, is added up."""
    request = only(otlp_export(otlp_span(PROMPT | {
        "gen_ai.usage.input_tokens": logged, "gen_ai.usage.cache_read.input_tokens": 1500,
        "gen_ai.usage.cache_creation.input_tokens": 300,
    })))  # fmt: skip

    assert (request.usage.num_input, request.usage.num_read) == (total, 1500)
    assert request.usage.num_written == 300


def test_spans_that_are_no_inference_are_skipped() -> None:
    """Agents, tools, embeddings, HTTP calls and failed inferences are no requests."""
    spans = [
        otlp_span(PROMPT | {"gen_ai.operation.name": "invoke_agent"}),
        otlp_span({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "t"}),
        otlp_span({"http.request.method": "GET"}),
        otlp_span(PROMPT | {"error.type": "timeout"}),
        otlp_span(PROMPT, status={"code": 2}),
        otlp_span(PROMPT),
    ]

    requests, quality = read_rows(OTEL, [otlp_export(*spans)])

    assert len(requests) == 1
    assert quality.skipped == {"no LLM request": 3, "failed attempt": 2}


def test_spans_of_a_line_have_an_index() -> None:
    """Requests of one export are told apart by their index; a bad span does not spoil the others."""
    bad = otlp_span(PROMPT | {"gen_ai.input.messages": "[1]"})

    requests, quality = read_rows(OTEL, [otlp_export(otlp_span(PROMPT), bad, otlp_span(PROMPT))])

    assert [(item.line, item.index) for item in requests] == [(1, 0), (1, 2)]
    assert quality.bad_lines == [("log.jsonl", 1)]


def test_a_span_without_content_keeps_usage_but_no_claim_to_the_text() -> None:
    """Content is opt-in: without it, usage and times remain."""
    prompt = {k: v for k, v in PROMPT.items() if k != "gen_ai.input.messages"}

    requests, quality = read_rows(
        OTEL, [otlp_export(otlp_span(prompt | {"gen_ai.usage.input_tokens": 5}))]
    )

    assert [item.has_full_text for item in requests] == [False]
    assert requests[0].usage.num_input == 5
    assert quality.notes["prompt not stored"] == 1


def test_flat_spans_of_files_and_databases_are_read() -> None:
    """A span with an object of attributes, nested or flat, or with columns as attributes."""
    flat = only({"name": "chat", "attributes": PROMPT, "start_time": "2025-11-24T16:00:00.250Z",
                 "end_time": "2025-11-24T16:00:02.500Z"})  # fmt: skip
    columns = only(PROMPT)
    tempo = only({"batches": otlp_export(otlp_span(PROMPT))["resourceSpans"]})
    assert (tempo.start_s, tempo.segments) == (START_S, columns.segments)
    nested = only({"attributes": {"openinference": {"span": {"kind": "LLM"}}, "llm": {
        "model_name": "gpt-5.1",
        "input_messages": [{"message.role": "user", "message.content": "hi"}],
    }}})  # fmt: skip

    assert (flat.start_s, flat.end_s) == (START_S, END_S)
    assert flat.segments == columns.segments
    assert nested.segments[-1] == Segment("messages[0]", flat.segments[-1].kind, "hi", label="user")


def test_other_parts_are_compact_json_in_their_own_order() -> None:
    """A tool call keeps the order of its keys, and its path is that of the part."""
    call = {"type": "tool_call", "name": "f", "arguments": {"b": 1, "a": "é"}, "id": "c"}
    messages = [{"role": "assistant", "parts": [{"type": "text", "content": "x"}, call]}]

    request = only(otlp_export(otlp_span(PROMPT | {"gen_ai.input.messages": messages})))

    last = request.segments[-1]
    assert last.path == "messages[0].content[1]"
    assert last.form is TextForm.JSON
    assert last.text == '{"type":"tool_call","name":"f","arguments":{"b":1,"a":"é"},"id":"c"}'


def test_the_inner_span_of_vercels_sdk_is_the_request() -> None:
    """`ai.generateText` repeats its `doGenerate`, which has the prompt in the form of messages."""
    prompt = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    outer = otlp_span({"ai.operationId": "ai.generateText", "ai.prompt": "hi"})
    inner = otlp_span({
        "ai.operationId": "ai.generateText.doGenerate", "ai.prompt.messages": json.dumps(prompt),
        "ai.model.id": "gpt-5.1", "ai.usage.inputTokens": 9, "ai.usage.cachedInputTokens": 4,
    })  # fmt: skip

    requests, _ = read_rows(OTEL, [otlp_export(outer, inner)])

    assert [item.path for item in requests[0].segments] == [
        "settings.model",
        "messages[0].content[0]",
    ]
    assert (requests[0].usage.num_input, requests[0].usage.num_read) == (9, 4)


def test_events_without_their_span_are_a_request() -> None:
    """Logs alone hold the messages; the events of a failed span are no request, in any order."""
    span = otlp_span({"gen_ai.operation.name": "chat", "error.type": "timeout"})
    records = [
        {"eventName": f"gen_ai.{role}.message", "traceId": span["traceId"], "spanId": span["spanId"],
         "timeUnixNano": nanoseconds(START_S), "body": attribute("", {"content": role})["value"]}
        for role in ("system", "user")
    ]  # fmt: skip

    alone = only(otlp_logs(*records))
    failed = [read_rows(OTEL, rows) for rows in (
        [otlp_logs(*records), otlp_export(span)], [otlp_export(span), otlp_logs(*records)])]  # fmt: skip

    assert [item.text for item in alone.segments] == ["system", "user"]
    assert (alone.start_s, alone.end_s) == (START_S, None)
    assert [requests for requests, _ in failed] == [[], []]
    assert [quality.skipped["failed attempt"] for _, quality in failed] == [1, 1]
