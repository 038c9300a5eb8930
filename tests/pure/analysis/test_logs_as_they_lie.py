"""Logs as gateways, tracers, agents and collectors really write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.analysis.files.containers import unwrapped
from ramify.analysis.files.json_documents import RawValue
from ramify.analysis.linting import lint
from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.bodies.usage import parse_usage
from ramify.analysis.readers.bodies.wrapped_bodies import BODIES
from ramify.analysis.readers.gateways.langfuse import LANGFUSE
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.readers.otel.otlp_rows import OTEL
from ramify.analysis.records import LoggedRequest, Usage
from ramify.analysis.report.analyze import analyze, read_corpus
from tests.pure.analysis.log_rows import read_rows

CASES = Path(__file__).with_name("case_logs")
TIME = "2026-02-13T11:33:33.123456789Z"
START_S = 1_770_982_413.123456


def read_case(path: Path) -> tuple[list[LoggedRequest], ReadQuality]:
    quality = ReadQuality()
    return list(read_log(path, quality=quality)), quality


USAGES = {
    # input has the writes, not the reads, in it; the total says so.
    "langfuse_of_litellm.jsonl": Usage(10_100, 8000, 2000, None, 100),
    # gen_ai.usage.* without cached tokens, ai.usage.* with them.
    "ai_sdk_span.jsonl": Usage(2600, 2048, None, None, 40),
    "pydantic_ai_span.jsonl": Usage(2600, 2048, None, None, 40),
    "claude_code_span.jsonl": Usage(40_912, 40_000, 900, None, 300),
    "langfuse_pandas.csv": Usage(2600, 2048, None, None, 40),
    "bedrock_invocation.jsonl": Usage(1203, 1000, 200, None, 5),
}


@pytest.mark.parametrize("name", USAGES)
def test_counts_are_those_of_the_bill(name: str) -> None:
    """Each in one meaning, whatever the spelling; nothing twice."""
    requests, quality = read_case(CASES / name)

    assert {request.usage for request in requests} == {USAGES[name]}
    assert not quality.bad_lines and not quality.skipped


@pytest.mark.parametrize(
    ("counts", "num_input"),
    [
        ({"input": 100, "output": 5, "total": 105}, 100),
        ({"input": 100, "output": 5, "total": 185, "cache_read_input_tokens": 80}, 180),
        ({"input": 100, "output": 5, "total": 105, "cache_read_input_tokens": 80}, 100),
        ({"input": 100, "output": 5, "cache_read_input_tokens": 80}, 180),
        (
            {
                "input": 100, "output": 5, "total": 255, "cache_read_input_tokens": 80,
                "cache_creation_input_tokens": 70,
            },
            250,
        ),
        (
            {
                "input": 100, "output": 5, "total": 185, "cache_read_input_tokens": 80,
                "cache_creation_input_tokens": 70,
            },
            180,
        ),
    ],
)  # fmt: skip
def test_the_total_of_langfuse_tells_what_the_input_holds(
    counts: dict[str, int], num_input: int
) -> None:
    """All tokens, those not read, or those neither read nor written; without a total the last."""
    row = {"id": "o", "trace_id": "t", "type": "GENERATION", "start_time": TIME, "input": "[]"}

    [request], _ = read_rows(LANGFUSE, [row | {"usage_details": counts}])

    assert request.usage.num_input == num_input


def test_literals_of_python_are_prompts_and_counts() -> None:
    """A table of pandas has `repr` where others have JSON."""
    first, second = read_case(CASES / "langfuse_pandas.csv")[0]

    texts = ["You are a shop assistant.", "Where is my parcel?"]
    assert [segment.text for segment in first.segments[1:]] == texts
    assert [segment.text for segment in second.segments[1:3]] == texts
    assert [segment.text for segment in first.output] == ["It's on its way"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': None, 'b': [True, False], 'c': ('x', 1.5)}", {"a": None, "b": [True, False], "c": ["x", 1.5]}),
        ("""[{'text': "It's \\"None\\" (really)\\n", 'n': -1}]""", [{"text": 'It\'s "None" (really)\n', "n": -1}]),
        ("{'at': datetime.datetime(2026, 1, 1)}", "{'at': datetime.datetime(2026, 1, 1)}"),
        ("{'cut': 'of", "{'cut': 'of"),
        ("['" + "[" * 10_000, "['" + "[" * 10_000),
    ],
)  # fmt: skip
def test_literals_are_read_without_being_run(text: str, value: Any) -> None:
    """Strings, numbers, None, lists, tuples and dicts; a call or a cut literal stays a text."""
    assert decode_nested(text) == value
    assert is_cut_json(text) is isinstance(value, str)


def test_the_spans_of_pydantic_ai_may_list_their_events() -> None:
    """The prompt is a list in the attribute `events`; the answer among them is no part of it."""
    events = [
        {"event.name": "gen_ai.system.message", "role": "system", "content": "You are."},
        {"event.name": "gen_ai.user.message", "role": "user", "content": "Where is it?"},
        {"event.name": "gen_ai.choice", "message": {"role": "assistant", "content": "There."}},
    ]
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-5.1",
        "events": json.dumps(events), "gen_ai.usage.details.cache_write_tokens": 7,
        "gen_ai.usage.input_tokens": 20,
    }  # fmt: skip

    [request], _ = read_rows(OTEL, [attributes])

    assert [segment.text for segment in request.segments[1:]] == ["You are.", "Where is it?"]
    assert request.has_full_text and request.usage.num_written == 7


AGENT_EVENTS = {
    "claude": (
        {
            "event.name": "api_request", "model": "claude-sonnet-4-6", "session.id": "s", "input_tokens": 12,
            "output_tokens": 300, "cache_read_tokens": 40_000, "cache_creation_tokens": 900, "duration_ms": 5000,
        },
        Usage(40_912, 40_000, 900, None, 300),
    ),
    "codex": (
        {
            "event.name": "codex.sse_event", "event.kind": "response.completed", "model": "gpt-5.1-codex",
            "conversation.id": "s", "input_token_count": 9000, "cached_token_count": 8000,
            "output_token_count": 70, "duration_ms": 5000,
        },
        Usage(9000, 8000, None, None, 70),
    ),
    "gemini": (
        {
            "event.name": "gemini_cli.api_response", "model": "gemini-3-pro", "session.id": "s",
            "input_token_count": 9000, "cached_content_token_count": 8000, "output_token_count": 70,
            "duration_ms": 5000,
        },
        Usage(9000, 8000, None, None, 70),
    ),
}  # fmt: skip


def _log_record(attributes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    pairs = [
        {"key": key, "value": {"intValue" if isinstance(value, int) else "stringValue": value}}
        for key, value in attributes.items()
    ]
    record = {"timeUnixNano": "1764000005000000000", "attributes": pairs} | fields
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}


@pytest.mark.parametrize("agent", AGENT_EVENTS)
def test_telemetry_of_coding_agents_has_a_request_an_event(agent: str) -> None:
    """Counts, model, session and times, at the end of the request; other events are none."""
    attributes, usage = AGENT_EVENTS[agent]
    other = _log_record({"event.name": "tool_result", "session.id": "s"})

    [request], quality = read_rows(OTEL, [_log_record(attributes), other])

    assert request.usage == usage
    assert (request.start_s, request.end_s) == (1_764_000_000.0, 1_764_000_005.0)
    assert (request.model, request.conversation) == (attributes["model"], "s")
    assert sum(quality.skipped.values()) == 1


def test_a_span_and_the_event_in_it_are_one_request() -> None:
    """Claude Code exports both: the second is logged twice, in either order."""
    [line] = (CASES / "claude_code_span.jsonl").read_text().splitlines()
    ids = {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174"}
    rows = [json.loads(line), _log_record(AGENT_EVENTS["claude"][0], **ids)]

    for order in (rows, rows[::-1]):
        requests, _ = read_rows(OTEL, order)

        assert [request.usage.num_input for request in requests] == [40_912]


def test_bedrock_stores_large_bodies_elsewhere() -> None:
    """Without a body the counts remain; a failed invocation is no request."""
    [line] = (CASES / "bedrock_invocation.jsonl").read_text().splitlines()
    row = json.loads(line)
    del row["input"]["inputBodyJson"], row["output"]["outputBodyJson"]
    row["input"]["inputBodyS3Path"] = row["output"]["outputBodyS3Path"] = "s3://bucket/key"
    failed = row | {"errorCode": "ThrottlingException", "output": {}}

    [whole], _ = read_rows(BODIES, [json.loads(line)])
    [request], quality = read_rows(BODIES, [row, failed])

    assert [segment.text for segment in whole.segments[1:]] == ["You are.", "hi"]
    assert whole.provider == request.provider == "bedrock"
    assert request.usage == whole.usage and not request.has_full_text
    assert request.model == "anthropic.claude-sonnet-4-6-v1:0"
    assert quality.skipped == {"failed attempt": 1}


# Lines of a server's log in what collectors write around them


LONG = "Where is my parcel? " * 3000
SERVER_LINES = (
    ("DEBUG 02-13 11:33:33 [logger.py:45] Request cmpl-1 details: prompt: 'hi there', prompt_token_ids: "
    "[1, 2, 3], prompt_embeds shape: None."),
    "INFO 02-13 11:33:33 [logger.py:49] Received request cmpl-1: params: SamplingParams(n=1), lora_request: None.",
    "INFO 02-13 11:33:33 [async_llm.py:382] Added request cmpl-1-a8a65d16.",
    (f"INFO 02-13 11:33:33 [logger.py:39] Received request cmpl-2: prompt: '{LONG}', params: "
    "SamplingParams(n=1), prompt_token_ids: None, lora_request: None."),
    ('{"event": "request.finished", "rid": "r-1", "obj": {"text": "hello"}, "out": {"meta_info": '
    '{"prompt_tokens": 8, "cached_tokens": 4, "completion_tokens": 1}}}'),
)  # fmt: skip
PIECE = 16_384


def _pieces(line: str) -> list[str]:
    return [line[at : at + PIECE] for at in range(0, len(line), PIECE)]


def _docker() -> str:
    return "".join(
        json.dumps({"log": piece, "stream": "stderr", "time": TIME}) + "\n"
        for line in SERVER_LINES
        for piece in _pieces(line + "\n")
    )


def _cri() -> str:
    out = ""
    for line in SERVER_LINES:
        *heads, last = _pieces(line)
        out += "".join(f"{TIME} stderr P {piece}\n" for piece in heads)
        out += f"{TIME} stderr F {last}\n"
    return out


def _fluent_bit() -> str:
    rows = (
        {"log": line, "stream": "stderr", "@timestamp": TIME, "kubernetes": {}}
        for line in SERVER_LINES
    )
    return "".join(json.dumps(row) + "\n" for row in rows)  # fmt: skip


def _logcli() -> str:
    rows = ({"labels": {"app": "v"}, "line": line, "timestamp": TIME} for line in SERVER_LINES)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _loki() -> str:
    """The newest line first, as Loki answers."""
    start = 1_770_982_413_123_456_789
    values = [[str(start + at), line] for at, line in enumerate(SERVER_LINES)]
    result = [{"stream": {"app": "v"}, "values": values[::-1]}]
    return json.dumps({"status": "success", "data": {"resultType": "streams", "result": result}})


def _cloud_logging() -> str:
    rows = [{"textPayload": line, "timestamp": TIME, "resource": {}} for line in SERVER_LINES[:-1]]
    rows.append({"jsonPayload": json.loads(SERVER_LINES[-1]), "timestamp": TIME, "resource": {}})
    return json.dumps(rows, indent=2)


def _cloud_watch() -> str:
    rows = [
        {"timestamp": 1_770_982_413_123, "message": line, "ingestionTime": 1}
        for line in SERVER_LINES
    ]
    return json.dumps({"events": rows, "searchedLogStreams": []})  # fmt: skip


@pytest.mark.parametrize(
    "wrapped", [_docker, _cri, _fluent_bit, _logcli, _loki, _cloud_logging, _cloud_watch]
)
def test_collectors_wrap_lines_of_server_logs(tmp_path: Path, wrapped: Callable[[], str]) -> None:
    """Whole lines and joined pieces, text and JSON, with the time of the collector."""
    path = tmp_path / "collected.log"
    path.write_text(wrapped())

    requests, quality = read_case(path)

    assert [request.provider for request in requests] == ["vllm", "vllm", "sglang"]
    assert [request.segments[0].text for request in requests] == ["hi there", LONG, "hello"]
    assert requests[0].start_s == pytest.approx(START_S, abs=0.001)
    assert requests[2].end_s == pytest.approx(START_S, abs=0.001)
    assert not quality.bad_lines
    assert quality.skipped.total() == 1


def test_the_pieces_of_a_line_are_bounded() -> None:
    """A line longer than the limit is an error at its first piece; the lines around it are read."""
    rows = [
        RawValue(number, json.loads(line)) for number, line in enumerate(_docker().splitlines(), 1)
    ]

    def is_row(value: Any) -> bool:
        return isinstance(value, dict) and "message" in value

    values = list(unwrapped(rows, is_row, max_chars=3 * PIECE))

    assert [value.line for value in values] == [1, 2, 3, 4, 8]
    assert [value.error is None for value in values] == [True, True, True, False, True]
    assert values[3].error == "longer than 49,152 characters in pieces"


# Rows without tokens


def test_requests_without_tokens_are_counted_and_named(tmp_path: Path) -> None:
    """Neither prompt nor usage: the report and `lint` say how many, and on which lines."""
    row = {
        "call_type": "acompletion",
        "status": "success",
        "startTime": 1.0,
        "model": "gpt-5.1",
        "messages": {},
    }
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row | {"id": f"r{n}"}) + "\n" for n in range(7)))  # fmt: skip
    quality = ReadQuality()

    analysis = analyze(read_corpus(path, quality), title="log", quality=quality)

    [warning] = [text for text in analysis.warnings if "without tokens" in text]
    assert warning.startswith("7 requests without tokens: ")
    assert f"({path}:1, {path}:2, " in warning and warning.endswith(" …).")
    assert lint(path).quality["num_without_tokens"] == 7


def test_absent_counts_stay_unknown() -> None:
    """A spelling that lacks a count adds no zero."""
    usage = parse_usage({"gen_ai.usage.input_tokens": 5})

    assert usage == Usage(num_input=5)
