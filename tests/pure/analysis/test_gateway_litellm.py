"""LiteLLM's payloads and spend rows become the requests that reached a vendor."""

import json
from typing import Any

from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.gateways.litellm import LITELLM
from ramify.analysis.records import LoggedRequest
from tests.pure.analysis.log_rows import read_rows

BODY = {
    "model": "claude-sonnet-4-5",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": 2}}}
    ],
    "tool_choice": "auto",
}
RESPONSE = {
    "id": "chatcmpl-1",
    "model": "claude-sonnet-4-5-20250929",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Rain."}}],
    "usage": {
        "prompt_tokens": 2000,
        "completion_tokens": 5,
        "total_tokens": 2005,
        "prompt_tokens_details": {"cached_tokens": 1500},
        "cache_creation_input_tokens": 300,
        "cache_read_input_tokens": 1500,
    },
}


def payload(**changes: Any) -> dict[str, Any]:
    """A StandardLoggingPayload as LiteLLM's callbacks write it."""
    fields: dict[str, Any] = {
        "id": "chatcmpl-1",
        "trace_id": "t-1",
        "call_type": "acompletion",
        "stream": False,
        "response_cost": 0.01,
        "status": "success",
        "custom_llm_provider": "anthropic",
        "total_tokens": 2005,
        "prompt_tokens": 2000,
        "completion_tokens": 5,
        "startTime": 1764000000.25,
        "endTime": 1764000002.5,
        "completionStartTime": 1764000001.0,
        "model": "anthropic/claude-sonnet-4-5",
        "model_id": "deployment-7",
        "model_group": "smart",
        "api_base": "https://api.anthropic.com",
        "metadata": {"user_api_key_hash": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05",
                     "user_api_key_team_id": None},
        "cache_hit": None,
        "messages": BODY["messages"],
        "response": RESPONSE,
        "model_parameters": {"tools": BODY["tools"], "tool_choice": "auto", "temperature": 0.1},
        "hidden_params": {"model_id": "deployment-7"},
    }  # fmt: skip
    return fields | changes


def spend_row(**changes: Any) -> dict[str, Any]:
    """A row of LiteLLM_SpendLogs, with the JSON columns as text as a database driver gives them."""
    fields: dict[str, Any] = {
        "request_id": "chatcmpl-1",
        "call_type": "acompletion",
        "api_key": "88dc28d0f030c55ed4ab77ed8faf098196cb1c05",
        "spend": 0.01,
        "total_tokens": 2005,
        "prompt_tokens": 2000,
        "completion_tokens": 5,
        "startTime": "2025-11-24T16:00:00.250000Z",
        "endTime": "2025-11-24T16:00:02.500000Z",
        "completionStartTime": "2025-11-24T16:00:01Z",
        "model": "claude-sonnet-4-5",
        "model_id": "deployment-7",
        "api_base": "https://api.anthropic.com/v1/messages",
        "metadata": json.dumps({"status": "success", "additional_usage_values": {
            "prompt_tokens_details": {"cached_tokens": 1500},
            "cache_creation_input_tokens": 300}}),
        "cache_hit": "False",
        "team_id": "",
        "session_id": "s-1",
        "messages": "{}",
        "response": json.dumps(RESPONSE),
        "proxy_server_request": json.dumps(BODY),
        "custom_llm_provider": "anthropic",
        "status": "success",
    }  # fmt: skip
    return fields | changes


def read(*rows: Any) -> tuple[list[LoggedRequest], ReadQuality]:
    """Requests of rows that are all of LiteLLM."""
    assert all(map(LITELLM.is_row, rows))
    requests, quality = read_rows(LITELLM, rows)
    assert not quality.bad_lines
    return requests, quality


def test_payload_and_spend_row_hold_the_body_that_was_sent() -> None:
    """Both kinds of row give the segments of the body, in its order, and the same counts."""
    segments = parse_bodies(BODY)[0].segments

    requests, _ = read(payload(), spend_row(), {"standard_logging_object": payload(id="2")})

    for request in requests:
        assert request.segments == segments
        assert request.has_full_text
        assert (request.usage.num_input, request.usage.num_read) == (2000, 1500)
        assert (request.usage.num_written, request.usage.num_output) == (300, 5)
        assert (request.start_s, request.end_s) == (1764000000.25, 1764000002.5)
        assert request.first_output_s == 1764000001.0
        assert request.provider == "anthropic"
        assert request.model == "claude-sonnet-4-5"
        assert request.response_model == "claude-sonnet-4-5-20250929"
        assert request.replica == "deployment-7"
    assert len({request.cache_scope for request in requests}) == 1
    assert [request.conversation for request in requests] == [None, "s-1", None]


def test_rows_that_reached_no_vendor_are_skipped() -> None:
    """Failed attempts, answers of LiteLLM's own cache, embeddings and repeated rows are no requests."""
    requests, quality = read(
        payload(id="a", status="failure", response=None),
        payload(id="b", cache_hit=True),
        spend_row(request_id="c", cache_hit="True"),
        spend_row(request_id="d", metadata={"status": "failure"}, status=None),
        payload(id="e", call_type="aembedding"),
        payload(id="f"),
        payload(id="f"),
        spend_row(request_id="g"),
    )

    assert [request.line for request in requests] == [6, 8]
    assert quality.skipped == {
        "failed attempt": 2,
        "answered by the gateway's response cache": 2,
        "no LLM request": 1,
        "logged twice": 1,
    }


def test_cut_and_missing_prompts_are_known() -> None:
    """A cut string, a redacted or an absent prompt leaves usage and times but no claim to the text."""
    cut = "a" * 700 + "... (litellm_truncated skipped 99 chars) ..." + "b" * 1300
    body = BODY | {"messages": [{"role": "user", "content": cut}]}
    redacted = [{"role": "user", "content": "redacted-by-litellm"}]

    requests, quality = read(
        spend_row(proxy_server_request=json.dumps(body)),
        payload(id="2", messages=redacted),
        spend_row(request_id="3", proxy_server_request="{}", response="{}"),
    )

    assert [request.has_full_text for request in requests] == [False, False, False]
    assert [request.usage.num_input for request in requests] == [2000, 2000, 2000]
    assert requests[2].usage.num_read == 1500
    assert quality.notes["prompt not stored"] == quality.notes["prompt cut or redacted"] == 1


def test_absent_counters_stay_unknown() -> None:
    """Without a counter for reads, reads are unknown, not 0."""
    response = RESPONSE | {"usage": {"prompt_tokens": 7, "completion_tokens": 1}}

    (request,), _ = read(payload(response=response))

    assert (request.usage.num_input, request.usage.num_read) == (7, None)


def test_deployment_and_fallback_model_are_those_that_answered() -> None:
    """The model and the server that were called stand in the request, not the client's alias."""
    body = BODY | {"model": "smart"}

    requests, _ = read(
        spend_row(proxy_server_request=body),
        spend_row(request_id="2", proxy_server_request=body, model="gpt-5.1", model_id="",
                  custom_llm_provider="azure", api_base="https://u:pw@eu.example.com/x?key=sk-abc"),
    )  # fmt: skip

    assert [request.segments[0].text for request in requests] == ["claude-sonnet-4-5", "gpt-5.1"]
    assert requests[1].provider == "openai"
    assert requests[1].replica == "eu.example.com/x"


def test_keys_are_not_kept() -> None:
    """A key of the row is nowhere in the request; equal keys have equal scopes."""
    secret = "sk-live-7f1b8d1c9e"
    rows = [
        spend_row(request_id=str(number), api_key=key, metadata={"user_api_key": key})
        for number, key in enumerate([secret, secret, "sk-other"])
    ]

    requests, _ = read(*rows)

    assert secret not in repr(requests)
    assert requests[0].cache_scope == requests[1].cache_scope != requests[2].cache_scope
