"""`CopiesOut`: copies pages of the pool into staging buffers, for the writers of the tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ramify.cache.inspection import pages_by_use
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.promotion import attach_sink
from ramify.cache.tiers import PageName, WriteQueue
from ramify.engine.tier_distant import DistantCopies
from ramify.engine.tier_events import TierEvents
from ramify.engine.tier_parts import StagingArea, TierCounts, TierParts
from ramify.kv.mover_jobs import PageWrite, Written
from ramify.kv.stores.page_store import PageKey

LAZY_BYTES = 1 << 20  # copied out per step that has other work; one page at least


class CopiesOut:
    """The pages that go out. For the engine's thread, between two calls of the executor."""

    def __init__(self, cache: PrefixCache, counts: TierCounts) -> None:
        self._cache, self.queue = cache, WriteQueue(cache.num_pages)
        self.detach = attach_sink(cache, self.queue)
        self._counts = counts
        self.events = TierEvents()

    def begin(self, parts: TierParts, area: StagingArea) -> None:
        """Write to these stores, through these buffers, from now on."""
        self._parts, self._area = parts, area
        self._max_lazy = max(1, LAZY_BYTES // parts.device.page_bytes)
        self.events.removed_everywhere(None)
        self._distant = DistantCopies(parts, self.queue, area.ledger.num_buffers)

    @property
    def num_waiting(self) -> int:
        """Cached pages that are to be copied when there is time."""
        return self.queue.num_lazy + self._distant.num_waiting

    def take_evicted(self) -> None:
        """Copy evicted pages before they are overwritten; without a buffer they are dropped."""
        if self.queue.num_urgent:
            for page, name in self.queue.take_urgent():
                is_copied = self._copy_here(page, name, is_evicted=True)
                if self._distant.wants(name.hash):
                    is_copied = self._send(page, name) and is_copied
                self._counts.dropped += not is_copied

    def take_lazy(self, count: int | None = None) -> None:
        """Copy up to `count` cached pages that wait for it, while there are buffers."""
        count = self._max_lazy if count is None else count
        for _ in range(min(count, self.queue.num_lazy)):
            [(page, name)] = self.queue.take_lazy(1)
            if not self._copy_here(page, name, is_evicted=False):
                self.queue.add_lazy([page])
                break
            if self._distant.wants(name.hash):
                self._distant.wait(page, name)
        for _ in range(count):
            if not self._distant.has_room or (waiting := self._distant.take_waiting()) is None:
                break
            if not self._send(*waiting):
                self._distant.wait(*waiting)
                break

    def take_everything(self) -> None:
        """Queue every page of the tree that may be copied, last used first: there may be no time for all."""
        self.queue.add_lazy(pages_by_use(self._cache))

    def ended(self, result: Written) -> None:
        """Free the buffer of a write, and count it."""
        write = result.write
        self._area.ledger.free(write.buffer)
        stored = [tier for tier, outcome in result.outcomes.items() if outcome]
        for tier in stored:
            self._counts.written[tier] = self._counts.written.get(tier, 0) + 1
            self.events.stored(tier, write.key.hash, write.key.parent)
        self._counts.not_written += len(stored) < len(write.tiers)
        if write.tiers == self._distant.tiers:
            self._distant.ended(write.key.hash, is_stored=bool(stored))

    def note_distant(self, hashes: Iterable[bytes], *, are_there: bool) -> None:
        """Believe that the store beyond a network has these pages, or lacks them."""
        hashes = [*hashes]
        self._distant.note(hashes, are_there=are_there)
        if not are_there:
            self.events.removed(self._parts.distant, hashes)

    def removed(self, hashes: Collection[bytes] | None) -> None:
        """These pages go from every tier; None: all."""
        self._distant.forget(hashes)
        self.events.removed_everywhere(hashes)

    def check_announced(self) -> None:
        """Compare some of the pages that were announced with the stores of this machine."""
        for store in self._parts.near:
            hashes = self.events.take_unchecked(store.tier)
            listed = self._parts.listed(store, hashes) if hashes else []
            lacking = [page for page, has in zip(hashes, listed, strict=True) if not has]
            self.events.removed(store.tier, lacking)

    def _copy_here(self, page: int, name: PageName, *, is_evicted: bool) -> bool:
        """Hand a copy to the writer of this machine's stores, for those that lack it.

        Pages that stay in the pool are copied to stores that outlive it only. Returns False if there
        is no buffer.
        """
        tiers = self._lacking(name.hash, is_evicted=is_evicted)
        return not tiers or self._copy(page, name, tiers)

    def _send(self, page: int, name: PageName) -> bool:
        """Hand a copy to the writer of the store beyond a network; False: there is no room for it."""
        is_sent = self._distant.has_room and self._copy(page, name, self._distant.tiers)
        if is_sent:
            self._distant.sent()
        return is_sent

    def _copy(self, page: int, name: PageName, tiers: frozenset[str]) -> bool:
        buffer = self._area.ledger.take_for_write()
        if buffer is None:
            return False
        view = self._area.views[buffer]
        try:
            self._parts.device.read_page(page, view)
        except BaseException:
            self._area.ledger.free(buffer)
            raise
        self._counts.queued += 1
        self._parts.mover.write(PageWrite(PageKey(*name), buffer, view, tiers))
        return True

    def _lacking(self, page_hash: bytes, *, is_evicted: bool) -> frozenset[str]:
        return frozenset(
            store.tier
            for store in self._parts.near
            if (is_evicted or store.tier != "host")
            and store.tier not in self._parts.read_only
            and not self._parts.listed(store, [page_hash])[0]
        )
