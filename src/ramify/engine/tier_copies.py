"""`CopiesOut`: copies pages of the pool into staging buffers, for the writers of the tiers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ramify.cache.inspection import pages_by_use
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.promotion import attach_sink
from ramify.cache.tiers import PageName, WriteQueue
from ramify.engine.tier_distant import DistantCopies
from ramify.engine.tier_events import TierEvents
from ramify.engine.tier_parts import StagingArea, TierCounts, TierParts
from ramify.engine.write_share import WriteShare
from ramify.kv.mover_jobs import PageWrite, Written
from ramify.kv.stores.page_store import PageKey

LOOKED_UP = 64  # pages that the stores of this machine are asked for at once


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
        self._share, self._stepped_s = WriteShare(parts.device.page_bytes), time.perf_counter()
        # Copied, and not yet with the writer: of this machine's stores, of the one beyond a network.
        self._ready: tuple[deque[PageWrite], deque[PageWrite]] = deque(), deque()
        self._is_handing_over = False  # outside a block: it was interrupted
        self.events.removed_everywhere(None)
        self._distant = DistantCopies(parts, self.queue, area.ledger.num_buffers)

    @property
    def num_waiting(self) -> int:
        """Cached pages that are to be copied when there is time."""
        return self.queue.num_lazy + self._distant.num_waiting

    def take_evicted(self) -> None:
        """Copy evicted pages before they are overwritten; without a buffer they are dropped."""
        if not self.queue.num_urgent:
            return
        evicted = self.queue.take_urgent()
        with self._handing_over():
            for (page, name), tiers in zip(
                evicted, self._lacking(evicted, is_evicted=True), strict=True
            ):
                is_copied = self._copy_here(page, name, tiers)
                if self._distant.wants(name.hash):
                    is_copied = self._send(page, name) and is_copied
                self._counts.dropped += not is_copied

    def take_share(self) -> None:
        """Copy a few cached pages that wait for it, beside a step: no more than its share of the time."""
        begin_s = time.perf_counter()
        self._share.add_step(begin_s - self._stepped_s)
        self._stepped_s = begin_s
        if self.num_waiting and (count := self._share.num_pages):
            before = self._counts.queued
            self.take_lazy(count)
            self._share.copied(self._counts.queued - before, time.perf_counter() - begin_s)

    def take_lazy(self, count: int) -> None:
        """Copy up to `count` cached pages that wait for it, while there are buffers."""
        with self._handing_over():
            num_left, ledger = count, self._area.ledger
            # No more than there are buffers for: the others keep their places.
            while waiting := self.queue.take_lazy(min(num_left, LOOKED_UP, ledger.num_for_writes)):
                num_left -= len(waiting)
                self._copy_cached(waiting)
            for _ in range(count):
                if not self._distant.has_room or (sent := self._distant.take_waiting()) is None:
                    break
                if not self._send(*sent):
                    self._distant.wait(*sent)
                    break

    def take_everything(self) -> None:
        """Queue every page of the tree that may be copied, last used first: there may be no time for all."""
        self.queue.add_lazy(pages_by_use(self._cache))

    def ended(self, result: Written) -> None:
        """Free the buffer of a write, and count it."""
        write = result.write
        self._area.ledger.free(write.buffer)
        self._share.written(result.cpu_s)
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
        """These pages go from every tier; None: all. Their copies are with the writer: it keeps the order."""
        with self._handing_over():
            pass  # what interrupts have left in `_ready`
        self._distant.forget(hashes)
        self.events.removed_everywhere(hashes)

    def check_announced(self) -> None:
        """Compare some of the pages that were announced with the stores of this machine."""
        for store in self._parts.near:
            hashes = self.events.take_unchecked(store.tier)
            listed = self._parts.listed(store, hashes) if hashes else []
            lacking = [page for page, has in zip(hashes, listed, strict=True) if not has]
            self.events.removed(store.tier, lacking)

    def _copy_cached(self, pages: Sequence[tuple[int, PageName]]) -> None:
        """Copy pages of the tree, for which there are buffers."""
        for (page, name), tiers in zip(pages, self._lacking(pages, is_evicted=False), strict=True):
            is_copied = self._copy_here(page, name, tiers)
            assert is_copied, "there were fewer buffers than pages"
            if self._distant.wants(name.hash):
                self._distant.wait(page, name)

    def _copy_here(self, page: int, name: PageName, tiers: frozenset[str]) -> bool:
        """Copy a page for those stores of this machine that lack it; False: there is no buffer."""
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
        self._ready[tiers == self._distant.tiers].append(
            PageWrite(PageKey(*name), buffer, view, tiers)
        )
        return True

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """Give the writer what is copied in the block, at once: each call wakes it.

        An interrupt anywhere costs no buffer: a copy that has ended is in `_ready` until the writer has it,
        and the buffer of any other is given back here or by the next block.
        """
        if self._is_handing_over:
            self._recover()
        self._is_handing_over = True
        try:
            yield
            self._hand_over()
        except BaseException:
            self._recover()
            self._hand_over()
            raise
        self._is_handing_over = False

    def _hand_over(self) -> None:
        for waiting in self._ready:
            for write in waiting:  # first: the writer may be done with it before its call returns
                self._area.ledger.write(write.buffer)
            if waiting:
                self._parts.mover.write(waiting)

    def _recover(self) -> None:
        copied = {write.buffer for waiting in self._ready for write in waiting}
        self._area.ledger.recover(copied)

    def _lacking(
        self, pages: Sequence[tuple[int, PageName]], *, is_evicted: bool
    ) -> list[frozenset[str]]:
        """For each page, the stores of this machine that are to get it.

        Pages that stay in the pool are copied to stores that outlive it only.
        """
        hashes = [name.hash for _, name in pages]
        lacking: list[set[str]] = [set() for _ in pages]
        for store in self._parts.near:
            if store.tier in self._parts.read_only or (store.tier == "host" and not is_evicted):
                continue
            for tiers, is_listed in zip(lacking, self._parts.listed(store, hashes), strict=True):
                if not is_listed:
                    tiers.add(store.tier)
        return [*map(frozenset, lacking)]
