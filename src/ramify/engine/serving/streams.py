"""What one request yields while it runs: the way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from ramify.outputs import RequestOutput, StepOutput

MERGE_THRESHOLD = 64  # increments that a slow reader has not taken: then they become one
# Readers that one turn of the event loop wakes. What each of them does with its increment adds up to
# the time in which the loop does nothing else; those who wait longer get more of it at once.
MAX_WAKEUPS = 16

Delivery = (
    StepOutput | int | Exception
)  # an increment, the request's id once it is queued, or a refusal


class LoopDispatcher:
    """What the engine tells the streams of one event loop, with one call at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._ready: list[tuple[OutputCollector, Delivery]] = []
        self._new: list[tuple[OutputCollector, Delivery]] = []  # of the engine's thread alone
        self._is_called = False
        self._to_wake: deque[OutputCollector] = deque()  # to be woken; of the loop's thread alone

    def put(self, collector: OutputCollector, delivery: Delivery) -> None:
        """Keep something for the next `flush`. In the engine's thread."""
        self._new.append((collector, delivery))

    def flush(self) -> bool:
        """Hand over what was put; False when the event loop is closed. In the engine's thread."""
        with self._lock:
            self._ready += self._new
            self._new = []
            loop = self._loop()
            if self._is_called:  # the loop is slow: it finds everything when it gets there
                return loop is not None and not loop.is_closed()
            self._is_called = True
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # it was closed with streams open
            return False
        return loop is not None

    def _deliver(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
            self._is_called = False
        is_waking = bool(self._to_wake)
        for inbox, told in ready:
            inbox.receive(told)
            if not inbox.wake_scheduled:
                inbox.wake_scheduled = True
                self._to_wake.append(inbox)
        if not is_waking:
            self._wake()

    def _wake(self) -> None:
        """Wake some readers, and the others after whatever else the loop has to do."""
        for _ in range(min(MAX_WAKEUPS, len(self._to_wake))):
            self._to_wake.popleft().wake()
        loop = self._loop()
        if self._to_wake and loop is not None:
            loop.call_soon(self._wake)


class OutputCollector:
    """What a reader has not taken yet; for the thread of its event loop.

    Its size is bounded by the answers themselves: increments that wait are merged.
    """

    def __init__(self, dispatcher: LoopDispatcher, *, final_only: bool) -> None:
        self.dispatcher, self.final_only = (
            dispatcher,
            final_only,
        )  # whole: only the last increment is wanted
        self.wake_scheduled = False  # the outlet is going to wake the reader
        self.is_abandoned = False  # nobody reads it any more; the engine may look
        self.engine_request_id: int | None = None  # written and read by the engine's thread
        self.request_id: int | None = None
        self.error: Exception | None = None
        self._pending: dict[int, list[StepOutput]] = {}  # by index of the answer
        self._has_news = asyncio.Event()

    def receive(self, delivery: Delivery) -> None:
        """Take in what the engine tells."""
        if isinstance(delivery, int):
            self.request_id = delivery
        elif isinstance(delivery, Exception):
            self.error = delivery
        else:
            waiting = self._pending.setdefault(delivery.index, [])
            waiting.append(delivery)
            if len(waiting) > MERGE_THRESHOLD:
                waiting[:] = [merge_outputs(waiting)]

    def wake(self) -> None:
        """Let the reader look."""
        self.wake_scheduled = False
        self._has_news.set()

    async def wait(self) -> None:
        """Until something new is there."""
        await self._has_news.wait()
        self._has_news.clear()

    def take(self) -> StepOutput | None:
        """All that waits of one answer, as one increment; the request's last one comes last."""
        if not self._pending:
            return None
        index = next(
            (index for index, waiting in self._pending.items() if waiting[-1].output is None),
            next(iter(self._pending)),
        )
        return merge_outputs(self._pending.pop(index))


def merge_outputs(events: Sequence[StepOutput]) -> StepOutput:
    """Consecutive increments of one answer as one."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    return StepOutput(
        last.request_id,
        tuple(token for one in events for token in one.new_token_ids),
        last.output,
        last.index,
        "".join(one.text for one in events),
        tuple(entry for one in events for entry in one.logprobs),
        last.finish_reason,
        next((one.cache for one in events if one.cache is not None), None),
    )


class Stream:
    """The increments of one request: `async for event in stream`.

    The request is queued at the first `await`. A reader that is slow gets its increments merged;
    the engine never waits for it. Whoever leaves (`break`, `aclose`, a cancelled task, or no
    reference left) ends the request within a step, wherever it is; nothing comes after that.

    The last increment has `output`: everything, with `output.error` if the request failed.

    Raises, from the first `await`:
        RequestError: it can never be served.
        OverloadedError, DrainingError: not now; `retry_after_s` says when to try again.
        EngineStoppedError: the engine was closed, or a bug has ended it; later on too.
    """

    def __init__(
        self,
        submit: Callable[[bool], Awaitable[OutputCollector]],
        abort: Callable[[OutputCollector], None],
    ) -> None:
        self._submit, self._abort = submit, abort
        self._collector: OutputCollector | None = None
        self._submitting = asyncio.Lock()  # two tasks that wait for one stream make one request
        self._final_only = self._is_over = False

    async def accepted(self) -> int:
        """Wait until the request is queued; returns its id.

        For servers, which choose the status of an answer before its first token.
        """
        try:
            inbox = await self._begin()
            while inbox.request_id is None and inbox.error is None:
                self._require_open()
                await inbox.wait()
        except StopAsyncIteration:
            raise RuntimeError("this stream was left by another task") from None
        except BaseException:
            self.leave()
            raise
        if inbox.error is not None:
            self._is_over = True
            raise inbox.error
        assert inbox.request_id is not None
        return inbox.request_id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            inbox = await self._begin()
            while (event := inbox.take()) is None and inbox.error is None:
                self._require_open()
                await inbox.wait()
        except BaseException:
            self.leave()
            raise
        if event is None:
            assert inbox.error is not None
            self._is_over = True
            raise inbox.error
        self._is_over = event.output is not None
        return event

    async def whole(self) -> RequestOutput:
        """Wait for the end; returns everything about the request."""
        self._final_only = True  # if nothing was read yet, nothing but the end is sent
        async for event in self:
            if event.output is not None:
                return event.output
        raise RuntimeError("this stream was left, or read to its end before")

    async def aclose(self) -> None:
        """End the request now, if it has not ended."""
        self.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def __del__(self) -> None:
        self.leave()

    def _require_open(self) -> None:
        if self._is_over:
            raise StopAsyncIteration  # another task has left it

    async def _begin(self) -> OutputCollector:
        async with self._submitting:
            if self._collector is None:
                self._require_open()
                self._collector = await self._submit(self._final_only)
                if self._is_over:  # it was left meanwhile
                    self._is_over = False
                    self.leave()
            return self._collector

    def leave(self) -> None:
        """End the request, if it is still live: nobody reads on."""
        if self._collector is not None and not self._is_over and not self._collector.is_abandoned:
            self._collector.is_abandoned = True
            self._collector.wake()
            self._abort(self._collector)
        self._is_over = True
