"""Copies of part of a cached page, for sequences whose prompt leaves the tree inside a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.attention.batch import AttentionBatch, PageCopy
from ramify.attention.sequence import RadixSequence
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.partial_page import (
    count_copied,
    count_partial_tokens,
    pin_partial_page,
    unpin_partial_page,
)
from ramify.cache.prefix_cache import PrefixCache
from ramify.kv.block_table import PagedBlockTable


class PartialReuse:
    """Finds the pages that a plan copies in part, and keeps them pinned until its step is over.

    A sequence holds the pin in `source`, from its first plan until that is committed, abandoned or
    undone; it counts the tokens as computed. The copy goes to its first page after the lease, which
    it needs in any case.

    Args:
        is_on: False finds none.
    """

    def __init__(self, cache: PrefixCache, table: PagedBlockTable, *, is_on: bool) -> None:
        self._cache, self._table, self.is_on = cache, table, is_on

    def count(self, key: CacheKey) -> int:
        """Tokens behind the match of `key` that a plan would copy, as far as can be seen now."""
        return count_partial_tokens(self._cache, key) if self.is_on else 0

    def attach(self, sequence: RadixSequence, key: CacheKey | None) -> None:
        """Pin the page to copy from for a sequence that has just leased its prefix, if there is one."""
        lease = sequence.lease
        if not self.is_on or key is None or not sequence.reuse or lease is None:
            return
        sequence.source = pin_partial_page(self._cache, lease, key)
        if sequence.source is not None:
            sequence.num_copied = sequence.source.num_tokens
            sequence.num_computed += sequence.num_copied

    def reattached(self, sequence: RadixSequence, first: Lease) -> None:
        """Keep the source of a sequence that replaced its `first` lease, unless the new one is longer."""
        if sequence.source is None or sequence.lease is None:
            return
        if sequence.lease.num_tokens == first.num_tokens:
            sequence.num_computed += sequence.num_copied
        else:
            self.end(sequence)
            sequence.num_copied = 0

    def drop(self, sequences: Sequence[RadixSequence]) -> bool:
        """Let sequences that are attached, but have no row yet, copy nothing; False if none would."""
        holding = [sequence for sequence in sequences if sequence.source is not None]
        for sequence in holding:
            self.end(sequence)
            sequence.num_computed -= sequence.num_copied
            sequence.num_copied = 0
        return bool(holding)

    def with_copies(
        self, batch: AttentionBatch, sequences: Sequence[RadixSequence]
    ) -> AttentionBatch:
        """The batch of a plan with the copies of its fresh sequences, which have their pages."""
        copies = list[PageCopy]()
        for sequence in sequences:
            source, row = sequence.source, sequence.row
            if source is not None and row is not None:
                target = self._table.array[row, sequence.num_computed // self._cache.page_size]
                copies.append(PageCopy(source.page, int(target), source.num_tokens))
        return replace(batch, page_copies=tuple(copies)) if copies else batch

    def count_hits(self, sequences: Sequence[RadixSequence]) -> None:
        """Add what fresh sequences copy to the hits of their lookups, once for each request."""
        for sequence in sequences:
            lease = sequence.lease
            if sequence.source is not None and lease is not None and not lease.is_again:
                count_copied(self._cache, lease, sequence.source.num_tokens)

    def end(self, sequence: RadixSequence) -> None:
        """Unpin the page that a sequence was copied from; it may hold none."""
        source, sequence.source = sequence.source, None
        if source is not None:
            unpin_partial_page(self._cache, source)
