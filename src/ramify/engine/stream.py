"""What one request yields while it runs: the way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from ramify.engine.core import StepOutput
from ramify.params import RequestOutput

MERGE_EVERY = 64  # increments that a slow reader has not taken: then they become one
# Readers that one turn of the event loop wakes. What each of them does with its increment adds up to
# the time in which the loop does nothing else; those who wait longer get more of it at once.
WOKEN_AT_ONCE = 16

Told = (
    StepOutput | int | Exception
)  # an increment, the request's id once it is queued, or a refusal


class Outlet:
    """What the engine tells the streams of one event loop, with one call at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._ready: list[tuple[Inbox, Told]] = []
        self._new: list[tuple[Inbox, Told]] = []  # of the engine's thread alone
        self._is_called = False
        self._due: deque[Inbox] = deque()  # to be woken; of the loop's thread alone

    def put(self, inbox: Inbox, told: Told) -> None:
        """Keep something for the next `flush`. In the engine's thread."""
        self._new.append((inbox, told))

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
        is_waking = bool(self._due)
        for inbox, told in ready:
            inbox.receive(told)
            if not inbox.is_due:
                inbox.is_due = True
                self._due.append(inbox)
        if not is_waking:
            self._wake()

    def _wake(self) -> None:
        """Wake some readers, and the others after whatever else the loop has to do."""
        for _ in range(min(WOKEN_AT_ONCE, len(self._due))):
            self._due.popleft().wake()
        loop = self._loop()
        if self._due and loop is not None:
            loop.call_soon(self._wake)


class Inbox:
    """What a reader has not taken yet; for the thread of its event loop.

    Its size is bounded by the answers themselves: increments that wait are merged.
    """

    def __init__(self, outlet: Outlet, *, is_whole: bool) -> None:
        self.outlet, self.is_whole = outlet, is_whole  # whole: only the last increment is wanted
        self.is_due = False  # the outlet is going to wake the reader
        self.is_abandoned = False  # nobody reads it any more; the engine may look
        self.request_id_of_core: int | None = None  # written and read by the engine's thread
        self.request_id: int | None = None
        self.error: Exception | None = None
        self._pending: dict[int, list[StepOutput]] = {}  # by index of the answer
        self._told = asyncio.Event()

    def receive(self, told: Told) -> None:
        """Take in what the engine tells."""
        if isinstance(told, int):
            self.request_id = told
        elif isinstance(told, Exception):
            self.error = told
        else:
            waiting = self._pending.setdefault(told.index, [])
            waiting.append(told)
            if len(waiting) > MERGE_EVERY:
                waiting[:] = [merged(waiting)]

    def wake(self) -> None:
        """Let the reader look."""
        self.is_due = False
        self._told.set()

    async def wait(self) -> None:
        """Until something new is there."""
        await self._told.wait()
        self._told.clear()

    def take(self) -> StepOutput | None:
        """All that waits of one answer, as one increment; the request's last one comes last."""
        if not self._pending:
            return None
        index = next(
            (index for index, waiting in self._pending.items() if waiting[-1].output is None),
            next(iter(self._pending)),
        )
        return merged(self._pending.pop(index))


def merged(events: Sequence[StepOutput]) -> StepOutput:
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
        self, submit: Callable[[bool], Awaitable[Inbox]], abort: Callable[[Inbox], None]
    ) -> None:
        self._submit, self._abort = submit, abort
        self._inbox: Inbox | None = None
        self._submitting = asyncio.Lock()  # two tasks that wait for one stream make one request
        self._is_whole = self._is_over = False

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
            self._leave()
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
            self._leave()
            raise
        if event is None:
            assert inbox.error is not None
            self._is_over = True
            raise inbox.error
        self._is_over = event.output is not None
        return event

    async def whole(self) -> RequestOutput:
        """Wait for the end; returns everything about the request."""
        self._is_whole = True  # if nothing was read yet, nothing but the end is sent
        async for event in self:
            if event.output is not None:
                return event.output
        raise RuntimeError("this stream was left, or read to its end before")

    async def aclose(self) -> None:
        """End the request now, if it has not ended."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _require_open(self) -> None:
        if self._is_over:
            raise StopAsyncIteration  # another task has left it

    async def _begin(self) -> Inbox:
        async with self._submitting:
            if self._inbox is None:
                self._require_open()
                self._inbox = await self._submit(self._is_whole)
                if self._is_over:  # it was left meanwhile
                    self._is_over = False
                    self._leave()
            return self._inbox

    def _leave(self) -> None:
        if self._inbox is not None and not self._is_over and not self._inbox.is_abandoned:
            self._inbox.is_abandoned = True
            self._inbox.wake()
            self._abort(self._inbox)
        self._is_over = True
