"""`CopiesOut`: copies pages of the pool into staging buffers, for the writer of the tiers."""

from __future__ import annotations

from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.promotion import attach_sink
from ramify.cache.tiers import PageName, WriteQueue
from ramify.engine.tier_parts import StagingArea, TierCounts, TierParts
from ramify.kv.offload import PageWrite, Written
from ramify.kv.stores.page_store import PageKey

LAZY_BYTES = 1 << 20  # copied out per step that has other work; one page at least


class CopiesOut:
    """The pages that go out. For the engine's thread, between two calls of the executor."""

    def __init__(self, cache: PrefixCache, counts: TierCounts) -> None:
        self.queue = WriteQueue(cache.num_pages)
        self.detach = attach_sink(cache, self.queue)
        self._counts = counts

    def begin(self, parts: TierParts, area: StagingArea) -> None:
        """Write to these stores, through these buffers, from now on."""
        self._parts, self._area = parts, area
        self._max_lazy = max(1, LAZY_BYTES // parts.device.page_bytes)

    def take_evicted(self) -> None:
        """Copy evicted pages before they are overwritten; without a buffer they are dropped."""
        if self.queue.num_urgent:
            for page, name in self.queue.take_urgent():
                self._counts.dropped += not self._copy(page, name, is_evicted=True)

    def take_lazy(self, count: int | None = None) -> None:
        """Copy up to `count` cached pages that wait for it, while there are buffers."""
        for _ in range(min(self._max_lazy if count is None else count, self.queue.num_lazy)):
            [(page, name)] = self.queue.take_lazy(1)
            if not self._copy(page, name, is_evicted=False):
                self.queue.add_lazy([page])
                return

    def take_everything(self) -> None:
        """Queue every page of the tree that may be copied."""
        self.queue.add_lazy([page for page, _ in self.queue.named_pages()])

    def ended(self, result: Written) -> None:
        """Free the buffer of a write, and count it."""
        self._area.ledger.free(result.write.buffer)
        stored = [tier for tier, outcome in result.outcomes.items() if outcome]
        for tier in stored:
            self._counts.written[tier] = self._counts.written.get(tier, 0) + 1
        self._counts.not_written += len(stored) < len(result.write.tiers)

    def _copy(self, page: int, name: PageName, *, is_evicted: bool) -> bool:
        """Hand a copy to the writer, for the stores that lack it; False: there is no buffer.

        Pages that stay in the pool are copied to stores that outlive it only.
        """
        tiers = self._lacking(name.hash, is_evicted=is_evicted)
        if not tiers:
            return True
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
            for store in self._parts.stores
            if (is_evicted or store.tier != "host")
            and store.tier not in self._parts.read_only
            and not self._parts.listed(store, [page_hash])[0]
        )
