"""A server's life: ready, draining, dead; clients that leave; more requests than there is room for."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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
    with live() as one:
        yield one


def in_thread(pool: ThreadPoolExecutor, one: Live, **fields: object) -> "Future[httpx.Response]":
    return pool.submit(one.ask, **fields)  # type: ignore[arg-type]


def num_live(one: Live) -> int:
    return int(one.look(lambda core: len(core.live)))


def test_it_is_ready_and_alive(shared: Live) -> None:
    """All health paths say so, with the engine's state; the version is told."""
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
    """Within a step, streaming or not, before the first token or after: nothing is left."""
    shared.until_idle()
    steps = shared.look(lambda core: core.num_steps)
    gate = shared.gate
    gate.is_open = False
    body = body | {"stream": stream}
    request = httpx.Request("POST", shared.url + path, json=body)
    with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1]))) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n\r\n"
        client.sendall(head.encode() + request.content)
        gate.reached.acquire(timeout=30)
        if has_begun:
            gate.allowed.release()
            gate.reached.acquire(timeout=30)
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: not shared.server.service.quotas._usage)  # seen while the engine is held up

    gate.open()
    shared.until_idle()

    assert shared.look(lambda core: core.num_steps) - steps <= 4
    while gate.reached.acquire(blocking=False):
        pass
    while gate.allowed.acquire(blocking=False):
        pass


def test_a_drain_answers_what_is_live_and_refuses_what_is_new() -> None:
    """readyz 503 at once, new requests 503 with Retry-After in both envelopes, then the end."""
    with live() as one, ThreadPoolExecutor(2) as pool:
        one.gate.is_open = False
        waiting = in_thread(pool, one)
        one.gate.reached.acquire(timeout=30)

        one.listener.handle_exit(signal.SIGTERM, None)

        ready = one.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert one.get("/livez").status_code == 200
        refused = one.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        other = one.post("/v1/messages", MESSAGE)
        assert (other.status_code, other.json()["error"]["type"]) == (503, "overloaded_error")
        assert one.get("/metrics").status_code == 200
        one.gate.open()
        assert waiting.result(30).json()["choices"][0]["finish_reason"] == "length"
        one.thread.join(30)
        assert not one.thread.is_alive()
        assert not one.listener.is_forced


def test_a_stream_goes_on_through_a_drain() -> None:
    """Up to its end."""
    with live() as one:
        one.gate.is_open = False
        one.gate.allowed.release()
        body = {"prompt": "Who?", "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=30) as answer:
            found = events(answer)
            next(found)
            one.listener.handle_exit(signal.SIGTERM, None)
            one.gate.open()
            assert list(found)[-1]["choices"][0]["finish_reason"] == "length"
        one.thread.join(30)
        assert not one.thread.is_alive()


def test_a_drain_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """What is live after its time is cut short, and told so."""
    with live(drain_s=0.3, next_token=slowly) as one:
        body = {"prompt": "Who?", "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=30) as answer:
            found = events(answer)
            next(found)
            with caplog.at_level(logging.WARNING):
                one.listener.handle_exit(signal.SIGTERM, None)
                last = list(found)[-1]
        one.thread.join(30)
        assert not one.thread.is_alive()
    assert last["choices"][0]["finish_reason"] is not None
    assert "1 requests are cut short" in caplog.text


def slowly(context: object) -> int:
    time.sleep(0.01)
    return 300


def test_a_second_signal_does_not_wait() -> None:
    """It ends with a request live."""
    with live() as one, ThreadPoolExecutor(1) as pool:
        one.gate.is_open = False
        waiting = in_thread(pool, one)
        one.gate.reached.acquire(timeout=30)
        for _ in range(2):
            one.listener.handle_exit(signal.SIGINT, None)
        one.thread.join(30)
        assert not one.thread.is_alive()
        assert one.listener.is_forced
        one.gate.open()
        with contextlib.suppress(httpx.HTTPError):
            assert waiting.result(30).status_code == 500


def test_too_many_requests_are_told_when_to_come_back() -> None:
    """503 with Retry-After; those that wait are answered."""
    with live(max_num_seqs=1, max_waiting=2) as one, ThreadPoolExecutor(8) as pool:
        one.gate.is_open = False
        asked = [in_thread(pool, one, max_tokens=64)]
        one.gate.reached.acquire(timeout=30)
        asked += [in_thread(pool, one) for _ in range(5)]
        for _ in range(2):  # each looks the prompt up between two steps, then asks for a place
            until(lambda: len(one.llm._engine_thread._commands) == 5)
            one.gate.allowed.release()
            one.gate.reached.acquire(timeout=30)
        one.gate.open()
        answers = [each.result(30) for each in asked]

        refused = [each for each in answers if each.status_code != 200]
        assert len(refused) == 3
        for each in refused:
            assert (each.status_code, each.json()["error"]["code"]) == (503, "overloaded")
            assert int(each.headers["retry-after"]) > 0
        one.until_idle()


def test_a_dead_engine_is_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """readyz and livez are 503, requests get an error in the envelope that tells nothing of us."""
    with live(fail_at=[0], error=Bug("secret words")) as one:
        with caplog.at_level(logging.CRITICAL):
            answers = [one.ask(), one.ask(), one.get("/v1/cache")]
        for answer in answers:
            assert answer.status_code in (500, 503)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "secret" not in answer.text
        until(lambda: one.get("/readyz").status_code == 503)
        assert one.get("/readyz").json()["status"] == "engine stopped"
        assert one.get("/livez").status_code == 503
        assert one.get("/metrics").status_code == 200


class Bug(BaseException):
    """No error of a step, which ends its requests only."""


def test_a_stuck_engine_is_not_ready() -> None:
    """A step that takes too long: a supervisor can see it."""
    with live(step_timeout_s=0.1) as one, ThreadPoolExecutor(1) as pool:
        one.gate.is_open = False
        waiting = in_thread(pool, one)
        one.gate.reached.acquire(timeout=30)
        until(lambda: one.get("/readyz").json()["status"] == "engine stuck")
        assert one.get("/health").json()["busy"] is True
        one.gate.open()
        assert waiting.result(30).status_code == 200
        assert one.get("/readyz").status_code == 200


class Impatient(TimeoutProtocol):
    stall_s = 0.2


def test_a_reader_that_takes_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Its request has ended, and others are answered meanwhile."""
    with live(protocol=Impatient) as one:
        body = json.dumps(
            CHAT
            | {"max_tokens": 400, "n": 16, "stream": True, "logprobs": True}
            | {"top_logprobs": 20}
        ).encode()  # many megabytes, more than the sockets take
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(one.url.rsplit(":", 1)[1])))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with caplog.at_level(logging.WARNING), client:
            client.sendall(head.encode() + body)
            assert one.ask().status_code == 200
            until(lambda: "took nothing" in caplog.text)
            one.until_idle()


def test_a_silent_stream_is_kept_open() -> None:
    """By comments, which clients skip, while the engine computes."""
    with live() as one:
        one.server.ping_s = 0.05
        one.gate.is_open = False
        one.gate.allowed.release()
        body = {"prompt": "Who?", "max_tokens": 3, "stream": True}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line == ": ping")
            one.gate.open()
            assert list(lines)[-2] == "data: [DONE]"


def test_asyncio_has_no_task_left(shared: Live) -> None:
    """After all those that left: only what the server itself runs."""
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
    return {one.get_coro().__name__ for one in asyncio.all_tasks()}  # type: ignore[union-attr]
