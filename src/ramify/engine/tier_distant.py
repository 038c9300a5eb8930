"""`DistantCopies`: which pages to send to the store beyond a network, without asking it for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final

from ramify.cache.tiers import PageName, WriteQueue
from ramify.engine.tier_parts import TierParts

KNOWN_PAGES: Final = 1 << 16  # 10 MB of hashes
SHARE: Final = 4  # 1 / SHARE of the staging buffers: a slow server must not stop writes to the disk


class DistantCopies:
    """What the store is believed to have, and the pages of the pool that wait to be sent.

    The belief comes from writes, reads and look-ups, and all of it is dropped when a write fails: the
    server may have lost everything. Where it is wrong, a page is sent or computed once more.

    Args:
        num_buffers: staging buffers of all tiers.
    """

    def __init__(self, parts: TierParts, queue: WriteQueue, num_buffers: int) -> None:
        self.tiers = frozenset([parts.distant])
        self._store, self._queue = parts.distant_store, queue
        self._is_read_only = parts.distant in parts.read_only
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: dict[int, PageName] = {}  # pages of the tree
        self._num_in_flight, self._max_in_flight = 0, max(1, num_buffers // SHARE)

    @property
    def num_waiting(self) -> int:
        """Cached pages that wait to be sent."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another page may be in flight."""
        return self._num_in_flight < self._max_in_flight

    def wants(self, page_hash: bytes) -> bool:
        """Whether to send a page: the store takes pages, and is not known to have this one."""
        if self._store is None or self._is_read_only or page_hash in self._known:
            return False
        counts = self._store.counts()
        return not (counts.unavailable or counts.writing_off)

    def note(self, hashes: Iterable[bytes], *, are_there: bool) -> None:
        """Believe that the store has these pages, or lacks them."""
        for page_hash in hashes:
            self._known.pop(page_hash, None)
            if are_there:
                self._known[page_hash] = None
        while len(self._known) > KNOWN_PAGES:
            self._known.popitem(last=False)

    def forget(self, hashes: Collection[bytes] | None) -> None:
        """Believe nothing of these pages; None: of any."""
        if hashes is None:
            self._known.clear()
        else:
            self.note(hashes, are_there=False)

    def wait(self, page: int, name: PageName) -> None:
        """Send a page of the tree once there is room."""
        self._waiting[page] = name

    def take_waiting(self) -> tuple[int, PageName] | None:
        """The next page to send that is still in the tree under its name; None: there is none."""
        while self._waiting:
            page = next(iter(self._waiting))
            name = self._waiting.pop(page)
            if self._queue.name_of(page) == name and self.wants(name.hash):
                return page, name
        return None

    def sent(self) -> None:
        """Count a page that is in flight now."""
        self._num_in_flight += 1

    def ended(self, page_hash: bytes, *, is_stored: bool) -> None:
        """Count a page that arrived, or did not."""
        self._num_in_flight -= 1
        if is_stored:
            self.note([page_hash], are_there=True)
        else:
            self._known.clear()
