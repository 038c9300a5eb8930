"""Load and cache events of a replica, taken in its engine thread between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ramify.cache.events import CacheEvent, SnapshotChunk, Subscription
from ramify.cluster.wire import Load, Run, SnapshotPart
from ramify.engine.core import EngineCore
from ramify.engine.serving.streams import LoopDispatcher

MAX_EVENTS = 1 << 16  # kept for a connection; more between two steps are lost, and counted
DIGEST_EVENTS = 256  # after as many events a digest is sent; also when the engine has nothing to do
HASH_BYTES = 16  # of a page
PART_HASH_BYTES = (
    4 << 20
)  # of a part of a snapshot, a whole number of hashes; a message may have 16 MiB
SMOOTHING = 0.1  # weight of the last step in the calibration
# Times the mean that a step counts at most: this process may have been stopped in it, and a replica
# that looks a thousand times slower gets no prompts with which to measure anew.
MAX_JUMP = 4.0
# A step with this many tokens for each of its decoding answers is one of prompts.
PROMPT_SHARE = 4


@dataclass(frozen=True, slots=True)
class StepReport:
    """What changed in the engine, besides outputs, since the last report."""

    load: Load
    runs: list[Run]
    num_lost: int
    digest: tuple[int, bytes] | None  # sequence of the last event, and the digest after it


class StepReporter:
    """Reports to one connection; an `EngineObserver`.

    Args:
        dispatcher: of the connection's event loop.
        deliver: gets a report, in the event loop.
    """

    def __init__(self, dispatcher: LoopDispatcher, deliver: Callable[[StepReport], None]) -> None:
        self._dispatcher, self._deliver = dispatcher, deliver
        self.wake_scheduled = False
        # For the engine thread only:
        self._subscription: Subscription | None = None
        self._num_dropped = self._num_computed = self._num_since_digest = 0
        self._chunks: Iterator[SnapshotChunk] = iter(())
        self._token_s = self._step_s = 0.0  # 0: not measured yet
        self._last_load: Load | None = None

    @property
    def dispatcher(self) -> LoopDispatcher:
        """That of the connection's event loop."""
        return self._dispatcher

    def report(self, core: EngineCore, step_s: float | None) -> StepReport | None:
        """See `EngineObserver`; None if nothing has changed."""
        subscription = self._subscribed(core)
        if step_s is not None:
            self._calibrate(core, step_s)
        events = subscription.take()
        num_lost = subscription.num_dropped - self._num_dropped
        self._num_dropped += num_lost
        load = self._load(core)
        if load == self._last_load and not events and not num_lost:
            return None
        self._last_load = load
        self._num_since_digest += len(events)
        digest = None
        if self._num_since_digest >= (DIGEST_EVENTS if core.has_unfinished else 1):
            self._num_since_digest, digest = 0, subscription.digest()
        return StepReport(load, [run_of(event) for event in events], num_lost, digest)

    def _subscribed(self, core: EngineCore) -> Subscription:
        if self._subscription is None:
            self._subscription = core.cache.subscribe(MAX_EVENTS)
            self._num_computed = core.num_computed_tokens  # before this connection
        return self._subscription

    def begin_snapshot(self, core: EngineCore) -> None:
        """Take a snapshot of this moment; a call for the engine thread."""
        self._chunks = self._subscribed(core).snapshot_chunks()

    def next_chunk(self, core: EngineCore) -> SnapshotChunk | None:
        """The next chunk of the snapshot, None after the last; a call for the engine thread."""
        del core
        return next(self._chunks, None)

    def close(self, core: EngineCore) -> None:
        """End the subscription; a call for the engine thread."""
        del core
        if self._subscription is not None:
            self._subscription.close()

    def receive(self, delivery: StepReport) -> None:
        """See `Receiver`."""
        self._deliver(delivery)

    def wake(self) -> None:
        """See `Receiver`; everything was done by `receive`."""
        self.wake_scheduled = False

    def _calibrate(self, core: EngineCore, step_s: float) -> None:
        num_tokens = core.num_computed_tokens - self._num_computed
        self._num_computed = core.num_computed_tokens
        num_running = len(core.scheduler.running)
        if num_tokens > PROMPT_SHARE * max(1, num_running):
            self._token_s = smoothed(self._token_s, step_s / num_tokens)
        elif num_tokens:
            self._step_s = smoothed(self._step_s, step_s)

    def _load(self, core: EngineCore) -> Load:
        scheduler = core.scheduler
        return Load(
            tokens_waiting=scheduler.num_waiting_tokens,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            free_pages=core.cache.num_available,
            token_s=self._token_s,
            step_s=self._step_s,
            max_waiting=core.max_waiting or 0,
        )


def smoothed(mean: float, value: float) -> float:
    """The mean after one value more, which counts `MAX_JUMP` means at most; 0 is no mean yet."""
    return mean + SMOOTHING * (min(value, MAX_JUMP * mean) - mean) if mean else value


def run_of(event: CacheEvent) -> Run:
    """The travelling form of an event."""
    return Run(
        event.sequence,
        event.kind,
        event.namespace_hash,
        event.parent_hash,
        event.hashes,
        event.start,
        event.reason,
    )


def parts_of(request: int, chunk: SnapshotChunk, number: int) -> list[SnapshotPart]:
    """The travelling form of a chunk of a snapshot: parts of at most `PART_HASH_BYTES` of hashes.

    Args:
        number: of the first part.
    """
    groups: list[list[Run]] = [[]]
    num_bytes = 0
    for event in chunk.runs:
        for run in _pieces(run_of(event)):
            num_bytes += len(run.hashes)
            if num_bytes > PART_HASH_BYTES and groups[-1]:
                groups.append([])
                num_bytes = len(run.hashes)
            groups[-1].append(run)
    last = len(groups) - 1
    return [
        SnapshotPart(
            request, chunk.sequence, number + at, runs, chunk.is_last and at == last, chunk.digest
        )
        for at, runs in enumerate(groups)
    ]


def _pieces(run: Run) -> Iterator[Run]:
    """A run of a snapshot in runs of at most `PART_HASH_BYTES`, one behind the other."""
    parent = run.parent_hash
    for begin in range(0, max(1, len(run.hashes)), PART_HASH_BYTES):
        hashes = run.hashes[begin : begin + PART_HASH_BYTES]
        start = run.start + begin // HASH_BYTES
        yield msgspec.structs.replace(run, parent_hash=parent, hashes=hashes, start=start)
        parent = hashes[-HASH_BYTES:]
