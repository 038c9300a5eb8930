"""Batches: requests and results of several files joined by `custom_id`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def openai_request(custom_id: str) -> dict[str, Any]:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def openai_result(custom_id: str, num_input: int, status: int = 200) -> dict[str, Any]:
    usage = {"prompt_tokens": num_input, "prompt_tokens_details": {"cached_tokens": 1}}
    body = {"id": f"chatcmpl-{custom_id}", "created": 1764000000, "usage": usage, "choices": []}
    response = {"status_code": status, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": None}


@pytest.mark.parametrize("results_first", [False, True])
def test_results_are_joined_in_any_order(tmp_path: Path, results_first: bool) -> None:
    """Requests come in the order of the input file, with the usage of their result and no time."""
    files = [
        write(tmp_path / "in.jsonl", openai_request("a"), openai_request("b")),
        write(tmp_path / "out.jsonl", openai_result("b", 22), openai_result("a", 11)),
    ]
    if results_first:
        files.reverse()

    requests = list(read_log(files))

    assert [(item.line, item.segments[-1].text, item.usage.num_input) for item in requests] == [
        (1, "a", 11),
        (2, "b", 22),
    ]
    assert all(item.is_batch and item.start_s is None for item in requests)
    assert all(item.file.endswith("in.jsonl") for item in requests)


def test_failed_and_missing_results(tmp_path: Path) -> None:
    """A failed entry is no request, an entry without a result is, a result alone is counted."""
    quality = ReadQuality()
    files = [
        write(tmp_path / "in.jsonl", *(openai_request(name) for name in "abc")),
        write(
            tmp_path / "out.jsonl",
            openai_result("a", 1, status=400),
            {"custom_id": "b", "response": None, "error": {"code": "expired"}},
            openai_result("z", 1),
        ),
    ]

    requests = list(read_log(files, quality=quality))

    assert [request.line for request in requests] == [3]
    assert quality.skipped == {"failed attempt": 2, "batch result without its request": 1}
    assert quality.notes["batch request without its result"] == 1


def test_message_batches_of_anthropic(tmp_path: Path) -> None:
    """`params` is the body, `result.message` the response; other results are failures."""
    params = {
        "model": "claude-haiku-4-5",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "q"}],
    }
    usage = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 3}
    message = {"type": "message", "id": "msg_1", "model": "claude-haiku-4-5", "usage": usage}
    files = [
        write(
            tmp_path / "in.jsonl",
            {"custom_id": "a", "params": params},
            {"custom_id": "b", "params": params},
        ),
        write(
            tmp_path / "out.jsonl",
            {"custom_id": "b", "result": {"type": "expired"}},
            {"custom_id": "a", "result": {"type": "succeeded", "message": message}},
        ),
    ]

    (request,) = read_log(files)

    assert (request.line, request.api, request.provider) == (1, "anthropic-messages", "anthropic")
    assert (request.usage.num_input, request.usage.num_read) == (6, 2)
