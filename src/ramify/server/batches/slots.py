"""`LineSlots`: how many lines of batches run at once, so that they yield to other requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ramify.server.live_requests import LiveRequests

SHARE = 2  # batches get 1 / SHARE of the rows of the engine's batch


class HeldRows:
    """The rows of one line, which it gives back while it waits."""

    def __init__(self, slots: LineSlots, wanted: int) -> None:
        self._slots, self._wanted, self._num_rows = slots, wanted, 0

    async def acquire(self) -> None:
        """Wait for rows."""
        self._num_rows = await self._slots.acquire(self._wanted)

    def release(self) -> None:
        """Give the rows back; does nothing if there are none."""
        num_rows, self._num_rows = self._num_rows, 0
        if num_rows:
            self._slots.release(num_rows)


class LineSlots:
    """Rows of the engine's batch for lines of batches; those who wait get them in turn.

    A line starts only while no other request waits for its first token, while half of the rows are left
    to others, and while there is a row that nobody uses. So a line never waits in the engine's queue
    beside a request that somebody waits for, of whichever tenant, and never has one preempted.

    Args:
        live: the requests of the server; its `on_change` is this object's from now on.
        num_rows: of the engine's batch; of all replicas together.
        is_open: False: no line may start.
    """

    def __init__(
        self, live: LiveRequests, num_rows: Callable[[], int], is_open: Callable[[], bool]
    ) -> None:
        self._live, self._num_rows, self._is_open = live, num_rows, is_open
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.num_used = 0
        live.on_change = self.wake

    async def acquire(self, num_rows: int) -> int:
        """Wait for rows; returns how many to `release`: a line that needs more than all gets all."""
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_rows, granted))
        self.wake()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(granted.result())
            raise

    def release(self, num_rows: int) -> None:
        """Give rows back."""
        self.num_used -= num_rows
        self.wake()

    def wake(self) -> None:
        """Let those start for whom there is room by now."""
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():
                self._waiting.popleft()
                continue
            num_rows = self._fitting(wanted)
            if num_rows is None:
                return
            self._waiting.popleft()
            self.num_used += num_rows
            granted.set_result(num_rows)

    def _fitting(self, wanted: int) -> int | None:
        """The rows that a line gets now; None: it has to wait."""
        if not self._is_open() or self._live.num_foreground_waiting:
            return None
        num_rows = max(1, self._num_rows())
        share = max(1, num_rows // SHARE)
        wanted = min(wanted, share)
        is_within_share = self.num_used + wanted <= share
        num_free = num_rows - self._live.num_foreground_answers - self.num_used
        return wanted if is_within_share and wanted <= num_free else None
