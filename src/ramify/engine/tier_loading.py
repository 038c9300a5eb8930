"""`CopiesIn`: loads pages of the tiers for requests that wait, and publishes them in the pool."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from ramify.cache.key import CacheKey, namespace_hash
from ramify.cache.pages import ID_BYTES, Pages
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.promotion import lease_computed, publish_copies
from ramify.cache.session_table import Session
from ramify.cache.tier_loads import Load, LoadTable
from ramify.cache.tiers import PageName
from ramify.engine.request import Request
from ramify.engine.tier_copies import CopiesOut
from ramify.engine.tier_look_ups import LookUps
from ramify.engine.tier_measurements import TierMeasurements
from ramify.engine.tier_parts import PendingRemovals, StagingArea, TierCounts, TierParts
from ramify.kv.mover_jobs import LookedUp, PageRead, ReadEnded
from ramify.kv.stores.page_store import PageKey, ReadOutcome
from ramify.outputs import TierMiss

logger = logging.getLogger(__name__)

PUBLISH_BYTES = 32 << 20  # copied in per step
BATCH_PAGES = 16  # of a read
LOOKUP_PAGES = 64  # asked of the stores at once
MAX_LOADS_AHEAD = 4  # loads of requests that have not reached the head of the queue
IDLE_WAIT_S = 0.002  # a new request waits no longer while a load is all there is to do
MAX_STUCK = 3  # reads; then reading is off


class CopiesIn:
    """The pages that come in. For the engine's thread, between two calls of the executor.

    Args:
        measurements: what loading and computing take.
        copies_out: takes its copies before a page is written.
        removals: pages that the writer has still to remove from the tiers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        clock: Callable[[], float],
        counts: TierCounts,
        measurements: TierMeasurements,
        copies_out: CopiesOut,
        removals: PendingRemovals,
    ) -> None:
        self._cache, self._clock, self._counts = cache, clock, counts
        self._measurements, self._costs = measurements, measurements.costs
        self._copies_out, self._removals = copies_out, removals
        self._size = cache.page_size
        self._look_ups = LookUps(cache.page_size, clock, counts, copies_out)
        self._hashes: dict[Request, tuple[int, list[bytes]]] = {}  # with the number of tokens
        self._awake: list[Request] = []
        self.off = ""  # why nothing is read any more

    def begin(self, parts: TierParts, area: StagingArea) -> None:
        """Read from these stores, through these buffers, from now on; nothing is in flight."""
        self._parts, self._area = parts, area
        self._max_published = max(1, PUBLISH_BYTES // parts.device.page_bytes)
        self._loads: LoadTable[Request] = LoadTable()
        self._keys: dict[int, CacheKey] = {}  # load → the key that its pages are published under
        self._sessions: dict[int, Session | None] = {}  # load → that of its first request
        self._reading: dict[PageRead, bool] = {}  # whether it was counted as stuck
        self._num_stuck = 0
        self.off = ""
        self._look_ups.begin(parts)

    def prefetch(self, request: Request) -> None:
        """Begin to load for a request that was just queued, if few others do."""
        if len(self._loads) + self._look_ups.num_waiting < MAX_LOADS_AHEAD:
            self._begin_load(request, self._clock())

    def holds(self, request: Request) -> bool:
        """Whether a request that could run waits for a load instead; begins one if that pays."""
        now_s = self._clock()
        if self._look_ups.holds(request):
            return True
        load = self._loads.load_of(request) or self._begin_load(request, now_s, could_run=True)
        if load is None:
            return self._look_ups.holds(request)
        if self._loads.wait_of(request) is None:
            first, num_tokens = load.first + load.num_published, len(request.sequence.tokens)
            wait = self._costs.wait(now_s, load.expected_end_s, first, num_tokens)
            self._loads.begin_wait(request, wait)
        return True

    def forget(self, request: Request) -> None:
        """A request was admitted, or has ended: it waits for no load."""
        self._leave(request)
        self._loads.forget(request)
        self._look_ups.forget(request)
        self._hashes.pop(request, None)

    def reset(self) -> None:
        """Drop all loads: the queues that their requests waited in are gone."""
        for load in self._loads:
            self._loads.take_waiters(load)
            self._drop(load)
        self._look_ups.reset()
        self._awake.clear()
        self._hashes.clear()

    def take_awake(self) -> list[Request]:
        """The requests that wait for a load no longer."""
        awake, self._awake = self._awake, []
        return awake

    def publish_arrived(self) -> None:
        """Publish the pages that were read, end loads, and hand out the next reads."""
        now_s, room = self._clock(), self._max_published
        for request in self._look_ups.take_late():
            self._go_on(request)
        for load in self._loads:
            room -= self._publish(load, room)
            self._wake_served(load)
            if load.is_over:
                self._end_load(load)
            else:
                self._give_up_lost(load, now_s)
            if load.is_settled:
                self._settle(load)
        if self._reading:
            self._find_stuck()
        self._pump()

    def looked_up(self, result: LookedUp) -> None:
        """Take the answer to a look-up, and begin to load what it lists."""
        request = self._look_ups.ended(result)
        if request is not None:
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """Begin a load for a request whose look-up has ended; wake it if it waits for nothing more."""
        if not request.is_held:
            self._begin_load(request, self._clock())
        elif not self.holds(request):
            self._awake.append(request)

    def end_loads(self, hashes: Collection[bytes] | None = None) -> None:
        """End the loads that have one of these pages; None: all."""
        for load in self._loads:
            if hashes is None or any(name.hash in hashes for name in load.names):
                self._end_load(load)

    def turn_off(self, reason: str) -> None:
        """Read nothing any more, because of a fault."""
        logger.error("the cache tiers are not read any more: %s", reason)
        self.turn_off_quietly(reason)

    def turn_off_quietly(self, reason: str) -> None:
        """Read nothing any more."""
        self.off = reason
        self.end_loads()

    def wait(self) -> None:
        """Wait a moment for a load, if there is one: nothing else is to be done."""
        is_blocked = not self._cache.num_available  # pages that have arrived find no room
        has_ready = any(load.ready() for load in self._loads)
        is_waiting = self._look_ups.num_waiting > 0 or len(self._loads) > 0
        if is_waiting and (is_blocked or not has_ready):
            self._parts.mover.wait(IDLE_WAIT_S)

    def _begin_load(
        self, request: Request, now_s: float, *, could_run: bool = False
    ) -> Load | None:
        """A load for a request to wait for; None: no tier has its next page, or computing is sooner.

        Where the store beyond a network may have further pages, it is asked first, and None returned.

        Args:
            could_run: computing is final then, and counted.
        """
        if self.off or not self._loads.may_load(request):
            return None
        sequence = request.sequence
        if not sequence.reuse:
            return None
        key = sequence.key(len(sequence.tokens))
        first = self._cache.match(key).num_pages
        end = (len(key) - 1) // self._size
        if first >= end:
            return None
        tenant = request.tenant.encode("utf-8", "surrogatepass")
        self._copies_out.queue.set_tenant(namespace_hash(key.namespace), tenant)
        hashes = self._hashes_of(request, key)
        if shared := self._loads.continuing_with(hashes[first]):
            self._loads.join(request, shared, _num_common(shared, hashes[first:end]))
            return shared
        tiers = self._tiers_of(request, hashes[first:end])
        if self._look_up(request, hashes, first, tiers, len(key)):
            return None
        behind = first + len(tiers)
        if could_run and behind < end and request.tier_miss is None:
            request.tier_miss = self._parts.eviction_of(hashes[behind], behind * self._size)
        if not tiers:
            return None
        plan = self._costs.plan(tiers, first, len(key), self._num_queued())
        if plan.num_pages < len(tiers):
            self._measurements.refused(tiers[plan.num_pages])
            if could_run or plan.num_pages:
                self._count_refused(request, first, tiers, plan.num_pages)
        if not plan.num_pages:
            return None
        parents = [hashes[first - 1] if first else namespace_hash(key.namespace), *hashes[first:]]
        names = [
            PageName(page_hash, parent, tenant)
            for page_hash, parent in zip(hashes[first:], parents, strict=False)
        ][: plan.num_pages]
        load = self._loads.begin(request, first, names, tiers, now_s, now_s + plan.load_s)
        self._keys[load.number] = key
        self._sessions[load.number] = sequence.session
        self._counts.loads += 1
        self._pump()
        return load

    def _look_up(
        self,
        request: Request,
        hashes: Sequence[bytes],
        first: int,
        tiers: Sequence[str],
        num_tokens: int,
    ) -> bool:
        """Ask the store beyond a network for the pages behind those of `tiers`, if they would pay.

        Returns whether it was asked.
        """
        distant, unknown = self._parts.distant, first + len(tiers)
        end = (num_tokens - 1) // self._size
        if not distant or unknown >= end or not self._look_ups.may_ask(request, unknown):
            return False
        hoped = [*tiers, *[distant] * (end - unknown)]
        plan = self._costs.plan(hoped, first, num_tokens, self._num_queued())
        if plan.num_pages <= len(tiers):
            self._measurements.refused(distant)
            return False
        self._look_ups.ask(request, hashes[unknown:end], unknown, plan.compute_s)
        return True

    def _num_queued(self) -> Counter[str]:
        """Pages that the loads in flight have still to read, by tier."""
        queued: Counter[str] = Counter()
        for load in self._loads:
            queued.update(load.unread_tiers)
        return queued

    def _count_refused(
        self, request: Request, first: int, tiers: Sequence[str], num_loaded: int
    ) -> None:
        """A request computes pages that the tiers have, those behind the first `num_loaded`."""
        self._counts.loads_refused += not num_loaded
        for tier, count in Counter(tiers[num_loaded:]).items():
            self._counts.computed[tier] = self._counts.computed.get(tier, 0) + count
        begin, end = ((first + page) * self._size for page in (num_loaded, len(tiers)))
        request.tier_miss = TierMiss(tiers[num_loaded], "slower", begin, end)
        if not num_loaded:
            self._loads.exhaust(request)

    def _hashes_of(self, request: Request, key: CacheKey) -> list[bytes]:
        known = self._hashes.get(request)
        if known is None or known[0] != len(key):
            known = self._hashes[request] = len(key), key.page_hashes(self._size)
        return known[1]

    def _tiers_of(self, request: Request, hashes: Sequence[bytes]) -> list[str]:
        """The fastest tier of each page, up to the first page that none is known to have."""
        tiers: list[str] = []
        near, distant = self._parts.near, self._parts.distant
        for begin in range(0, len(hashes), LOOKUP_PAGES):
            chunk = hashes[begin : begin + LOOKUP_PAGES]
            listed = [(store.tier, self._parts.listed(store, chunk)) for store in near]
            for index, page_hash in enumerate(chunk):
                tier = next((tier for tier, has in listed if has[index]), None)
                if tier is None and self._look_ups.lists(request, page_hash):
                    tier = distant
                if tier is None or self._removals.has(page_hash):
                    return tiers
                tiers.append(tier)
        return tiers

    def _pump(self) -> None:
        """Hand the next pages of the loads to the readers, as far as there are buffers."""
        for load in self._loads:
            while pages := load.next_batch(BATCH_PAGES):
                buffers: list[int] = []
                while len(buffers) < len(pages):
                    buffer = self._area.ledger.take_for_read()
                    if buffer is None:
                        break
                    buffers.append(buffer)
                if not buffers:
                    return
                pages = pages[: len(buffers)]
                load.requested(pages)
                # A late page is still worth having: it enters as a warm one.
                limit_s = max(0.0, load.expected_end_s - self._clock()) + self._parts.stuck_s
                read = PageRead(
                    load.number,
                    pages,
                    tuple(PageKey(*load.names[page]) for page in pages),
                    tuple(buffers),
                    tuple(self._area.views[buffer] for buffer in buffers),
                    load.tiers[pages.start],
                    time.monotonic() + limit_s,
                )
                self._reading[read] = False
                self._parts.mover.read(read)

    def _publish(self, load: Load, most: int) -> int:
        """Put the pages that have arrived into the tree; returns how many."""
        ready = load.ready()[: max(0, most)]
        if not ready or load.is_over:
            return 0
        cache, size, key = self._cache, self._size, self._keys[load.number]
        session = self._sessions[load.number]
        lease = lease_computed(cache, key, (load.first + len(load.names)) * size)
        begin = load.first + load.num_published
        known = lease.num_tokens // size - begin
        if known < 0:  # pages before it were evicted meanwhile
            cache.release(lease, session=session)
            self._area.free(load.cut(load.num_published))
            return 0
        self._area.free(load.published(min(known, len(ready))))  # somebody computed them meanwhile
        ready = ready[known:]
        # Those that the lease holds are not available any more.
        ready = ready[: cache.num_available]
        private = b""
        try:
            if ready:
                private = cache.reserve(len(ready)).packed
                self._copies_out.take_evicted()
                for page, buffer in zip(Pages(private), ready, strict=True):
                    self._parts.device.write_page(page, self._area.views[buffer])
                end = begin + known + len(ready)
                lease, private = publish_copies(cache, lease, key.prefix(end * size), private)
                num_published = len(ready) - len(private) // ID_BYTES
                self._count_published(load, num_published)
                self._area.free(load.published(num_published))
                if private:  # another request computes the next page
                    self._area.free(load.cut(load.num_published))
        finally:
            cache.release(lease, Pages(private), session)
        return len(ready)

    def _count_published(self, load: Load, count: int) -> None:
        for page in range(load.num_published, load.num_published + count):
            tier = load.tiers[page]
            self._counts.loaded[tier] = self._counts.loaded.get(tier, 0) + 1
            for request in self._loads.waiters(load):
                if page < self._loads.needs(request):
                    tokens = request.tier_tokens
                    tokens[tier] = tokens.get(tier, 0) + self._size

    def _wake_served(self, load: Load) -> None:
        """Wake the requests whose own pages are all there; without others, the rest is not read."""
        served = self._loads.take_served(load)
        for tier in set(load.tiers) if served else ():
            self._costs.in_time(tier)
        self._awake.extend(served)
        if served and not self._loads.waiters(load) and not load.is_over:
            self._drop(load)

    def _give_up_lost(self, load: Load, now_s: float) -> None:
        """Let those requests of a load compute that would lose by waiting on.

        What was read, and what is being read, still enters the pool; nothing more is read for nobody.
        """
        lost = [
            request for request in self._loads.waiters(load) if self._is_lost(load, request, now_s)
        ]
        if not lost:
            return
        self._counts.loads_late += 1
        arrived = load.num_published
        self._explain(load, lost, "late", arrived, len(load.names))
        self._costs.late(load.tiers[min(load.num_arrived, len(load.tiers) - 1)], now_s)
        for request in lost:
            for tier in load.tiers[arrived : self._loads.needs(request)]:
                self._counts.computed[tier] = self._counts.computed.get(tier, 0) + 1
            self._loads.leave(request)
            self._loads.exhaust(request)
        self._awake.extend(lost)
        if not self._loads.waiters(load):
            load.stop()

    def _is_lost(self, load: Load, request: Request, now_s: float) -> bool:
        wait = self._loads.wait_of(request)
        if wait is None:
            return False
        num_arrived, last = load.num_arrived, self._loads.needs(request)
        left_s = math.inf
        if num_arrived:
            left_s = (now_s - load.begin_s) * max(0, last - num_arrived) / num_arrived
        next_page = load.first + min(num_arrived, last)
        return self._costs.is_lost(wait, now_s, next_page, load.first + last, left_s)

    def _explain(
        self, load: Load, requests: Iterable[Request], reason: str, begin: int, end: int
    ) -> None:
        """Tell requests of a load why these pages of it are computed; the earliest page counts."""
        begin_token, end_token = ((load.first + page) * self._size for page in (begin, end))
        miss = TierMiss(load.tiers[begin], reason, begin_token, end_token)
        for request in requests:
            other = request.tier_miss
            # One before this load is of an earlier load, and was overcome.
            is_overcome = other is not None and other.begin < load.first * self._size
            if other is None or is_overcome or begin_token <= other.begin:
                request.tier_miss = miss

    def _end_load(self, load: Load) -> None:
        """Wake who waits for a load, and drop what is left of it."""
        self._awake.extend(self._loads.take_waiters(load))
        self._drop(load)

    def _leave(self, request: Request) -> None:
        load = self._loads.leave(request)
        if load is not None:  # nobody waits for it any more
            self._drop(load)

    def _drop(self, load: Load) -> None:
        self._area.free(load.drop())
        if load.is_settled:
            self._settle(load)

    def _settle(self, load: Load) -> None:
        if self._loads.get(load.number) is load:
            self._loads.settle(load)
            del self._keys[load.number], self._sessions[load.number]

    # -- results -------------------------------------------------------------------------------

    def read_ended(self, result: ReadEnded) -> None:
        """Give the pages of a read to their load, and free the other buffers."""
        read = result.read
        self._reading.pop(read, None)
        load = self._loads.get(read.load)
        assert load is not None, "a load is forgotten while it is read"
        for page, buffer, outcome in zip(read.pages, read.buffers, result.outcomes, strict=True):
            if read.tier == self._parts.distant and outcome is not ReadOutcome.LATE:
                self._copies_out.note_distant([load.names[page].hash], are_there=bool(outcome))
            elif not outcome and outcome is not ReadOutcome.LATE:
                self._copies_out.events.removed(read.tier, [load.names[page].hash])
            if outcome:
                self._area.ledger.fill(buffer)
                if not load.arrived(page, buffer):
                    self._area.ledger.free(buffer)
            else:
                self._area.ledger.free(buffer)
                self._area.free(load.failed(page))
                self._explain(load, self._loads.waiters(load), outcome.value, page, page + 1)
                if outcome is ReadOutcome.LATE:  # the store still has it: do not try again
                    for request in self._loads.waiters(load):
                        self._loads.exhaust(request)
                if outcome is not ReadOutcome.ABSENT:
                    kinds = self._counts.read_errors
                    kinds[outcome.value] = kinds.get(outcome.value, 0) + 1
        self._measurements.read_ended(load, result)

    def _find_stuck(self) -> None:
        now_s = time.monotonic()
        for read, is_counted in self._reading.items():
            if not is_counted and now_s > read.deadline + self._parts.stuck_s:
                self._reading[read] = True
                self._counts.stuck_reads += 1
                self._num_stuck += 1
                if self._num_stuck == MAX_STUCK:
                    self.turn_off(f"{MAX_STUCK} reads did not return")

    def check(self) -> None:
        """Raise InvariantError if a buffer or a load has not one owner."""
        self._loads.check()
        self._look_ups.check()
        self._area.ledger.check([buffer for load in self._loads for buffer in load.buffers])


def _num_common(load: Load, hashes: Sequence[bytes]) -> int:
    """Pages of a load, from the first on, that a prompt has whose next pages are these."""
    num_pages = load.num_published
    for name, page_hash in zip(load.names[num_pages:], hashes, strict=False):
        if name.hash != page_hash:
            break
        num_pages += 1
    return num_pages
