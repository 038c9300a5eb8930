"""Langfuse, Helicone, LangSmith and HAR: the same conversation has the segments of its body."""

import base64
import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given, settings

from ramify.analysis.reader import LogFormat
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.gateways.har import HAR
from ramify.analysis.readers.gateways.helicone import HELICONE
from ramify.analysis.readers.gateways.hosts import provider_of_name
from ramify.analysis.readers.gateways.langfuse import LANGFUSE
from ramify.analysis.readers.gateways.langsmith import LANGSMITH
from ramify.analysis.readers.gateways.litellm import LITELLM
from ramify.analysis.readers.otel.otlp_rows import OTEL
from ramify.analysis.records import LoggedRequest, VendorVerdict
from tests.budget import examples
from tests.pure.analysis.gateway_rows import (
    END_S,
    FIRST_S,
    SECRET,
    START_S,
    anthropic_bodies,
    anthropic_response,
    chat_bodies,
    chat_response,
    har_entry,
    helicone_row,
    iso,
    langfuse_row,
    otlp_export,
    otlp_span,
)
from tests.pure.analysis.log_rows import read_rows

CHAT_URL = "https://api.openai.com/v1/chat/completions"
MESSAGES_URL = "https://api.anthropic.com/v1/messages?beta=true"
BODY: dict[str, Any] = {"model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}
CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "hi"}],
}


def only(form: LogFormat, row: Any) -> LoggedRequest:
    assert form.is_row(row)
    requests, quality = read_rows(form, [row])
    assert not quality.bad_lines
    (request,) = requests
    return request


def lc_message(kind: str, **fields: Any) -> dict[str, Any]:
    """A message as LangChain serialises it."""
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind],
            "kwargs": fields}  # fmt: skip


def lc_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for message in body["messages"]:
        fields = {"content": message["content"] or ""}
        role = message["role"]
        if "tool_calls" in message:
            fields["additional_kwargs"] = {}
            fields["tool_calls"] = [
                {"name": call["function"]["name"], "args": json.loads(call["function"]["arguments"]),
                 "id": call["id"], "type": "tool_call"}
                for call in message["tool_calls"]
            ]  # fmt: skip
        if "tool_call_id" in message:
            fields["tool_call_id"] = message["tool_call_id"]
        kind = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage",
                "tool": "ToolMessage"}[role]  # fmt: skip
        made.append(lc_message(kind, **fields))
    return made


def run_of(body: dict[str, Any], inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run of type llm."""
    fields = {
        "id": "run-1",
        "trace_id": "trace-1",
        "dotted_order": "20251124T160000250000Zrun-1",
        "run_type": "llm",
        "session_id": "project-1",
        "start_time": "2025-11-24T16:00:00.250000",
        "end_time": "2025-11-24T16:00:02.500000",
        "events": [{"name": "new_token", "time": "2025-11-24T16:00:01"}],
        "inputs": inputs,
        "outputs": {"generations": [[{"message": lc_message(
            "AIMessage", content="Rain.",
            usage_metadata={"input_tokens": 2000, "output_tokens": 5,
                            "input_token_details": {"cache_read": 1500, "cache_creation": 300}},
            response_metadata={"model_name": "gpt-5.1-2025-11-13", "id": "chatcmpl-1"},
        )}]]},
        "extra": {
            "invocation_params": {k: v for k, v in body.items() if k != "messages"},
            "metadata": {"ls_provider": "openai", "ls_model_name": body["model"],
                         "thread_id": "thread-1"},
        },
    }  # fmt: skip
    return fields | changes


@settings(max_examples=examples(60))
@given(chat_bodies())
def test_every_format_gives_the_segments_of_the_chat_body(body: dict[str, Any]) -> None:
    """Paths, texts, forms and labels are those of the body, whatever is wrapped around it."""
    expected = parse_bodies(body)[0].segments
    rows = [
        (LANGFUSE, langfuse_row(body)),
        (LANGFUSE, {
            "id": "o", "traceId": "t", "type": "GENERATION", "startTime": iso(START_S),
            "model": body["model"], "input": {k: v for k, v in body.items() if k != "model"},
            "usageDetails": {},
        }),
        (HELICONE, helicone_row(body, chat_response())),
        (HELICONE, helicone_row(body, None, request_body=json.dumps(json.dumps(body)))),
        (HAR, har_entry(body, chat_response(), CHAT_URL)),
        (LANGSMITH, run_of(body, {"messages": [lc_messages(body)]})),
        (LANGSMITH, run_of(body, body)),
        (LITELLM, {
            "call_type": "acompletion", "startTime": START_S, "model": body["model"],
            "messages": body["messages"],
            "model_parameters": {k: v for k, v in body.items() if k not in {"messages", "model"}},
        }),
    ]  # fmt: skip

    for form, row in rows:
        request = only(form, row)
        assert request.segments == expected, form.name
        assert request.has_full_text, form.name


@settings(max_examples=examples(40))
@given(anthropic_bodies())
def test_formats_with_bodies_give_the_segments_of_a_messages_body(body: dict[str, Any]) -> None:
    """Blocks, thinking, tool use and system prompts keep their places."""
    expected = parse_bodies(body)[0].segments
    rows = [
        (HELICONE, helicone_row(body, anthropic_response(), request_path=MESSAGES_URL)),
        (HAR, har_entry(body, anthropic_response(), MESSAGES_URL)),
        (
            LANGFUSE,
            langfuse_row({**body, "messages": []}, input=json.dumps(body), model_parameters=""),
        ),
        (LANGSMITH, run_of({"model": body["model"]}, body)),
    ]

    for form, row in rows:
        request = only(form, row)
        segments = [item for item in request.segments if item.path != "settings.betas"]
        assert segments == list(expected), form.name


def test_what_stands_beside_the_prompt() -> None:
    """Conversation, times and usage of each format."""
    rows: list[tuple[LogFormat, Any, str, float | None]] = [
        (LANGFUSE, langfuse_row(BODY), "session-1", FIRST_S),
        (HELICONE, helicone_row(BODY, chat_response()), "session-1", FIRST_S),
        (HAR, har_entry(BODY, chat_response(), CHAT_URL), "session-1", FIRST_S),
        (LANGSMITH, run_of(BODY, {"messages": BODY["messages"]}), "thread-1", FIRST_S),
    ]

    for form, row, conversation, first_s in rows:
        request = only(form, row)
        assert request.conversation == conversation, form.name
        times = (request.start_s, request.first_output_s, request.end_s)
        assert times == (START_S, first_s, END_S), form.name
        assert (request.usage.num_input, request.usage.num_read) == (2000, 1500), form.name
        assert request.usage.num_output == 5
        assert request.provider == "openai", form.name


def test_verdict_betas_and_breakpoints_come_through() -> None:
    """A vendor's verdict, a beta header and a breakpoint are read from an archive."""
    request = only(HAR, har_entry(CLAUDE, anthropic_response(), MESSAGES_URL))

    assert request.verdict == VendorVerdict("messages_changed", 64)
    assert request.usage.num_input == 2000
    assert [(item.path, item.text) for item in request.segments[:2]] == [
        ("settings.model", "claude-sonnet-4-5"),
        ("settings.betas", "context-1m-2025-08-07"),
    ]
    assert request.segments[2].breakpoint_ttl_s == 300.0
    assert request.provider == "anthropic"


def test_streams_and_base64_are_read() -> None:
    """The text of a stream, also in base64, has the usage of its last events."""
    events = [
        {
            "id": "c",
            "model": "gpt-5.1",
            "choices": [{"delta": {"role": "assistant", "content": "R"}}],
        },
        {"id": "c", "model": "gpt-5.1", "choices": [], "usage": chat_response()["usage"]},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    encoded = base64.b64encode(stream.encode()).decode()

    plain = only(HAR, har_entry(BODY, stream, CHAT_URL))
    coded = only(HAR, har_entry(BODY, "", CHAT_URL, response={
        "status": 200, "headers": [], "content": {"encoding": "base64", "text": encoded}}))  # fmt: skip

    assert plain.usage == coded.usage
    assert (plain.usage.num_input, plain.usage.num_read) == (2000, 1500)


def test_secrets_are_not_kept() -> None:
    """Keys, tokens, passwords and cookies of headers and URLs are nowhere in a request."""
    url = f"https://user:{SECRET}@llm.example.com/v1/chat/completions?api_key={SECRET}"
    rows = [
        (HAR, har_entry(BODY, chat_response(), url)),
        (HELICONE, helicone_row(BODY, chat_response(), request_path=url, target_url=url,
                                request_properties={"auth": SECRET})),
        (LANGFUSE, langfuse_row(BODY, metadata={"api_key": SECRET, "headers": {"cookie": SECRET}})),
        (LANGSMITH, run_of(BODY | {"api_key": SECRET}, {"messages": BODY["messages"]})),
    ]  # fmt: skip

    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": '[{"role": "user", "parts": []}]',
        "llm.headers": f"authorization: Bearer {SECRET}",
        "http.request.header.x-api-key": SECRET,
        "url.full": url,
        "server.address": url,
        "gen_ai.openai.api_base": url,
    }
    rows.append((OTEL, otlp_export(otlp_span(attributes))))

    for form, row in rows:
        assert SECRET not in repr(only(form, row)), form.name
    first, second = (only(HAR, har_entry(BODY, chat_response(), url)) for _ in range(2))
    assert first.cache_scope == second.cache_scope != ""
    assert first.replica == "llm.example.com"


def test_rows_that_are_no_request_are_counted() -> None:
    """Failures, own caches, other kinds of rows and other URLs are skipped and counted."""
    cases: list[tuple[LogFormat, Any, str]] = [
        (LANGFUSE, langfuse_row(BODY, type="SPAN"), "no LLM request"),
        (LANGFUSE, langfuse_row(BODY, level="ERROR"), "failed attempt"),
        (HELICONE, helicone_row(BODY, {"error": {}}, response_status=529), "failed attempt"),
        (HELICONE, helicone_row(BODY, None, response_status=-3), "failed attempt"),
        (HELICONE, helicone_row(BODY, chat_response(), cache_reference_id="7f1b"),
         "answered by the gateway's response cache"),
        (HAR, har_entry(BODY, {}, CHAT_URL, response={"status": 429}), "failed attempt"),
        (HAR, har_entry(BODY, {}, CHAT_URL, response={"status": 0}), "failed attempt"),
        (HAR, har_entry(BODY, {}, "https://api.anthropic.com/v1/messages/count_tokens"),
         "no LLM request"),
        (HAR, har_entry(BODY, {}, "https://example.com/logo.png"), "no LLM request"),
        (LANGSMITH, run_of(BODY, {}, run_type="chain"), "no LLM request"),
        (LANGSMITH, run_of(BODY, {}, error="timeout"), "failed attempt"),
    ]  # fmt: skip

    for form, row, reason in cases:
        requests, quality = read_rows(form, [row])
        assert (requests, dict(quality.skipped)) == ([], {reason: 1}), (form.name, row)


def test_langfuse_counts_do_not_overlap() -> None:
    """Cached tokens are outside `input`, unless input and output alone make the total."""
    cases: list[tuple[dict[str, Any], tuple[int | None, int | None, int | None]]] = [
        ({"input": 500, "input_cached_tokens": 1500, "output": 5}, (2000, 1500, None)),
        ({"input": 2000, "input_cached_tokens": 1500, "output": 5, "total": 2005}, (2000, 1500, None)),
        ({"input": 200, "cache_read_input_tokens": 1500, "cache_creation_input_tokens": 300, "output": 5},
         (2000, 1500, 300)),
        ({"input": 400, "input_audio_tokens": 100, "input_cached_tokens": 1500, "output": 5, "total": 2005},
         (2000, 1500, None)),
        ({"input": 2000, "output": 5, "total": 2005}, (2000, None, None)),
        ({"output": 5}, (None, None, None)),
    ]  # fmt: skip

    for usage, expected in cases:
        counts = only(LANGFUSE, langfuse_row(BODY, usage_details=usage)).usage
        assert (counts.num_input, counts.num_read, counts.num_written) == expected, usage


def test_langfuse_template_and_legacy_session() -> None:
    """The prompt's template is named; a trace that comes first gives its observations the session."""
    trace = {"id": "trace-1", "timestamp": iso(START_S), "session_id": "s-9", "public": False}
    legacy = langfuse_row(BODY)
    del legacy["session_id"]

    requests, _ = read_rows(LANGFUSE, [trace, legacy])

    assert requests[0].conversation == "s-9"
    assert requests[0].template == "support@7"


@pytest.mark.parametrize("name", ["data", "observations"])
def test_pages_and_traces_hold_several_requests(name: str) -> None:
    """Observations inside a page or a trace are requests of one line, told apart by an index."""
    page = {name: [langfuse_row(BODY, id="a"), langfuse_row(BODY, id="b", type="TOOL"),
                   langfuse_row(BODY, id="c")]}  # fmt: skip

    assert LANGFUSE.is_row(page)
    requests, _ = read_rows(LANGFUSE, [page])

    assert [(item.line, item.index) for item in requests] == [(1, 0), (1, 1)]


def test_helicone_counts_of_rows_without_bodies() -> None:
    """Without a response, the row's counters are used; a total of unknown meaning stays unknown."""
    counts = {"prompt_tokens": 200, "prompt_cache_read_tokens": 1500, "completion_tokens": 5,
              "prompt_cache_write_tokens": 300}  # fmt: skip
    bare = helicone_row(BODY, None, request_body=None, **counts)

    anthropic = only(HELICONE, bare | {"provider": "ANTHROPIC"})
    unknown = only(HELICONE, bare | {"prompt_tokens": 2000})

    assert (anthropic.usage.num_input, anthropic.has_full_text) == (2000, False)
    assert (unknown.usage.num_input, unknown.usage.num_read) == (None, 1500)


def test_langsmith_session_is_the_project() -> None:
    """The session of a run is its project and no conversation."""
    run = run_of(BODY, {"messages": BODY["messages"]})
    run["extra"]["metadata"] = {}

    assert only(LANGSMITH, run).conversation is None
    assert only(LANGSMITH, {"runs": [run]}).request_id == "chatcmpl-1"


def test_prompts_cut_in_the_middle_of_json_are_not_taken_for_text() -> None:
    """A limit on the length of values cuts JSON; usage and times remain, no text is claimed."""
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 400}]}
    cut = json.dumps({"messages": body["messages"]})[:300]
    span = otlp_span({
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-5.1",
        "gen_ai.input.messages": json.dumps(body["messages"])[:300],
        "gen_ai.usage.input_tokens": 9,
    })  # fmt: skip

    for form, row in ((LANGFUSE, langfuse_row(body, input=cut)), (OTEL, otlp_export(span)),
                      (HELICONE, helicone_row(body, chat_response(), request_body=cut))):  # fmt: skip
        request = only(form, row)
        assert not request.has_full_text, form.name
        assert [item.path for item in request.segments] == ["settings.model"], form.name
        assert request.usage.num_input


def test_a_tools_own_mark_of_a_cut_is_part_of_the_prompt() -> None:
    """`[truncated]` in a tool's result was sent like that; `[TRUNCATED]` at the end is a tracer's."""
    sent = {**BODY, "messages": [{"role": "user", "content": "lines 1 to 9 [truncated] and more"}]}
    cut = {**BODY, "messages": [{"role": "user", "content": "lines 1 to 9 [TRUNCATED]"}]}

    assert only(LANGFUSE, langfuse_row(sent)).has_full_text
    assert not only(LANGFUSE, langfuse_row(cut)).has_full_text


def test_items_of_the_responses_api_stay_items() -> None:
    """A list of items, calls and their outputs among them, has the segments of a Responses body."""
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "content": [], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    expected = parse_bodies({"model": "gpt-5.1", "input": items})[0].segments

    assert only(LANGFUSE, langfuse_row(BODY, input=json.dumps(items))).segments == expected
    assert only(LANGSMITH, run_of(BODY, {"input": items})).segments == expected


@pytest.mark.parametrize(
    ("name", "model", "provider"),
    [
        ("hosted_vllm", "qwen3", "vllm"),
        ("ANTHROPIC", None, "anthropic"),
        ("aws.bedrock", "us.anthropic.claude-sonnet-4-5", "anthropic"),
        ("vertex_ai", "claude-opus-4-1", "anthropic"),
        ("vertex_ai", "gemini-3-pro", "gemini"),
        ("azure", "gpt-5.1", "openai"),
        ("openai", "gpt-oss-deepseek", "openai"),
        ("openrouter", "deepseek/deepseek-v4", "deepseek"),
        ("xai", "grok-5", None),
    ],
)
def test_providers_have_one_name(name: str, model: str | None, provider: str | None) -> None:
    """A gateway's name for a vendor is mapped to the vendor whose cache rules hold."""
    assert provider_of_name(name, model) == provider


@pytest.mark.parametrize(
    ("url", "model"),
    [
        ("https://generativelanguage.googleapis.com/v1beta/models/gemini-3-pro:generateContent?key=k",
         "gemini-3-pro"),
        ("https://x-aiplatform.googleapis.com/v1/publishers/google/models/gemini-3:streamGenerateContent",
         "gemini-3"),
    ],
)  # fmt: skip
def test_the_model_of_a_path_is_read(url: str, model: str) -> None:
    """Gemini's bodies name no model: it is in the URL."""
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}

    request = only(HAR, har_entry(body, {"usageMetadata": {"promptTokenCount": 7}}, url))

    assert (request.model, request.provider) == (model, "gemini")
    assert request.segments[0].text == model
    assert request.segments[-1].text == "hi"
    assert (request.usage.num_input, request.usage.num_read) == (7, None)


def test_bedrocks_path_names_the_model() -> None:
    """A body of Anthropic's that was sent to Bedrock is read with the model of its path."""
    url = (
        "https://bedrock-runtime.us-east-1.amazonaws.com/model/"
        "us.anthropic.claude-sonnet-4-5-20250929-v1%3A0/invoke"
    )
    body = {**CLAUDE, "anthropic_version": "bedrock-2023-05-31"}
    del body["model"]

    request = only(HAR, har_entry(body, anthropic_response(), url))

    assert request.model == "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
    assert request.provider == "anthropic"


def test_values_of_parquet_are_read() -> None:
    """Parquet, Langfuse's default, has points in time for texts and lists of pairs for objects."""
    row = langfuse_row(BODY) | {
        "start_time": dt.datetime(2025, 11, 24, 16, 0, 0, 250000),  # noqa: DTZ001 - as Parquet has it
        "end_time": dt.datetime(2025, 11, 24, 16, 0, 2, 500000, tzinfo=dt.UTC),
        "completion_start_time": None,
        "usage_details": [("input", 500), ("input_cached_tokens", 1500), ("output", 5)],
    }

    request = only(LANGFUSE, row)

    assert (request.start_s, request.first_output_s, request.end_s) == (START_S, None, END_S)
    assert (request.usage.num_input, request.usage.num_read) == (2000, 1500)
