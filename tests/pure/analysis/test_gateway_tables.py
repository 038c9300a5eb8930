"""Tables of gateways: bodies in columns, and what stands in the other columns."""

import json
from typing import Any

from hypothesis import given, settings

from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.gateways.gateway_csv import GATEWAY
from tests.budget import examples
from tests.pure.analysis.gateway_rows import (
    END_S,
    FIRST_S,
    SECRET,
    START_S,
    chat_bodies,
    chat_response,
    dumps,
    iso,
)
from tests.pure.analysis.log_rows import read_rows

BODY: dict[str, Any] = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}


def table_row(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A row of a CSV file: every value is text."""
    fields = {
        "request_json": dumps(body),
        "response_json": dumps(chat_response()),
        "model_name": "gpt-5.1",
        "status_code": "200",
        "timestamp": iso(START_S),
        "latency_ms": "2250",
        "ttft_ms": "750",
        "session_id": "session-1",
    }
    return fields | changes


@settings(max_examples=examples(50))
@given(chat_bodies())
def test_bodies_in_columns_keep_their_segments(body: dict[str, Any]) -> None:
    """The body's segments come through one, two and three levels of text."""
    text = dumps(body)
    levels = [text, dumps(text), dumps(dumps(text))]

    requests, _ = read_rows(GATEWAY, [table_row(body, request_json=level) for level in levels])

    expected = parse_bodies(body)[0].segments
    assert [request.segments for request in requests] == [expected] * 3


def test_columns_beside_the_body() -> None:
    """Times, conversation, usage, tenant and server come from the columns."""
    plain = table_row(BODY, tenant="acme", deployment="eu-1")
    counters = table_row(
        {"messages": BODY["messages"]}, response_json="", prompt_tokens="2000", cached_tokens="1500"
    )

    (first, second), _ = read_rows(GATEWAY, [plain, counters])

    assert (first.start_s, first.first_output_s, first.end_s) == (START_S, FIRST_S, END_S)
    assert first.conversation == "session-1"
    assert first.replica == "eu-1"
    assert first.cache_scope.startswith("tenant:")
    for request in (first, second):
        assert (request.usage.num_input, request.usage.num_read) == (2000, 1500)
        assert request.model == "gpt-5.1"


def test_rows_without_an_answer_or_a_body() -> None:
    """Failed and cached rows are skipped, embeddings are no requests, a broken body is a bad line."""
    rows = [
        table_row(BODY, status_code="500"),
        table_row(BODY, response_json="", error="timeout"),
        table_row(BODY, cache_status="HIT"),
        table_row({"model": "text-embedding-3-small", "input": ["a"]}, model_name=""),
        table_row({"model": "m", "input": "a"}, endpoint="/v1/embeddings"),
        table_row(BODY, request_json='{"model": "gpt'),
        table_row(BODY, cache_hit="True"),
    ]

    assert all(GATEWAY.is_row(row) for row in rows)
    requests, quality = read_rows(GATEWAY, rows)

    assert [request.line for request in requests] == [7]
    assert quality.bad_lines == [("log.jsonl", 6)]
    assert quality.skipped == {
        "failed attempt": 2,
        "answered by the gateway's response cache": 1,
        "no LLM request": 2,
    }


def test_keys_in_columns_are_not_kept() -> None:
    """A key tells tenants apart and is not kept, nor are headers."""
    headers = json.dumps({"authorization": f"Bearer {SECRET}", "anthropic-beta": "b-1"})
    row = table_row(BODY, api_key=SECRET, headers=headers, url=f"https://h/v1/x?key={SECRET}")

    (request,), _ = read_rows(GATEWAY, [row])

    assert SECRET not in repr(request)
    assert request.cache_scope.startswith("key:")


def test_envelopes_of_http_are_opened() -> None:
    """A response with its status around it is read, or is a failed attempt; a request's is not ours."""
    answered = json.dumps({"status_code": 200, "headers": {}, "body": chat_response()})
    refused = json.dumps({"status_code": 429, "headers": {}, "body": {"error": {}}})
    rows = [table_row(BODY, response_json=text, status_code="") for text in (answered, refused)]

    requests, quality = read_rows(GATEWAY, rows)

    assert [request.usage.num_read for request in requests] == [1500]
    assert quality.skipped == {"failed attempt": 1}
    assert not GATEWAY.is_row(
        {"request_json": json.dumps({"url": "/v1/chat/completions", "body": BODY})}
    )
