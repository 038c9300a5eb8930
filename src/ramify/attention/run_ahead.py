"""Plan one more token of sequences whose step is still in flight."""

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
    """Second plans: one token of each sequence, behind a plan that is not committed yet.

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
    def plan(self, sequences: Sequence[RadixSequence]) -> AttentionBatch:
        """Plan the token after the planned ones of each sequence; returns the step's metadata.

        The token may not be in `tokens` yet: the step in flight samples it.

        Raises:
            CacheError: a sequence was never planned, has a second plan already or tokens that no
                plan computes, or does not fit in a row of the block table. Nothing changed.
            OutOfPagesError: there are too few pages. Nothing changed.
        """
        size, needing_page = self._cache.page_size, list[RadixSequence]()
        for sequence in sequences:
            lease, end = sequence.lease, sequence.num_computed + sequence.num_planned
            if lease is None or sequence.num_ahead or sequence.num_draft:
                raise CacheError("only a live sequence with one plan and no drafts can run ahead")
            if not end <= len(sequence.tokens) <= end + (not sequence.num_planned):
                raise CacheError(
                    f"{len(sequence.tokens) - end} tokens of the sequence are in no plan; plan them "
                    "first"
                )
            if end >= self._table.max_tokens:
                raise CacheError(
                    f"the sequence would have {end + 1} tokens but a row of the block table holds "
                    f"{self._table.max_tokens}; build the table with more pages"
                )
            if end >= lease.num_tokens + len(sequence.private) * size:
                needing_page.append(sequence)
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one plan")
        for sequence, page in zip(
            needing_page,
            self._cache.reserve(len(needing_page)) if needing_page else (),
            strict=True,
        ):
            assert sequence.row is not None
            sequence.private.append(page)
            self._table.append(sequence.row, (page,))
        batch = self._batches.build_ahead(sequences)
        for sequence in sequences:
            sequence.num_ahead = 1
        return batch

    @guarded
    def promote(self, sequences: Sequence[RadixSequence]) -> None:
        """Make the second plan of sequences their first: that one is committed.

        Their tokens have to be known by now, the one that the second plan computes included.
        """
        for sequence in sequences:
            assert sequence.num_ahead and not sequence.num_planned, "its first plan is in flight"
            assert sequence.num_uncomputed == 1, "the planned token is not known"
            sequence.num_planned, sequence.num_ahead = 1, 0

    @guarded
    def cancel(self, sequences: Sequence[RadixSequence]) -> None:
        """Drop the second plan of sequences that still have it; they keep their pages."""
        for sequence in sequences:
            sequence.num_ahead = 0

    @guarded
    def undo(self, sequences: Sequence[RadixSequence]) -> None:
        """Drop the promoted plan of sequences: its token is to be planned again; they keep their pages."""
        for sequence in sequences:
            assert sequence.num_planned == 1 == sequence.num_uncomputed, "nothing was promoted"
            sequence.num_planned = 0
