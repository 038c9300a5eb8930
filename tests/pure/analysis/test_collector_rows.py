"""Rows of collectors that look like others, are not as documented, or hold what no log has."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from ramify.analysis.files.containers import MIN_PIECE_BYTES, unwrapped
from ramify.analysis.files.json_documents import RawValue
from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.engines.python_literals import json_of_literal
from ramify.analysis.records import LoggedRequest

LINE = (
    "INFO 02-13 11:33:33 [logger.py:39] Received request cmpl-1: prompt: 'hi there', params: "
    "SamplingParams(n=1), prompt_token_ids: None, lora_request: None."
)
TIME = "2026-02-13T11:33:33.123456789Z"
MESSAGES = [{"role": "user", "content": "Where is my parcel?"}]


def _read(path: Path, rows: list[dict[str, Any]]) -> tuple[list[LoggedRequest], ReadQuality]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quality = ReadQuality()
    return list(read_log(path, quality=quality)), quality


@pytest.mark.parametrize(
    "beside",
    [
        {"log": "a note", "stream": True},
        {"line": "a note", "labels": ["a"]},
        {"jsonPayload": {"level": "info"}, "timestamp": TIME},
    ],
)
def test_a_request_with_a_collectors_keys_is_a_request(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    """The row itself is a body: it is not given up for the line beside it."""
    row = {"model": "gpt-5.1", "messages": MESSAGES, **beside}

    requests, _ = _read(tmp_path / "log.jsonl", [row] * 3)

    assert [request.segments[-1].text for request in requests] == ["Where is my parcel?"] * 3


def test_whole_lines_without_an_end_are_not_joined(tmp_path: Path) -> None:
    """Collectors may take off the end of a line, by which Docker tells a piece."""
    row = {"log": LINE, "stream": "stderr", "time": TIME}

    requests, quality = _read(tmp_path / "server.log", [row] * 3)

    assert [request.segments[0].text for request in requests] == ["hi there"] * 3
    assert not quality.bad_lines


def test_pieces_of_two_pods_are_not_mixed() -> None:
    """Lines of another pod may stand between the pieces of a line."""
    pods = ["a", "b"] * 2
    rows = [
        {"log": f"{pod}{at}", "stream": "stdout", "logtag": "PPFF"[at], "kubernetes": {"pod_name": pod}}
        for at, pod in enumerate(pods)
    ]  # fmt: skip

    values = unwrapped((RawValue(1, row) for row in rows), lambda value: isinstance(value, str))

    assert [value.value for value in values] == ["a0a2", "b1b3"]


def test_a_line_without_its_last_piece_is_bounded_too() -> None:
    """An error, as if the last piece were there."""
    rows = [{"log": "x" * MIN_PIECE_BYTES, "stream": "stdout"}] * 3

    [value] = unwrapped(
        (RawValue(1, row) for row in rows), lambda _: False, max_chars=MIN_PIECE_BYTES
    )

    assert value.error == "longer than 16,384 characters in pieces"


def test_a_printed_dict_is_another_line_of_the_server(tmp_path: Path) -> None:
    """A line that begins with a brace and is no JSON text is no bad line."""
    lines = [LINE, "{'a': 1}", LINE]
    rows = [{"log": line + "\n", "stream": "stderr", "time": TIME} for line in lines]

    requests, quality = _read(tmp_path / "server.log", rows)

    assert len(requests) == 2 and not quality.bad_lines


@pytest.mark.parametrize("result", [5, "text", [5], [{"values": 5}], [{"values": [["1", None]]}]])
def test_a_strange_answer_of_loki_is_no_request(tmp_path: Path, result: object) -> None:
    """Of other types than documented: nothing is read, and nothing fails."""
    row = {"status": "success", "data": {"resultType": "streams", "result": result}}

    assert _read(tmp_path / "loki.json", [row])[0] == []


@pytest.mark.parametrize("events", [5, True, "text", {"a": 1}, [5]])
def test_strange_events_of_a_span_are_no_messages(tmp_path: Path, events: object) -> None:
    """The request is read without a prompt."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-5.1",
        "gen_ai.usage.input_tokens": 100,
        "events": events,
    }
    row = {"trace_id": "a" * 32, "span_id": "b" * 16, "name": "chat", "attributes": attributes}

    [request], _ = _read(tmp_path / "spans.jsonl", [row])

    assert request.usage.num_input == 100 and not request.has_full_text


def test_a_span_of_an_agents_task_has_many_requests(tmp_path: Path) -> None:
    """Events of the same span are requests, each with its own counts."""
    rows = [
        {
            "timeUnixNano": str(1_770_000_000_000_000_000 + number),
            "traceId": "a" * 32,
            "spanId": "b" * 16,
            "eventName": "claude_code.api_request",
            "attributes": [
                {"key": "model", "value": {"stringValue": "claude-sonnet-4-5"}},
                {"key": "input_tokens", "value": {"intValue": str(number)}},
                {"key": "cache_read_tokens", "value": {"intValue": "0"}},
                {"key": "cache_creation_tokens", "value": {"intValue": "0"}},
            ],
        }
        for number in range(1, 6)
    ]
    export = {"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]}

    requests, quality = _read(tmp_path / "telemetry.jsonl", [export])

    assert [request.usage.num_input for request in requests] == [1, 2, 3, 4, 5]
    assert not quality.skipped


def test_a_literal_that_does_not_end_is_given_up_in_one_pass() -> None:
    """A cut text with many escaped quotes, of which each could begin a string."""
    start = monotonic()

    assert json_of_literal("{'a" + "\\'" * 200_000) is None
    assert monotonic() - start < 2
