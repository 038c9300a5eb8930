"""A server whose model two processes share: one is killed in the middle of an answer, and when idle."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Running, start_server

LIMIT_S = 30.0
BODY = {"model": "ramify-tiny", "prompt": "Mara has 14 lamps. " * 8, "max_tokens": 1500}


def post(server: Running, body: dict[str, Any]) -> Any:
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", content, headers)
    return urllib.request.urlopen(request, timeout=LIMIT_S)


def children_of(process: int) -> list[int]:
    """Its ranks: processes that run the module of a rank."""
    ranks = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = re.search(r"^PPid:\s(\d+)$", status.read_text(), re.MULTILINE)
            command = (status.parent / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if parent is not None and int(parent[1]) == process and "rank_process" in command:
            ranks.append(int(status.parent.name))
    return ranks


def refusal(server: Running) -> tuple[int, Message[str, str], Any]:
    """Status, headers and body of the answer to a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, BODY)
    with caught.value as response:
        return response.code, response.headers, json.loads(response.read())


def status_of(server: Running, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=LIMIT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_server_whose_rank_is_killed_says_so(is_busy: bool, tmp_path: Path) -> None:
    """A stream ends with an error; then 503 with `Retry-After`, `/livez` fails, no process is left."""
    server = start_server(tmp_path / "log", "--tensor-parallel-size", "2", "--ops", "torch")
    try:
        [rank] = children_of(server.process.pid)
        if is_busy:
            with post(server, BODY | {"stream": True, "ignore_eos": True}) as stream:
                assert stream.readline().startswith(b"data:")
                os.kill(rank, signal.SIGKILL)
                assert b'"error"' in stream.read()
        else:
            assert status_of(server, "/livez") == 200
            os.kill(rank, signal.SIGKILL)
        until_s = time.monotonic() + LIMIT_S
        while status_of(server, "/livez") == 200:
            assert time.monotonic() < until_s, "the loss of a rank is not seen"
            time.sleep(0.05)

        status, headers, body = refusal(server)

        assert (status, headers["Retry-After"]) == (503, "30")
        assert body["error"]["code"] == "engine_stopped"
        assert not children_of(server.process.pid)
        assert "rank 1 of 2" in server.log
        assert server.stop() == 0
    finally:
        server.process.kill()
