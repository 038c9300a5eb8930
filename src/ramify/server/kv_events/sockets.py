"""`KvEventSockets`: publishes batches of cache events, and sends missed ones again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ramify.cache.events import CacheEvent, SnapshotChunk
from ramify.server.kv_events.form import BatchEncoder, EventForm
from ramify.server.kv_events.options import KvEventOptions, bound_socket, import_zmq

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # visits of the engine that are not published yet
MAX_KEPT_BATCHES, MAX_KEPT_BYTES = 10_000, 64 << 20  # published ones, to send again
# Batches of one reader that does not read; beyond, it misses some. More than a whole replay.
MAX_UNSENT = MAX_KEPT_BATCHES + 100
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
JOIN_S = 2.0
LINGER_MS = 200  # for the last batches to leave


@dataclass(frozen=True, slots=True)
class Resync:
    """A snapshot to publish, in place of events that were dropped."""

    chunks: Iterator[SnapshotChunk]


@dataclass(frozen=True, slots=True)
class Answer:
    """A snapshot for the clients whose replay begins before all kept batches."""

    chunks: Iterator[SnapshotChunk]


Item = list[CacheEvent] | Resync | Answer


class KvEventSockets:
    """A PUB socket and, if wanted, a ROUTER socket for replay, in a thread of their own.

    A message of the PUB socket is (topic, sequence, batch): 8 bytes, big-endian, from 0 without gaps.
    The first is a snapshot: it forgets what an earlier process had published. A request for replay is a first
    sequence of 8 bytes; the answers are messages as above, in order, then one whose sequence is -1. If
    that sequence is older than all kept batches, a snapshot of the cache stands in for them: a batch
    that forgets everything and batches with all pages, whose sequences end at the last published one.

    Args:
        ask_engine: called from the thread when there is room after drops, or clients wait for a snapshot.
        max_queued: visits of the engine that are not published yet; more are dropped.
        max_kept: batches to send again.
    """

    def __init__(
        self,
        options: KvEventOptions,
        encoder: BatchEncoder,
        ask_engine: Callable[[], None],
        *,
        max_queued: int = MAX_QUEUED,
        max_kept: int = MAX_KEPT_BATCHES,
    ) -> None:
        self._encoder, self._ask_engine = encoder, ask_engine
        self._max_queued, self._max_kept = max_queued, max_kept
        self._topic = options.topic.encode()
        # SGLang and older vLLM answer a replay without it.
        self._has_replay_topic = options.form is EventForm.map
        self.num_published = 0  # batches
        self.num_snapshots = 0  # published: the first, and those after events were dropped
        self.is_dropping = False  # events, until a `Resync` takes their place
        self._queued: deque[Item] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        # Clients that wait for an `Answer`, and the first sequence that each has missed.
        self._behind: dict[bytes, int] = {}
        self._is_over = self._has_warned = False
        zmq = import_zmq()
        self._zmq, self._context = zmq, zmq.Context()
        self._context.sndhwm = MAX_UNSENT
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        try:
            self._publisher = self._bound(zmq.PUB, options.endpoint)
            self._replay = self._bound(zmq.ROUTER, options.replay) if options.replay else None
        except BaseException:
            self._close_sockets()
            raise
        # Where the sockets listen, with the ports that they have got; "" without replay.
        self.endpoints = self._address(self._publisher), self._address(self._replay)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        made = bound_socket(self._context, kind, endpoint)
        made.linger = LINGER_MS
        return made

    def _address(self, bound: Any) -> str:
        return "" if bound is None else str(bound.getsockopt_string(self._zmq.LAST_ENDPOINT))

    # -- for the engine thread ---------------------------------------------------------------

    def put(self, events: list[CacheEvent]) -> bool:
        """Publish events; returns False, and takes none, if too many are not published yet."""
        if len(self._queued) >= self._max_queued:
            return False
        self._queued.append(events)
        self._wake()
        return True

    def put_snapshot(self, snapshot: Resync | Answer) -> None:
        """Publish or send a snapshot; events after its moment are put later."""
        self._queued.append(snapshot)
        self._wake()

    def begin_dropping(self) -> None:
        """Ask for a `Resync` once there is room; until then events are dropped."""
        self.is_dropping = True
        self._wake()  # everything may be published already

    @property
    def has_waiting_clients(self) -> bool:
        """Whether a client waits for an `Answer`."""
        return bool(self._behind)

    @property
    def has_room(self) -> bool:
        """Whether most of what was put is published."""
        return len(self._queued) <= self._max_queued // 2

    def _wake(self) -> None:
        # A full buffer wakes as well.
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    # -- for the thread that made it ---------------------------------------------------------

    def close(self) -> None:
        """Publish what is queued, then end."""
        self._is_over = True
        self._wake()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._close_sockets()

    def _close_sockets(self) -> None:
        for name in ("_publisher", "_replay"):
            made = getattr(self, name, None)
            if made is not None:
                made.close()
        self._woken.close()
        self._waker.close()
        self._context.term()

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._woken, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        try:
            while not (self._is_over and not self._queued):
                ready = dict(poller.poll())
                with suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
                self._publish_queued()
                if self._replay in ready:
                    self._answer_replay()
        except Exception:
            logger.exception("KV events are published no more: a bug")

    def _publish_queued(self) -> None:
        while self._queued:
            match self._queued.popleft():
                case Resync(chunks):
                    self.num_snapshots += 1
                    for body in self._snapshot([chunk.runs for chunk in chunks]):
                        self._publish(body)
                case Answer(chunks):
                    self._answer_behind([chunk.runs for chunk in chunks])
                case events:
                    batch = self._encoder.batch(time.time(), events)
                    if batch is not None:
                        self._publish(batch)
        if self.is_dropping:
            self._ask_engine()

    def _publish(self, body: bytes) -> None:
        sequence = self.num_published
        self.num_published += 1
        self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), body))
        self._kept.append((sequence, body))
        self._num_kept_bytes += len(body)
        while len(self._kept) > self._max_kept or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _snapshot(self, parts: Sequence[Iterable[CacheEvent]]) -> list[bytes]:
        """Batches that forget everything, then store these runs."""
        now_s = time.time()
        bodies = (self._encoder.batch(now_s, part) for part in parts)
        return [self._encoder.cleared(now_s), *(body for body in bodies if body is not None)]

    def _answer_behind(self, parts: Sequence[Sequence[CacheEvent]]) -> None:
        clients, self._behind = self._behind, {}
        if not clients:
            return
        bodies = self._snapshot(parts)
        # Their sequences must be those that each client has missed.
        if len(bodies) > self.num_published - max(clients.values()):
            bodies = self._snapshot([[run for part in parts for run in part]])
        batches = list(enumerate(bodies, self.num_published - len(bodies)))
        for client in clients:
            self._send_again(client, batches)

    def _answer_replay(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            if not self._has_warned:
                logger.warning(
                    "a request for replay has frames of %s bytes, not an empty one and one of 8: it and "
                    "all further ones of that kind are ignored",
                    [len(frame) for frame in frames[1:]],
                )
            self._has_warned = True
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        oldest = self._kept[0][0] if self._kept else self.num_published
        if first < oldest:
            is_asked = bool(self._behind)
            self._behind[client] = first
            if not is_asked:
                self._ask_engine()
            return
        self._send_again(client, [kept for kept in self._kept if kept[0] >= first])

    def _send_again(self, client: bytes, batches: list[tuple[int, bytes]]) -> None:
        assert self._replay is not None
        topic = [self._topic] if self._has_replay_topic else []
        for sequence, body in batches:
            number = sequence.to_bytes(8, "big")
            self._replay.send_multipart((client, b"", *topic, number, body))
        end = [b""] if topic else []
        self._replay.send_multipart((client, b"", *end, END_SEQUENCE, b""))
