"""A batch outlives SIGKILL: every request has one result, with the bits of a direct answer."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import START_S, Running, start_server

CHAT = "/v1/chat/completions"
NUM_LINES, NUM_PREFIXES = 20, 4


def body_of(number: int) -> dict[str, Any]:
    city = f"City {number % NUM_PREFIXES} has a river, a bridge and a market. " * 4
    return {
        "model": "ramify-tiny",
        "messages": [
            {"role": "system", "content": city},
            {"role": "user", "content": f"Who lives in house {number}?"},
        ],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }


def num_results(folder: Path) -> int:
    files = [path.read_bytes() for path in folder.glob("*/file-*")]
    return sum(data.count(b'"batch_req_') for data in files)


def until(reached: Any) -> None:
    deadline = time.monotonic() + START_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(folder: Path, number: int) -> Running:
    return start_server(
        folder / f"log{number}", "--batch-dir", str(folder / "batches"), "--max-num-seqs", "8"
    )


def stop(server: Running) -> None:
    for client in server.clients.values():
        client.close()
    server.process.kill()
    server.process.wait()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_batch_goes_on_after_its_server_has_gone(tmp_path: Path, name: str) -> None:
    """A batch has one result for each line, equal to a direct answer, after its server was killed."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body_of(number)}
        for number in range(NUM_LINES)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    server = start(tmp_path, 0)
    client = server.openai()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until(lambda: num_results(tmp_path / "batches") >= 4)
    server.process.send_signal(signal.Signals[name])
    server.process.wait(60)
    assert num_results(tmp_path / "batches") < NUM_LINES
    stop(server)
    server = start(tmp_path, 1)
    try:
        client = server.openai()
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts.completed == NUM_LINES
        answers = [
            json.loads(text)
            for text in client.files.content(ended.output_file_id).text.splitlines()
        ]
        assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(NUM_LINES))
        for answer in answers:
            direct = client.chat.completions.create(**body_of(int(answer["custom_id"])))
            assert answer["response"]["body"]["choices"] == direct.to_dict()["choices"]
    finally:
        stop(server)
