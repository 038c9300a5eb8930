"""Branch off a sequence and cut one: what a planner does to K/V that is computed, between steps."""

from __future__ import annotations

from collections.abc import Iterator

from ramify.attention.batch_reuse import BatchReuse
from ramify.attention.sequence import RadixSequence
from ramify.attention.window_release import WindowRelease
from ramify.cache.leases import Lease
from ramify.cache.prefix_cache import PrefixCache
from ramify.errors import CacheError
from ramify.kv.block_table import PagedBlockTable


class Branching:
    """Forks and rolls back sequences that no plan has in flight, over the parts of their planner.

    Args:
        by_lease: the planner's sequences by lease id; forks are added, leases replaced.
        order: numbers of the plans, see `RadixSequence.order`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        table: PagedBlockTable,
        window: WindowRelease,
        batches: BatchReuse,
        by_lease: dict[int, RadixSequence],
        order: Iterator[int],
    ) -> None:
        self._cache, self._table, self._window, self._batches = cache, table, window, batches
        self._by_lease, self._order = by_lease, order

    def fork(
        self, sequence: RadixSequence, lease: Lease
    ) -> tuple[RadixSequence, list[tuple[int, int]]]:
        """See `RadixAttentionPlanner.fork`; `lease` is the sequence's."""
        if not self._table.num_free_rows:
            raise CacheError("no free row in the block table; release a sequence first")
        num_held = max(0, -(-sequence.num_computed // self._cache.page_size) - len(lease.pages))
        num_copied = len(self._window.owned(sequence.private[:num_held]))
        if num_copied > self._cache.num_available:
            self._batches.forget()
            self._window.make_room(num_copied, self._by_lease.values())
        computed = sequence.private[:num_held]
        copied = self._window.owned(computed)  # perhaps fewer now
        pages = self._cache.reserve(len(copied))
        clone = sequence.clone_unplanned()
        clone.num_computed = clone.num_read = sequence.num_computed
        clone.has_looked_up = True
        clone.lease = self._cache.fork(lease)
        clone.private = [*computed[: num_held - len(copied)], *pages]
        clone.order, clone.row = next(self._order), self._table.allocate()
        self._table.append(clone.row, [*clone.lease.pages, *clone.private])
        self._by_lease[clone.lease.id] = clone
        return clone, list(zip(copied, pages, strict=True))

    def rollback(self, sequence: RadixSequence, lease: Lease, num_tokens: int) -> None:
        """See `RadixAttentionPlanner.rollback`; `lease` is the sequence's."""
        if not 0 <= num_tokens <= sequence.num_computed:
            raise CacheError(f"{num_tokens} tokens to keep of {sequence.num_computed} computed")
        if num_tokens < lease.num_tokens:
            num_tokens = num_tokens // self._cache.page_size * self._cache.page_size
        is_readable = self._window.is_readable(sequence, num_tokens)
        num_tokens = num_tokens if is_readable else 0
        if num_tokens < lease.num_tokens or not is_readable:
            self._batches.forget()
            sequence.lease = shorter = self._cache.fork(lease, num_tokens)
            self._by_lease[shorter.id] = self._by_lease.pop(lease.id)
            self._cache.release(lease, self._window.owned(sequence.private), sequence.session)
            sequence.private = []
            assert sequence.row is not None
            self._table.truncate(sequence.row, len(shorter.pages))
            num_tokens = shorter.num_tokens
        sequence.num_computed = num_tokens
