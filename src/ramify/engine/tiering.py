"""`EngineTiering`: joins the cache tiers to the step: copies out, loads for waiting requests, removals.

For the engine's thread, between two calls of the executor. `cache.tiers` and `cache.tier_loads` have
the decisions, `kv.offload` the threads.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ramify.attention.batch import AttentionBatch
from ramify.cache.key import CacheKey, namespace_hash
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tier_costs import TierSpeed
from ramify.engine.request import Request
from ramify.engine.tier_copies import CopiesOut
from ramify.engine.tier_events import TierEvents
from ramify.engine.tier_loading import IDLE_WAIT_S, CopiesIn
from ramify.engine.tier_measurements import START_LIMIT_S, TierMeasurements
from ramify.engine.tier_parts import PendingRemovals, StagingArea, TierCounts, TierParts, TierStats
from ramify.kv.mover_jobs import LookedUp, ProbeEnded, ReadEnded, Removal, Removed, Written

CLOSE_LIMIT_S = 10.0  # for the stores of old weights
CHECK_S = 1.0  # between two looks at what was announced of the tiers
STALLED_S = 60.0  # without a result, twice what a store may take for a write
DROPPED_LIMIT_S = 1.0  # for those of an engine that was not closed
# Removed pages that wait for a writer that hangs, beside four times those of the pool.
MAX_REMOVED_PAGES = 65_536

logger = logging.getLogger(__name__)


class EngineTiering:
    """The tiers of one engine.

    Args:
        clock: seconds, the engine's.
        max_step_tokens: of a prompt in one step.
        max_model_len: of a prompt.
    """

    def __init__(
        self,
        cache: PrefixCache,
        parts: TierParts,
        clock: Callable[[], float],
        *,
        max_step_tokens: int,
        max_model_len: int,
    ) -> None:
        self._size = cache.page_size
        self.counts, self._removals = TierCounts(), PendingRemovals()
        self._max_removed = max(MAX_REMOVED_PAGES, 4 * cache.num_pages)
        self.measurements = TierMeasurements(
            parts.step_model,
            clock,
            is_calibrated=parts.is_calibrated,
            page_size=cache.page_size,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
        )
        self._out = CopiesOut(cache, self.counts)
        self._in = CopiesIn(cache, clock, self.counts, self.measurements, self._out, self._removals)
        self._queue = self._out.queue
        self._is_closed = False
        self._clock, self._checked_s = clock, clock()
        self._begin(parts)

    def _begin(self, parts: TierParts) -> None:
        """Use these stores, with nothing in flight."""
        self._parts = parts
        # If nobody closes them: another engine may open the directory then.
        self._finalizer = weakref.finalize(self, parts.mover.close, DROPPED_LIMIT_S)
        self._area = StagingArea(parts.device.page_bytes, parts.staging_bytes)
        self._removals.clear()
        self._out.begin(parts, self._area)
        self._in.begin(parts, self._area)
        self.measurements.begin(parts)
        self.wait_for_probes(START_LIMIT_S)

    # -- copies out ----------------------------------------------------------------------------

    def demoting(self) -> AbstractContextManager[None]:
        """See `WriteQueue.demoting`."""
        return self._queue.demoting()

    def before_writes(self) -> None:
        """Take copies of evicted pages: what the executor does next may overwrite them."""
        self._remove_copies()
        self._out.take_evicted()

    def planned(self, requests: Sequence[Request]) -> None:
        """Queue the pages that requests begin to read from the tree: they are used a second time."""
        self.measurements.step_begun()
        for request in requests:
            sequence = request.sequence
            if request.cache_counts is None and sequence.num_read and sequence.lease is not None:
                self._queue.add_lazy(sequence.lease.pages[: sequence.num_read // self._size])

    def computed(self, batch: AttentionBatch, *, is_idle: bool) -> None:
        """A step has ended, the last one for now if `is_idle`."""
        self.measurements.step_ended(batch)
        if is_idle:
            self.before_writes()
            self._out.take_lazy(self._out.num_waiting)

    def copy_lazily(self) -> None:
        """Copy out a few cached pages that wait for it, beside a step."""
        self._out.take_share()

    # -- removals ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove every page from every tier, for good."""
        self._queue.take_removed()
        self._queue.take_urgent()
        self._remove(Removal(None))

    def distrust(self) -> None:
        """Remove every page from every tier, and copy none that is in the pool: some are damaged."""
        self._queue.forget()
        self.clear()

    def refuse_namespace(self, namespace: bytes) -> None:
        """Never copy pages of a namespace."""
        self._queue.refuse_namespace(namespace_hash(namespace))

    def remove_key(self, key: CacheKey, num_kept: int) -> None:
        """Remove the pages of a key behind its first `num_kept` tokens."""
        hashes = key.page_hashes(self._size)[num_kept // self._size :]
        if hashes:
            self._queue.discard_urgent(set(hashes))
            self._remove(Removal(tuple(hashes)))

    def weights_replaced(self) -> None:
        """Use the stores of the present weights; what is in flight for the old ones is dropped."""
        self.reset()
        self._queue.forget()
        self._queue.take_removed()
        reopen = self._parts.reopen
        if reopen is None:
            return
        self._finalizer.detach()
        self._parts.mover.close(CLOSE_LIMIT_S)
        self._begin(reopen())

    def _remove_copies(self) -> None:
        if hashes := self._queue.take_removed():
            self._remove(Removal(tuple(hashes)))

    def _remove(self, removal: Removal) -> None:
        num_pages = len(removal.hashes or ()) + self._removals.num_pages
        if removal.hashes is not None and num_pages > self._max_removed:
            logger.warning(
                "%d removed pages wait for the cache tiers, whose writer is slow or hangs: every page is "
                "removed from them instead",
                num_pages,
            )
            removal = Removal(None)
        self._removals.add(removal)
        self._out.removed(removal.hashes)
        self._in.end_loads(None if removal.hashes is None else set(removal.hashes))
        self._parts.mover.remove(removal)

    def _removed(self, result: Removed) -> None:
        self._removals.discard(result.removal)
        # The store beyond a network owes the removal, and serves nothing before it has made it.
        if failed := [tier for tier in result.failed if tier != self._parts.distant]:
            self._in.turn_off(f"pages could not be removed from {', '.join(failed)}")

    # -- loads ---------------------------------------------------------------------------------

    def prefetch(self, request: Request) -> None:
        """Begin to load for a request that was just queued, if few others do."""
        self._remove_copies()
        self._in.prefetch(request)

    def holds(self, request: Request) -> bool:
        """See `PrefixLoads.holds`."""
        self._remove_copies()
        return self._in.holds(request)

    def forget(self, request: Request) -> None:
        """See `PrefixLoads.forget`."""
        self._in.forget(request)

    def reset(self) -> None:
        """Drop all loads: the queues that their requests waited in are gone."""
        self._in.reset()

    def poll(self) -> None:
        """Take the mover's results: free buffers, and publish the pages that have been read."""
        for result in self._parts.mover.take_results():
            if isinstance(result, Written):
                self._out.ended(result)
            elif isinstance(result, ReadEnded):
                self._in.read_ended(result)
            elif isinstance(result, ProbeEnded):
                self.measurements.probe_ended(result)
            elif isinstance(result, LookedUp):
                self._in.looked_up(result)
            else:
                self._removed(result)
        self._remove_copies()
        self._in.publish_arrived()
        if self.events.is_open and (now_s := self._clock()) >= self._checked_s + CHECK_S:
            self._checked_s = now_s
            self._out.check_announced()

    def take_awake(self) -> list[Request]:
        """The requests that wait for a load no longer."""
        return self._in.take_awake()

    def wait(self) -> None:
        """Wait a moment for a load, if there is one: nothing else is to be done."""
        self._in.wait()

    # -- an idle engine ------------------------------------------------------------------------

    @property
    def has_copies_left(self) -> bool:
        """Whether pages wait to be copied out; or events to be read, where somebody reads them."""
        if self._out.num_waiting or self._queue.num_urgent:
            return True
        return self.events.is_open and (self.num_buffers_in_use > 0 or self.events.num_untaken > 0)

    def tend(self) -> None:
        """Go on with copies while the engine is idle."""
        self.before_writes()
        self.poll()
        self._out.take_lazy(self._out.num_waiting)

    def wait_for_buffers(self) -> None:
        """Wait a moment for the writer, so that copies can go on."""
        self._parts.mover.wait(IDLE_WAIT_S)

    # -- state ---------------------------------------------------------------------------------

    @property
    def events(self) -> TierEvents:
        """What the tiers got and lost, for routers outside."""
        return self._out.events

    @property
    def reading_off(self) -> str:
        """Why nothing is read from the tiers any more; empty: it is."""
        return self._in.off

    @property
    def num_buffers_in_use(self) -> int:
        """Staging buffers that are not free."""
        return self._area.ledger.num_in_use

    @property
    def num_removed_pages(self) -> int:
        """Removed pages that the writer has still to remove from the tiers."""
        return self._removals.num_pages

    def stats(self) -> dict[str, TierStats]:
        """The figures of each store, by tier."""
        loaded, computed, speeds = self.counts.loaded, self.counts.computed, self.speeds()
        return {
            store.tier: TierStats.of(
                store.counts(),
                speeds[store.tier],
                page_bytes=store.page_bytes,
                num_loaded=loaded.get(store.tier, 0),
                num_computed=computed.get(store.tier, 0),
            )
            for store in self._parts.stores
        }

    def tiers_of(self, hashes: Sequence[bytes]) -> list[str]:
        """For each page, the fastest store of this machine that lists it; empty: none does."""
        tiers = [""] * len(hashes)
        for store in reversed(self._parts.near):
            for index, is_listed in enumerate(self._parts.listed(store, hashes)):
                if is_listed and not self._removals.has(hashes[index]):
                    tiers[index] = store.tier
        return tiers

    def wait_for_probes(self, limit_s: float) -> None:
        """Wait until every tier is measured, at most `limit_s`."""
        end_s, mover = time.monotonic() + limit_s, self._parts.mover
        while self.measurements.is_probing and mover.wait(max(0.0, end_s - time.monotonic())):
            self.poll()

    def speeds(self) -> dict[str, TierSpeed]:
        """What each tier is worth to this engine, by tier."""
        return self.measurements.speeds()

    def totals(self) -> dict[str, int]:
        """Totals of the engine's traffic with its tiers, by name."""
        counts = self.counts
        return {
            "loads": counts.loads,
            "late_loads": counts.loads_late,
            "refused_loads": counts.loads_refused,
            "dropped_pages": counts.dropped,
            "unwritten_pages": counts.not_written,
            "stuck_reads": counts.stuck_reads,
            "look_ups": counts.look_ups,
            "late_look_ups": counts.look_ups_late,
        }

    def check(self) -> None:
        """Raise InvariantError if a page, a staging buffer or a load has not one owner."""
        self._queue.check()
        self._in.check()

    def close(self, limit_s: float) -> bool:
        """Write every cached page that outlives the engine, then close the stores.

        Returns whether that was done within `limit_s`. A second call does nothing.
        """
        end_s = time.monotonic() + limit_s
        try:
            if not self._is_closed:
                self._write_everything(end_s)
        finally:
            # Whatever failed: the next engine on the directory must not be refused.
            was_closed = self.abandon(end_s - time.monotonic())
        return was_closed

    def flush(self) -> bool:
        """Write every cached page that outlives the engine.

        Returns whether that was done; False: a store did nothing for a minute.
        """
        self.before_writes()
        self._out.take_everything()
        while True:
            self.poll()
            self._out.take_lazy(self._out.num_waiting)
            if not self._out.num_waiting and not self._area.ledger.num_in_use:
                return True
            if not self._parts.mover.wait(STALLED_S):
                return False

    def _write_everything(self, end_s: float) -> None:
        self._in.turn_off_quietly("the engine is closed")
        self.before_writes()
        self._out.take_everything()
        while self._out.num_waiting and (left_s := end_s - time.monotonic()) > 0:
            self.poll()
            self._out.take_lazy(self._out.num_waiting)
            if self._out.num_waiting:
                self._parts.mover.wait(min(left_s, 1.0))

    def abandon(self, limit_s: float) -> bool:
        """Close the stores without a copy of what is in the pool: nobody knows whether it is right.

        Returns whether that was done within `limit_s`. A second call does nothing.
        """
        if self._is_closed:
            return True
        self._is_closed = True
        self._out.detach()
        self._finalizer.detach()
        was_closed = self._parts.mover.close(max(0.0, limit_s))
        if not was_closed and (num_pages := self._removals.num_pages):
            logger.error(
                "%d pages were removed and the cache tiers may still have them, since their writer "
                "hangs: delete the cache directory, or a restart may read them",
                num_pages,
            )
        return was_closed
