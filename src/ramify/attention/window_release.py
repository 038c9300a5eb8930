"""Release of pages outside the window of live sequences, where every layer has a sliding window."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ramify.attention.sequence import RadixSequence
from ramify.cache import window
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.prefix_cache import PrefixCache
from ramify.errors import OutOfPagesError
from ramify.kv.block_table import PagedBlockTable


class WindowRelease:
    """Frees the pages of sequences that no later query reads, and rewrites their rows.

    In leases, private pages and rows, the id of a released page is `cache.num_pages`. Without a
    window of the cache, nothing is ever released.

    Args:
        share: whether sequences publish their pages.
    """

    def __init__(self, cache: PrefixCache, table: PagedBlockTable, *, share: bool) -> None:
        self._cache, self._table, self._share = cache, table, share

    def num_available(self, sequences: Collection[RadixSequence]) -> int:
        """Pages that are free, evictable, or before the windows of `sequences`.

        Args:
            sequences: each with a lease. A page that another lease holds too is not counted.
        """
        num_pages = self._cache.num_available
        if self._cache.window is None:
            return num_pages
        num_private = sum(len(self._unread_private(sequence)) for sequence in sequences)
        num_shared = window.count_outside_window(self._cache, *_progress(sequences))
        return num_pages + num_private + num_shared

    def make_room(self, num_pages: int, sequences: Collection[RadixSequence]) -> None:
        """Free the pages before the windows of `sequences`, so that `num_pages` can be reserved.

        Raises:
            OutOfPagesError: that would not be enough; nothing changed.
        """
        num_available = self.num_available(sequences)
        if num_pages > num_available:
            stats = self._cache.stats()
            num_evictable = num_available - stats.free_pages  # and those before the windows
            pins = tuple((pin.id, pin.owner, pin.num_pages) for pin in self._cache.pins())
            raise OutOfPagesError(num_pages, stats.free_pages, num_evictable, stats.num_pages, pins)
        window.release_outside_window(self._cache, *_progress(sequences))
        for sequence in sequences:
            if unread := self._unread_private(sequence):
                begin = len(sequence.private) - len(self.owned(sequence.private))
                end = begin + len(unread)
                sequence.private[begin:end] = [self._cache.num_pages] * len(unread)
                self._cache.give_back(unread)
        self.rewrite_rows(sequences)

    def rewrite_rows(self, sequences: Collection[RadixSequence]) -> None:
        """Write the pages that sequences hold now into their rows, if any can have been released."""
        for sequence in sequences if self._cache.window is not None else ():
            if sequence.row is not None and sequence.lease is not None:
                pages = [*sequence.lease.pages, *sequence.private]
                held = self._table.num_pages(sequence.row)
                self._table.rewrite(sequence.row, 0, pages[:held])

    def owned(self, pages: Sequence[int]) -> list[int]:
        """`pages` without the released ones."""
        return [page for page in pages if page != self._cache.num_pages]

    def is_released(self, lease: Lease, key: CacheKey) -> bool:
        """Whether the page of `key` after a lease is in the tree, but nothing may attach to it."""
        return self._cache.window is not None and window.has_next_page(self._cache, lease, key)

    def is_readable(self, sequence: RadixSequence, num_tokens: int) -> bool:
        """Whether a sequence can go on from position `num_tokens`, up to which it is rolled back."""
        lease = sequence.lease
        if self._cache.window is None or lease is None:
            return True
        pages = [*lease.pages, *sequence.private]
        if num_tokens < lease.num_tokens:
            pages = pages[: num_tokens // self._cache.page_size]
        return window.is_readable(self._cache, pages, num_tokens)

    def _unread_private(self, sequence: RadixSequence) -> list[int]:
        """The private pages before its window, if it will never publish them."""
        lease, size, limit = sequence.lease, self._cache.page_size, sequence.max_shared
        limit = limit if self._share else 0
        if self._cache.window is None or lease is None or limit is None:
            return []
        if lease.num_tokens // size < limit // size:
            return []
        first_read = max(0, sequence.num_computed + 1 - self._cache.window) // size
        return self.owned(sequence.private[: max(0, first_read - lease.num_tokens // size)])


def _progress(sequences: Collection[RadixSequence]) -> tuple[list[Lease], list[int]]:
    """The leases of sequences, and how many of their tokens are computed."""
    leases = [sequence.lease for sequence in sequences if sequence.lease is not None]
    return leases, [sequence.num_computed for sequence in sequences if sequence.lease is not None]
