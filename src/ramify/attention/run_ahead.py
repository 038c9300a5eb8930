"""Plan the next tokens of sequences whose step is still in flight."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.attention.batch import AttentionBatch
from ramify.attention.batch_reuse import BatchReuse
from ramify.attention.sequence import RadixSequence
from ramify.cache.call_guard import guarded
from ramify.cache.prefix_cache import PrefixCache
from ramify.errors import CacheError
from ramify.kv.block_table import PagedBlockTable


class RunAhead:
    """Second plans: the next tokens of each sequence, behind a plan that is not committed yet.

    `plan` → `commit` of the first plan → `promote`, which makes the second plan the first. Nothing
    of a second plan is announced or published, and it evicts no page that a sequence holds. A
    sequence that ends with its first plan is released as any other.

    A device that runs the plans in order may do so without waiting for a commit: a page that is
    given back was read by earlier steps only, and its next owner writes in later ones.
    """

    def __init__(self, cache: PrefixCache, table: PagedBlockTable, batches: BatchReuse) -> None:
        self._cache, self._table, self._batches = cache, table, batches
        self.guard = cache.guard

    @guarded
    def plan(
        self, sequences: Sequence[RadixSequence], num_new: Sequence[int] | None = None
    ) -> AttentionBatch:
        """Plan tokens after the planned ones of each sequence; returns the step's metadata.

        Args:
            num_new: how many of each sequence; by default 1. A single token that follows all of
                `tokens` is one that the step in flight samples.

        Raises:
            CacheError: a sequence was never planned, has a second plan already, has fewer tokens, or
                does not fit in a row of the block table. Nothing changed.
            OutOfPagesError: there are too few pages. Nothing changed.
        """
        counts = [1] * len(sequences) if num_new is None else list(num_new)
        size, max_tokens = self._cache.page_size, self._table.max_tokens
        begins: list[int] = []
        needing_pages: list[tuple[RadixSequence, int]] = []
        total = 0
        for sequence, count in zip(sequences, counts, strict=True):
            lease, begin = sequence.lease, sequence.num_computed + sequence.num_planned
            if lease is None or sequence.num_ahead or sequence.num_draft:
                raise CacheError("only a live sequence with one plan and no drafts can run ahead")
            num_known = len(sequence.tokens) - begin
            is_sampled = count == 1 and not num_known and sequence.num_planned
            if not (1 <= count <= num_known or is_sampled):
                raise CacheError(
                    f"{count} tokens to plan of a sequence that has {num_known} tokens in no plan"
                )
            if (end := begin + count) > max_tokens:
                raise CacheError(
                    f"the sequence would have {end} tokens but a row of the block table holds "
                    f"{max_tokens}; build the table with more pages"
                )
            begins.append(begin)
            num_lacking = end - lease.num_tokens - len(sequence.private) * size
            if num_lacking > 0:
                num_missing = -(-num_lacking // size)
                needing_pages.append((sequence, num_missing))
                total += num_missing
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one plan")
        pages = [*self._cache.reserve(total)] if total else []
        begin = 0
        for sequence, num_missing in needing_pages:
            assert sequence.row is not None
            own = pages[begin : begin + num_missing]
            sequence.private.extend(own)
            self._table.append(sequence.row, own)
            begin += num_missing
        batch = self._batches.build_ahead(sequences, begins, counts)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_ahead = count
        return batch

    @guarded
    def promote(self, sequences: Sequence[RadixSequence]) -> None:
        """Make the second plan of sequences their first: that one is committed.

        Their tokens have to be known by now, those that the second plan computes included.
        """
        for sequence in sequences:
            assert sequence.num_ahead and not sequence.num_planned, "its first plan is in flight"
            num_uncomputed = len(sequence.tokens) - sequence.num_computed
            assert num_uncomputed >= sequence.num_ahead, "a planned token is not known"
            sequence.num_planned, sequence.num_ahead = sequence.num_ahead, 0

    @guarded
    def cancel(self, sequences: Sequence[RadixSequence]) -> None:
        """Drop the second plan of sequences that still have it; they keep their pages."""
        for sequence in sequences:
            sequence.num_ahead = 0

    @guarded
    def undo(self, sequences: Sequence[RadixSequence]) -> None:
        """Drop the promoted plan of sequences: its tokens are to be planned again; they keep their pages."""
        for sequence in sequences:
            assert sequence.num_planned and not sequence.num_ahead, "nothing was promoted"
            sequence.num_planned = 0
