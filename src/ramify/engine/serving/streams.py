"""`Stream`: the outputs of one request, on their way from the engine thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self

from ramify.outputs import RequestOutput, StepOutput

MERGE_THRESHOLD = 64  # unread increments of a slow reader: one more, and they are merged
# Readers woken in one iteration of the event loop, which does nothing else while they handle their
# increments. Readers that wait longer get more tokens at once.
MAX_WAKEUPS = 16

# An increment, the id of the request once it is queued, or the error that refused it.
Delivery = StepOutput | int | Exception


class Receiver(Protocol):
    """Gets deliveries in the thread of an event loop."""

    wake_scheduled: bool  # the dispatcher is going to call `wake`

    @property
    def dispatcher(self) -> LoopDispatcher:
        """That of the event loop."""
        ...

    def receive(self, delivery: Any, /) -> None:
        """Store a delivery; must not raise."""
        ...

    def wake(self) -> None:
        """Handle what was stored since the last call; must not raise."""
        ...


class Collector(Receiver, Protocol):
    """Gets the deliveries of one request."""

    is_abandoned: bool  # nobody reads on; the engine thread reads this flag too
    engine_request_id: int | None  # for the engine thread only

    @property
    def final_only(self) -> bool:
        """Whether it wants only the last increment."""
        ...


class LoopDispatcher:
    """Carries deliveries from the engine thread to the collectors of one event loop.

    At most one `call_soon_threadsafe` is pending at a time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._ready: list[tuple[Receiver, Any]] = []
        self._new: list[tuple[Receiver, Any]] = []  # for the engine thread only
        self._is_called = False
        self._to_wake: deque[Receiver] = deque()  # for the loop's thread only

    def put(self, receiver: Receiver, delivery: Any) -> None:
        """Keep a delivery for the next `flush`. For the engine thread."""
        self._new.append((receiver, delivery))

    def flush(self) -> bool:
        """Hand over what was put; returns False if the loop is closed. For the engine thread."""
        with self._lock:
            self._ready += self._new
            self._new = []
            loop = self._loop()
            if self._is_called:  # the pending `_deliver` will find it
                return loop is not None and not loop.is_closed()
            self._is_called = True
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop was closed while streams were open
            return False
        return loop is not None

    def _deliver(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
            self._is_called = False
        is_waking = bool(self._to_wake)
        for receiver, delivery in ready:
            receiver.receive(delivery)
            if not receiver.wake_scheduled:
                receiver.wake_scheduled = True
                self._to_wake.append(receiver)
        if not is_waking:
            self._wake()

    def _wake(self) -> None:
        """Wake `MAX_WAKEUPS` readers now, and the others in later iterations of the loop."""
        for _ in range(min(MAX_WAKEUPS, len(self._to_wake))):
            self._to_wake.popleft().wake()
        loop = self._loop()
        if self._to_wake and loop is not None:
            loop.call_soon(self._wake)


class OutputCollector:
    """The unread outputs of one request; for the thread of its event loop.

    Its size is bounded by that of the answers: unread increments are merged.

    Args:
        final_only: the reader wants only the last increment.
    """

    def __init__(self, dispatcher: LoopDispatcher, *, final_only: bool) -> None:
        self.dispatcher, self.final_only = dispatcher, final_only
        self.wake_scheduled = False  # the dispatcher is going to wake the reader
        self.is_abandoned = False  # nobody reads on; the engine thread reads this flag too
        self.engine_request_id: int | None = None  # for the engine thread only
        self.request_id: int | None = None
        self.error: Exception | None = None
        self._pending: dict[int, list[StepOutput]] = {}  # by completion index
        self._has_news = asyncio.Event()

    def receive(self, delivery: Delivery) -> None:
        """Store a delivery."""
        if isinstance(delivery, int):
            self.request_id = delivery
        elif isinstance(delivery, Exception):
            self.error = delivery
        else:
            unread = self._pending.setdefault(delivery.index, [])
            unread.append(delivery)
            if len(unread) > MERGE_THRESHOLD:
                unread[:] = [merge_outputs(unread)]

    def wake(self) -> None:
        """Let `wait` return."""
        self.wake_scheduled = False
        self._has_news.set()

    async def wait(self) -> None:
        """Wait until a delivery was stored, or the stream was left, since the last call."""
        await self._has_news.wait()
        self._has_news.clear()

    def take(self) -> StepOutput | None:
        """The unread increments of one completion, merged; the request's last increment comes last."""
        if not self._pending:
            return None
        index = next(
            (index for index, unread in self._pending.items() if unread[-1].output is None),
            next(iter(self._pending)),
        )
        return merge_outputs(self._pending.pop(index))


def merge_outputs(events: Sequence[StepOutput]) -> StepOutput:
    """Merge consecutive increments of one completion into one."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return StepOutput(
        last.request_id,
        tuple(token for event in events for token in event.new_token_ids),
        last.output,
        last.index,
        "".join(event.text for event in events),
        tuple(entry for event in events for entry in event.logprobs),
        last.finish_reason,
        next((event.cache for event in events if event.cache is not None), None),
        next((event.prefix for event in events if event.prefix is not None), None),
    )


class Stream:
    """The increments of one request: `async for event in stream`.

    The request is queued at the first `await`. A slow reader gets its increments merged; the
    engine never waits for it. Leaving the stream (`break`, `aclose`, a cancelled task, the last
    reference dropped) aborts the request within a step; nothing comes after that.

    The last increment has `output`, the whole answer, with `output.error` if the request failed.

    Raises, from the first `await`:
        RequestError: the request can never be served.
        OverloadedError, DrainingError: not now; `retry_after_s` says when to try again.
        EngineStoppedError: the engine was closed or has ended by a bug; also raised later.
    """

    def __init__(
        self,
        submit: Callable[[bool], Awaitable[OutputCollector]],
        abort: Callable[[OutputCollector], None],
    ) -> None:
        self._submit, self._abort = submit, abort
        self._collector: OutputCollector | None = None
        self._submitting = asyncio.Lock()  # two tasks that await one stream make one request
        self._final_only = self._is_over = False

    async def accepted(self) -> int:
        """Wait until the request is queued; returns its id.

        For servers, which send the HTTP status before the first token.
        """
        try:
            collector = await self._begin()
            while collector.request_id is None and collector.error is None:
                self._require_open()
                await collector.wait()
        except StopAsyncIteration:
            raise RuntimeError("this stream was left by another task") from None
        except BaseException:
            self.leave()
            raise
        if collector.error is not None:
            self._is_over = True
            raise collector.error
        assert collector.request_id is not None
        return collector.request_id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            collector = await self._begin()
            while (event := collector.take()) is None and collector.error is None:
                self._require_open()
                await collector.wait()
        except BaseException:
            self.leave()
            raise
        if event is None:
            assert collector.error is not None
            self._is_over = True
            raise collector.error
        self._is_over = event.output is not None
        return event

    async def whole(self) -> RequestOutput:
        """Wait for the end; returns the whole answer."""
        self._final_only = True  # has an effect only if nothing was read yet
        async for event in self:
            if event.output is not None:
                return event.output
        raise RuntimeError("this stream was left, or has been read to its end")

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        self.leave()

    def _require_open(self) -> None:
        if self._is_over:
            raise StopAsyncIteration  # another task has left the stream

    async def _begin(self) -> OutputCollector:
        async with self._submitting:
            if self._collector is None:
                self._require_open()
                self._collector = await self._submit(self._final_only)
                if self._is_over:  # the stream was left meanwhile
                    self._is_over = False
                    self.leave()
            return self._collector

    def leave(self) -> None:
        """Abort the request, if it has not ended; nobody reads on."""
        if self._collector is not None and not self._is_over and not self._collector.is_abandoned:
            self._collector.is_abandoned = True
            self._collector.wake()
            self._abort(self._collector)
        self._is_over = True
