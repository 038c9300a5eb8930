"""The sockets of KV events by themselves: who asks again, and who has to be asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ramify.cache.events import SnapshotChunk
from ramify.server.kv_events.form import BatchEncoder, EventForm
from ramify.server.kv_events.options import KvEventOptions
from ramify.server.kv_events.sockets import Answer, KvEventSockets, Resync

zmq: Any = pytest.importorskip("zmq", reason="pyzmq is not installed (ramify[kv-events])")

HERE = "tcp://127.0.0.1:*"
END = (1 << 64) - 1  # sequence of the last answer of a replay
LIMIT_S = 20.0


@contextmanager
def running(request_event: threading.Event, **limits: int) -> Iterator[KvEventSockets]:
    """Sockets that set an event where they would ask an engine."""
    options, encoder = KvEventOptions(HERE, HERE), BatchEncoder(EventForm.map, 4)
    sockets = KvEventSockets(options, encoder, request_event.set, **limits)
    try:
        yield sockets
    finally:
        sockets.close()


def empty_snapshot() -> Iterator[SnapshotChunk]:
    yield SnapshotChunk(0, 0, (), True, b"")


def test_a_client_that_asks_again_gets_one_snapshot() -> None:
    """Requests that come before the engine answers cost neither memory nor a snapshot each."""
    request_event, context = threading.Event(), zmq.Context()
    client = context.socket(zmq.DEALER)

    def ask(first: int) -> None:
        client.send_multipart((b"", first.to_bytes(8, "big")))

    def answers(num_ends: int) -> list[int]:
        numbers: list[int] = []
        while numbers.count(END) < num_ends:
            assert client.poll(1000 * LIMIT_S)
            numbers.append(int.from_bytes(client.recv_multipart()[2], "big"))
        return numbers

    with running(request_event, max_kept=1) as sockets:
        client.connect(sockets.endpoints[1])
        for _ in range(2):
            sockets.put_snapshot(Resync(empty_snapshot()))
        for _ in range(5):
            ask(0)
        assert request_event.wait(LIMIT_S)
        # Answered at once, in the order of a connection: the requests before it have been read.
        ask(2)
        assert answers(1) == [END]
        sockets.put_snapshot(Answer(empty_snapshot()))
        assert client.poll(1000 * LIMIT_S)
        ask(2)

        assert answers(2) == [1, END, END]

    context.destroy(linger=0)


def test_drops_of_an_engine_that_rests_are_made_up_for() -> None:
    """The thread asks for a snapshot after a drop, also if it had published everything by then."""
    request_event = threading.Event()

    with running(request_event) as sockets:
        sockets.begin_dropping()

        assert request_event.wait(LIMIT_S)
