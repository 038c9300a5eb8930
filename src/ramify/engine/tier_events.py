"""`TierEvents`: which pages the tiers got and lost, for routers outside; apart from the cache's own events.

Mirrors of the pool, which follow its events by sequence and digest, never see these.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from ramify.cache.events import CacheEvent

MAX_ANNOUNCED: Final = 1 << 16  # pages of a tier; the oldest are announced as removed
MAX_EVENTS: Final = 1 << 16  # between two calls of `take`; more are lost, and counted
CHECKED_PAGES: Final = 1024  # at once


class TierEvents:
    """Events of pages by tier, and the pages that were announced. Does nothing until `open`.

    An event is "stored" or "removed" with the tier's name, of one or several pages without tokens. A
    page is announced once it is written, and removed when the store is found to lack it.
    """

    def __init__(self, *, max_announced: int = MAX_ANNOUNCED, max_events: int = MAX_EVENTS) -> None:
        self._max_announced = max_announced
        self._events: deque[CacheEvent] = deque(maxlen=max_events)
        # Tier → hash of the page → that of the page before it, longest unchecked first.
        self._announced: dict[str, OrderedDict[bytes, bytes]] = {}
        self.is_open = False
        self.num_dropped = 0

    @property
    def num_untaken(self) -> int:
        """Events that `take` will return."""
        return len(self._events)

    def open(self) -> None:
        """Note from now on what is written and removed."""
        self.is_open = True

    def close(self) -> None:
        """Note nothing any more."""
        self.is_open = False
        self._announced.clear()
        self._events.clear()

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        events = [*self._events]
        self._events.clear()
        return events

    def announced(self) -> tuple[CacheEvent, ...]:
        """Every page that was announced and not removed, as "stored" events."""
        return tuple(
            _event("stored", tier, [page_hash], parent)
            for tier, pages in self._announced.items()
            for page_hash, parent in pages.items()
        )

    def stored(self, tier: str, page_hash: bytes, parent: bytes) -> None:
        """A tier has a page; that it has it already is no event."""
        if not self.is_open:
            return
        pages = self._announced.setdefault(tier, OrderedDict())
        if page_hash in pages:
            return
        pages[page_hash] = parent
        self._put(_event("stored", tier, [page_hash], parent))
        if len(pages) > self._max_announced:
            oldest, _ = pages.popitem(last=False)
            self._put(_event("removed", tier, [oldest]))

    def removed(self, tier: str, hashes: Iterable[bytes]) -> None:
        """A tier lacks pages."""
        pages = self._announced.get(tier)
        if not pages:
            return
        gone = [page_hash for page_hash in hashes if page_hash in pages]
        for page_hash in gone:
            del pages[page_hash]
        if gone:
            self._put(_event("removed", tier, gone))

    def removed_everywhere(self, hashes: Iterable[bytes] | None) -> None:
        """No tier has these pages; None: any page."""
        wanted = None if hashes is None else [*hashes]
        for tier, pages in self._announced.items():
            self.removed(tier, [*pages] if wanted is None else wanted)

    def take_unchecked(self, tier: str) -> list[bytes]:
        """The pages of a tier that were longest not compared with its store; the others are next."""
        pages = self._announced.get(tier, OrderedDict())
        hashes = [page_hash for page_hash, _ in zip(pages, range(CHECKED_PAGES), strict=False)]
        for page_hash in hashes:
            pages.move_to_end(page_hash)
        return hashes

    def _put(self, event: CacheEvent) -> None:
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)


def _event(kind: str, tier: str, hashes: list[bytes], parent: bytes = b"") -> CacheEvent:
    return CacheEvent(0, kind, parent_hash=parent, hashes=b"".join(hashes), tier=tier)
