"""Loads: pages that the tree lacks and a tier has, read for requests that wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

from ramify.cache.tier_costs import Wait
from ramify.cache.tiers import PageName
from ramify.errors import InvariantError

Waiter = TypeVar("Waiter")

# Per admission: in a pool of a few pages a third would find the first evicted again.
MAX_LOADS: Final = 2


class Load:
    """Consecutive pages that are read for waiting requests, from the first page the tree lacks.

    Pages are read in batches, which may end in any order, and are published from the first on. The
    load ends at its first page that cannot be read.

    Args:
        number: of the load.
        first: pages of the prompt before its first page.
        names: of its pages, in order; at least one.
        tiers: for each page, the store that has it.
        expected_end_s: when all of its pages are expected to be there.
    """

    def __init__(
        self,
        number: int,
        first: int,
        names: Sequence[PageName],
        tiers: Sequence[str],
        begin_s: float,
        expected_end_s: float,
    ) -> None:
        self.number, self.first, self.names, self.tiers = number, first, tuple(names), tuple(tiers)
        self.begin_s, self.expected_end_s = begin_s, expected_end_s
        self.num_requested = 0  # handed to readers
        self.num_published = 0
        self.end = len(self.names)  # pages from here on are not read: one failed, or nobody waits
        self.num_reading = 0  # in the hands of readers
        self._buffers: dict[int, int] = {}  # page of the load → buffer with its bytes
        self.is_dropped = self.is_stopped = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be published."""
        return self.is_dropped or self.num_published >= self.end

    @property
    def is_settled(self) -> bool:
        """Whether it is over and no reader holds a buffer of it."""
        return self.is_over and not self.num_reading

    @property
    def buffers(self) -> list[int]:
        """Buffers that hold verified pages of this load."""
        return [*self._buffers.values()]

    @property
    def num_arrived(self) -> int:
        """Pages that were read, from the first on without a gap, published or not."""
        return self.num_published + len(self.ready())

    @property
    def unread_tiers(self) -> Sequence[str]:
        """The tier of each page that no reader has brought yet, or nearly so."""
        return (
            ()
            if self.is_dropped
            else self.tiers[self.num_published + len(self._buffers) : self.end]
        )

    def next_batch(self, max_pages: int) -> range:
        """The next pages to read, all of one store; empty: there are none."""
        begin = self.num_requested
        if self.is_dropped or begin >= self.end:
            return range(0)
        stop = begin
        while stop < min(self.end, begin + max_pages) and self.tiers[stop] == self.tiers[begin]:
            stop += 1
        return range(begin, stop)

    def requested(self, pages: range) -> None:
        """Count pages of `next_batch` that a reader got."""
        assert pages.start == self.num_requested
        self.num_requested = pages.stop
        self.num_reading += len(pages)

    def arrived(self, page: int, buffer: int) -> bool:
        """Take a verified page from a reader; False: it is not wanted any more."""
        self.num_reading -= 1
        if self.is_dropped or page >= self.end:
            return False
        self._buffers[page] = buffer
        return True

    def failed(self, page: int) -> list[int]:
        """End the load before a page that cannot be read; returns the buffers behind it."""
        self.num_reading -= 1
        return self.cut(page)

    def stop(self) -> None:
        """Read no further page; those that are being read are still published, for nobody."""
        self.is_stopped = True
        self.end = min(self.end, self.num_requested)

    def cut(self, page: int) -> list[int]:
        """End the load before a page; returns the buffers of this page and those behind it."""
        self.end = min(self.end, max(page, self.num_published))
        return [self._buffers.pop(at) for at in sorted(self._buffers) if at >= self.end]

    def ready(self) -> list[int]:
        """Buffers of the next pages to publish, in order, as far as they have arrived."""
        ready, at = list[int](), self.num_published
        while at in self._buffers:
            ready.append(self._buffers[at])
            at += 1
        return ready

    def published(self, count: int) -> list[int]:
        """Count pages that are in the tree now; returns their buffers."""
        first, self.num_published = self.num_published, self.num_published + count
        return [self._buffers.pop(at) for at in range(first, self.num_published)]

    def drop(self) -> list[int]:
        """End the load now; returns its buffers."""
        self.is_dropped = True
        buffers = self.buffers
        self._buffers.clear()
        return buffers


class LoadTable(Generic[Waiter]):
    """The loads in flight, and the waiting requests of each. Requests are any hashable objects."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._waiters: dict[int, list[Waiter]] = {}
        self._load_of: dict[Waiter, Load] = {}
        # Pages of its load, from the first on, that are its own.
        self._needs: dict[Waiter, int] = {}
        self._waits: dict[Waiter, Wait] = {}  # of requests that could run
        self._num_loads: dict[Waiter, int] = {}  # of a live request
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter([*self._loads.values()])

    def get(self, number: int) -> Load | None:
        """A load by its number; None: it is settled."""
        return self._loads.get(number)

    def load_of(self, request: Waiter) -> Load | None:
        """The load that a request waits for."""
        return self._load_of.get(request)

    def may_load(self, request: Waiter) -> bool:
        """Whether a request has loads left."""
        return self._num_loads.get(request, 0) < MAX_LOADS

    def exhaust(self, request: Waiter) -> None:
        """Let a request load nothing more: it has waited long enough."""
        self._num_loads[request] = MAX_LOADS

    def continuing_with(self, page_hash: bytes) -> Load | None:
        """A load that is not over, nor was given up, and publishes this page next."""
        for load in self._loads.values():
            if load.is_over or load.is_stopped:
                continue
            if load.names[load.num_published].hash == page_hash:
                return load
        return None

    def begin(
        self,
        request: Waiter,
        first: int,
        names: Sequence[PageName],
        tiers: Sequence[str],
        begin_s: float,
        expected_end_s: float,
    ) -> Load:
        """Begin a load that `request` waits for."""
        self._numbers += 1
        load = Load(self._numbers, first, names, tiers, begin_s, expected_end_s)
        self._loads[load.number] = load
        self._waiters[load.number] = []
        self.join(request, load, len(load.names))
        return load

    def join(self, request: Waiter, load: Load, num_pages: int) -> None:
        """Let a request wait for the first `num_pages` pages of a load."""
        self._waiters[load.number].append(request)
        self._load_of[request], self._needs[request] = load, num_pages
        self._num_loads[request] = self._num_loads.get(request, 0) + 1

    def waiters(self, load: Load) -> Sequence[Waiter]:
        """The requests that wait for a load."""
        return self._waiters[load.number]

    def needs(self, request: Waiter) -> int:
        """Pages of its load, from the first on, that a waiting request has in its prompt."""
        return self._needs[request]

    def begin_wait(self, request: Waiter, wait: Wait) -> None:
        """A request of a load could run; until then, no time counts against its load."""
        self._waits[request] = wait

    def wait_of(self, request: Waiter) -> Wait | None:
        """Since when and how long a request of a load waits for nothing else; None: it does not."""
        return self._waits.get(request)

    def take_served(self, load: Load) -> list[Waiter]:
        """The requests of a load whose own pages are all published; they wait no longer."""
        served = [
            request
            for request in self._waiters[load.number]
            if self._needs[request] <= load.num_published
        ]
        for request in served:
            self.leave(request)
        return served

    def take_waiters(self, load: Load) -> list[Waiter]:
        """The requests of a load, which wait no longer."""
        waiters, self._waiters[load.number] = self._waiters[load.number], []
        for request in waiters:
            del self._load_of[request], self._needs[request]
            self._waits.pop(request, None)
        return waiters

    def leave(self, request: Waiter) -> Load | None:
        """Let a request wait no longer; returns its load if nobody else waits for that."""
        load = self._load_of.pop(request, None)
        if load is None:
            return None
        del self._needs[request]
        self._waits.pop(request, None)
        self._waiters[load.number].remove(request)
        return None if self._waiters[load.number] else load

    def forget(self, request: Waiter) -> None:
        """Forget a request that has ended, and waits for no load."""
        self._num_loads.pop(request, None)

    def settle(self, load: Load) -> None:
        """Forget a load that is settled."""
        assert load.is_settled and not self._waiters[load.number]
        del self._loads[load.number], self._waiters[load.number]

    def check(self) -> None:
        """Raise InvariantError if requests and loads disagree about who waits for what."""
        waiting = {request: load.number for load in self for request in self._waiters[load.number]}
        known = {request: load.number for request, load in self._load_of.items()}
        if waiting != known:
            raise InvariantError(
                f"{len(waiting)} requests wait for loads, {len(known)} know of one"
            )
        for load in self:
            if load.num_reading < 0 or not 0 <= load.num_published <= load.num_requested:
                raise InvariantError(f"load {load.number} has miscounted its pages")
