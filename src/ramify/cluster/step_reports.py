"""Load and cache events of a replica, taken in its engine thread between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.cache.events import CacheEvent, Snapshot, Subscription
from ramify.cache.key import namespace_hash
from ramify.cluster.wire import MAX_RUNS, Load, Run, SnapshotPart
from ramify.engine.core import EngineCore
from ramify.engine.serving.streams import LoopDispatcher

MAX_EVENTS = 1 << 16  # kept for a connection; more between two steps are lost, and counted
SMOOTHING = 0.1  # weight of the last step in the calibration
# A step with this many tokens for each of its decoding answers is one of prompts.
PROMPT_SHARE = 4
# Before a step has been measured: of a small model.
DEFAULT_TOKEN_S, DEFAULT_STEP_S = 1e-3, 1e-2


@dataclass(frozen=True, slots=True)
class StepReport:
    """What changed in the engine, besides outputs, since the last report."""

    load: Load
    runs: list[Run]
    num_lost: int


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
        self._num_dropped = self._num_computed = 0
        self._token_s, self._step_s = DEFAULT_TOKEN_S, DEFAULT_STEP_S
        self._last_load: Load | None = None

    @property
    def dispatcher(self) -> LoopDispatcher:
        """That of the connection's event loop."""
        return self._dispatcher

    def report(self, core: EngineCore, step_s: float | None) -> StepReport | None:
        """See `EngineObserver`; None if nothing has changed."""
        if self._subscription is None:
            self._subscription = core.cache.subscribe(MAX_EVENTS)
        if step_s is not None:
            self._calibrate(core, step_s)
        events = self._subscription.take()
        num_lost = self._subscription.num_dropped - self._num_dropped
        self._num_dropped += num_lost
        load = self._load(core)
        if load == self._last_load and not events and not num_lost:
            return None
        self._last_load = load
        return StepReport(load, [run_of(event) for event in events], num_lost)

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
            self._token_s += SMOOTHING * (step_s / num_tokens - self._token_s)
        elif num_tokens:
            self._step_s += SMOOTHING * (step_s - self._step_s)

    def _load(self, core: EngineCore) -> Load:
        scheduler = core.scheduler
        prompts = sum(max(0, running.sequence.num_uncomputed - 1) for running in scheduler.running)
        return Load(
            tokens_waiting=scheduler.waiting.num_uncached + prompts,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            free_pages=core.cache.num_available,
            token_s=self._token_s,
            step_s=self._step_s,
            max_waiting=core.max_waiting or 0,
        )


def run_of(event: CacheEvent) -> Run:
    """The travelling form of an event."""
    return Run(
        event.sequence,
        event.kind,
        namespace_hash(event.namespace),
        event.parent_hash,
        event.hashes,
        reason=event.reason,
    )


def snapshot_parts(request: int, snapshot: Snapshot) -> Sequence[SnapshotPart]:
    """A snapshot in parts of at most `MAX_RUNS` runs; at least one part."""
    runs = [run_of(event) for event in snapshot.runs]
    starts = range(0, max(1, len(runs)), MAX_RUNS)
    return [
        SnapshotPart(
            request,
            snapshot.sequence,
            start // MAX_RUNS,
            runs[start : start + MAX_RUNS],
            is_last=start == starts[-1],
            digest=snapshot.digest,
        )
        for start in starts
    ]
