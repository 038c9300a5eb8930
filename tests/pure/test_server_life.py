"""Readiness, drain and death of a server; clients that disconnect; overload."""

import asyncio
import contextlib
import json
import logging
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from ramify.server.http.uvicorn_server import TimeoutProtocol
from tests.pure.live_server import Live, events, live, until

CHAT = {"messages": [{"role": "user", "content": "Who lives in Rome?"}], "max_tokens": 64}
MESSAGE = CHAT | {"model": "fake"}
STREAMS = [
    ("/v1/completions", {"prompt": "Who lives in Rome?", "max_tokens": 64}),
    ("/v1/completions", {"prompt": ["Who?", "What is it?", "Where?"], "max_tokens": 64}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 3}),
    ("/v1/responses", {"input": "Who lives in Rome?", "max_output_tokens": 64}),
    ("/v1/messages", MESSAGE),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with live() as running:
        yield running


def in_thread(
    pool: ThreadPoolExecutor, running: Live, **fields: object
) -> "Future[httpx.Response]":
    return pool.submit(running.ask, **fields)  # type: ignore[arg-type]


def num_live(running: Live) -> int:
    return int(running.look(lambda core: len(core.live)))


def is_readable(client: socket.socket) -> bool:
    """Whether the server has answered, now or within the time in which it would."""
    return bool(select.select([client], (), (), 0.5)[0])


def test_it_is_ready_and_alive(shared: Live) -> None:
    """All health paths return 200 and the engine's state; /version the version."""
    for path in ("/livez", "/readyz", "/health", "/ping"):
        answer = shared.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert answer.json()["engine"] == "ready"
    assert set(shared.get("/version").json()) == {"version"}


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_ends_its_request(
    shared: Live, path: str, body: dict[str, object], stream: bool, has_begun: bool
) -> None:
    """Within a step, streaming or not, before the first token or after it; nothing is left."""
    shared.until_idle()
    steps = shared.look(lambda core: core.num_steps)
    gate, num_allowed = shared.gate, 0
    gate.is_open = False
    body = body | {"stream": stream}
    request = httpx.Request("POST", shared.url + path, json=body)
    with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1]))) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n\r\n"
        client.sendall(head.encode() + request.content)
        assert gate.reached.acquire(timeout=30)
        # Of several prompts some may reach the engine when its first step has begun: a stream begins
        # with the first token of the last.
        while has_begun and not (num_allowed and (not stream or is_readable(client))):
            gate.allowed.release()
            num_allowed += 1
            assert gate.reached.acquire(timeout=30)
        if has_begun and stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: not shared.server.service.quotas.num_live)  # while the engine is still held up

    gate.open()
    shared.until_idle()

    assert shared.look(lambda core: core.num_steps) - steps <= num_allowed + 3
    while gate.reached.acquire(blocking=False):
        pass
    while gate.allowed.acquire(blocking=False):
        pass


def test_a_drain_answers_what_is_live_and_refuses_what_is_new() -> None:
    """At once 503 from /readyz, and for new requests in both APIs; then live ones end, then the server."""
    with live() as running, ThreadPoolExecutor(2) as pool:
        running.gate.is_open = False
        waiting = in_thread(pool, running)
        running.gate.reached.acquire(timeout=30)

        running.listener.handle_exit(signal.SIGTERM, None)

        ready = running.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert running.get("/livez").status_code == 200
        rejected = running.ask()
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "draining")
        assert int(rejected.headers["retry-after"]) > 0
        other = running.post("/v1/messages", MESSAGE)
        assert (other.status_code, other.json()["error"]["type"]) == (503, "overloaded_error")
        assert running.get("/metrics").status_code == 200
        running.gate.open()
        assert waiting.result(30).json()["choices"][0]["finish_reason"] == "length"
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert not running.listener.is_forced


def test_a_stream_goes_on_through_a_drain() -> None:
    """It is sent up to its last event."""
    with live() as running:
        running.gate.is_open = False
        running.gate.allowed.release()
        body = {"prompt": "Who?", "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as answer:
            stream = events(answer)
            next(stream)
            running.listener.handle_exit(signal.SIGTERM, None)
            running.gate.open()
            assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"
        running.thread.join(30)
        assert not running.thread.is_alive()


def test_a_drain_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """After `drain_s`, live requests are aborted: their streams end with a finish reason."""
    with live(drain_s=0.3, next_token=slowly) as running:
        body = {"prompt": "Who?", "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as answer:
            stream = events(answer)
            next(stream)
            with caplog.at_level(logging.WARNING):
                running.listener.handle_exit(signal.SIGTERM, None)
                last = list(stream)[-1]
        running.thread.join(30)
        assert not running.thread.is_alive()
    assert last["choices"][0]["finish_reason"] == "abort"
    assert "cut short: 1 request" in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", MESSAGE, "abort"),
        ("/v1/messages", MESSAGE, "pause_turn"),
        ("/v1/responses", {"input": "Who?", "max_output_tokens": 2000}, "abort"),
    ],
)
def test_an_answer_that_a_shutdown_cuts_says_so(
    path: str, body: dict[str, object], reason: str
) -> None:
    """In every API, not as if its own limit had been reached."""
    with live(drain_s=0.2, next_token=slowly) as running, ThreadPoolExecutor(1) as pool:
        request = body | ({} if "input" in body else {"max_tokens": 2000})
        waiting = pool.submit(running.post, path, request)
        until(lambda: num_live(running) == 1)
        running.listener.handle_exit(signal.SIGTERM, None)
        answer = waiting.result(30).json()
        running.thread.join(30)
    choice = (answer.get("choices") or [answer])[0]
    details = answer.get("incomplete_details") or {}
    assert reason in (
        choice.get("finish_reason"),
        choice.get("stop_reason"),
        details.get("reason"),
    ), answer


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_leaves_while_sending_is_499(
    shared: Live, caplog: pytest.LogCaptureFixture, is_streaming: bool
) -> None:
    """While it sends its body, or while a stream is sent to it: in the metrics, without a traceback."""
    name = 'ramify_http_responses_total{route="/v1/completions",status="499"}'
    before = shared.metrics().get(name, 0)
    body = b'{"prompt":"Who?","max_tokens":2000,"stream":true}'
    length = len(body) + (0 if is_streaming else 5)
    port = int(shared.url.rsplit(":", 1)[1])
    with (
        caplog.at_level(logging.INFO),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode() + body)
        if is_streaming:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
        until(lambda: shared.metrics().get(name, 0) == before + 1)
    shared.until_idle()
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    if not is_streaming:
        assert "status=499" in caplog.text


def slowly(context: object) -> int:
    time.sleep(0.01)
    return 300


def test_a_second_signal_does_not_wait() -> None:
    """The server stops although a request is live."""
    with live() as running, ThreadPoolExecutor(1) as pool:
        running.gate.is_open = False
        waiting = in_thread(pool, running)
        running.gate.reached.acquire(timeout=30)
        for _ in range(2):
            running.listener.handle_exit(signal.SIGINT, None)
        running.thread.join(30)
        assert not running.thread.is_alive()
        assert running.listener.is_forced
        running.gate.open()
        with contextlib.suppress(httpx.HTTPError):
            assert waiting.result(30).status_code == 500


def test_too_many_requests_are_told_when_to_come_back() -> None:
    """503 with Retry-After; queued requests are answered."""
    with live(max_num_seqs=1, max_waiting=2) as running, ThreadPoolExecutor(8) as pool:
        running.gate.is_open = False
        futures = [in_thread(pool, running, max_tokens=64)]
        running.gate.reached.acquire(timeout=30)
        futures += [in_thread(pool, running) for _ in range(5)]
        until(lambda: len(running.llm._engine_thread._commands) == 5)
        running.gate.open()
        answers = [future.result(30) for future in futures]

        rejected = [answer for answer in answers if answer.status_code != 200]
        assert len(rejected) == 3
        for answer in rejected:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert int(answer.headers["retry-after"]) > 0
        running.until_idle()


def test_a_dead_engine_is_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """503 from /readyz and /livez; requests get an error body that does not quote the exception."""
    with live(fail_at=[0], error=Bug("secret words")) as running:
        with caplog.at_level(logging.CRITICAL):
            answers = [running.ask(), running.ask(), running.get("/v1/cache")]
        for answer in answers:
            assert answer.status_code in (500, 503)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "secret" not in answer.text
        until(lambda: running.get("/readyz").status_code == 503)
        assert running.get("/readyz").json()["status"] == "engine stopped"
        assert running.get("/livez").status_code == 503
        assert running.get("/metrics").status_code == 200


class Bug(BaseException):
    """Ends the engine; an `Exception` in a step would end only its requests."""


def test_a_stuck_engine_is_not_ready() -> None:
    """A step longer than `step_timeout_s` makes /readyz 503 until it ends."""
    with live(step_timeout_s=0.1) as running, ThreadPoolExecutor(1) as pool:
        running.gate.is_open = False
        waiting = in_thread(pool, running)
        running.gate.reached.acquire(timeout=30)
        until(lambda: running.get("/readyz").json()["status"] == "engine stuck")
        assert running.get("/health").json()["busy"] is True
        running.gate.open()
        assert waiting.result(30).status_code == 200
        assert running.get("/readyz").status_code == 200


class Impatient(TimeoutProtocol):
    stall_s = 0.2


def test_a_reader_that_takes_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Its request is aborted, and others are answered meanwhile."""
    with live(protocol=Impatient) as running:
        body = json.dumps(
            CHAT
            | {"max_tokens": 400, "n": 16, "stream": True, "logprobs": True}
            | {"top_logprobs": 20}
        ).encode()  # many megabytes, more than the socket buffers hold
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with caplog.at_level(logging.WARNING), client:
            client.sendall(head.encode() + body)
            assert running.ask().status_code == 200
            until(lambda: "took nothing" in caplog.text)
            running.until_idle()


@pytest.mark.parametrize(
    ("path", "fields", "ping", "last"),
    [
        ("/v1/completions", {"prompt": "Who?"}, [": ping", ""], "data: [DONE]"),
        (
            "/v1/messages",
            {"model": "fake", "messages": [{"role": "user", "content": "Who?"}]},
            ["event: ping", 'data: {"type":"ping"}', "event: ping"],
            'data: {"type":"message_stop"}',
        ),
    ],
)
def test_a_silent_stream_is_kept_open(
    path: str, fields: dict[str, Any], ping: list[str], last: str
) -> None:
    """By pings while the engine computes: SSE comments, or Anthropic's event."""
    with live() as running:
        running.server.ping_s = 0.05
        running.gate.is_open = False
        running.gate.allowed.release()
        body = fields | {"max_tokens": 3, "stream": True}
        with httpx.stream("POST", running.url + path, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            for expected in ping:
                next(line for line in lines if line == expected)
            running.gate.open()
            assert list(lines)[-2] == last


def test_asyncio_has_no_task_left(shared: Live) -> None:
    """After the requests of this module, only the server's own tasks run."""
    shared.until_idle()
    loop = asyncio.run_coroutine_threadsafe(tasks(), shared.loop)
    assert loop.result(30) <= {
        "serve",
        "run",
        "_measure_loop_delay",
        "_log_load",
        "main",
        "tasks",
        "startup",
    }


async def tasks() -> set[str]:
    return {task.get_coro().__name__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
