"""Requests in, attention metadata out: the query is only what the cache does not have.

`plan` is atomic and runs in this order: validate all, pin all prefixes, check capacity for all,
and only then evict, allocate and announce. Sequences of one batch share too: a later one attaches
to the pages that an earlier one is about to compute.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count

import numpy as np

from ramify.attention.batch import AttentionBatch, sharing_arrays
from ramify.attention.page_demand import pages_needed, split_decodes, validate_plannable
from ramify.attention.sequence import RadixSequence
from ramify.cache.key import CacheKey, pack
from ramify.cache.leases import Lease
from ramify.cache.pages import ID_BYTES
from ramify.cache.prefix_cache import PrefixCache
from ramify.errors import CacheError, ConfigError, OutOfPagesError
from ramify.kv.block_table import PagedBlockTable

__all__ = ["RadixAttentionPlanner", "RadixSequence"]


class RadixAttentionPlanner:
    """A prefix cache and a block table behind three calls: `plan`, `commit`, `release`.

    Args:
        cache: owns the pages.
        table: rows for the live sequences; same page size as the cache.
        max_pool_pages: pages of the K/V pool, if there is one; the cache must not have more.
        share: False gives every sequence pages of its own and publishes nothing.
    """

    def __init__(
        self,
        cache: PrefixCache,
        table: PagedBlockTable,
        *,
        max_pool_pages: int | None = None,
        share: bool = True,
    ) -> None:
        if table.page_size != cache.page_size:
            raise ConfigError(
                f"the table's pages have {table.page_size} tokens, the cache's {cache.page_size}"
            )
        if max_pool_pages is not None and cache.num_pages > max_pool_pages:
            raise ConfigError(f"cache of {cache.num_pages} pages over a pool of {max_pool_pages}")
        self.cache, self.table, self.share = cache, table, share
        self.page_size = cache.page_size
        self._order = count(1)
        self._by_lease: dict[int, RadixSequence] = {}  # lease id → its sequence
        self._awaiting_leader: list[RadixSequence] = []  # committed before their leader
        self._last_sequences: list[
            RadixSequence
        ] = []  # of the last plan, while they share what they did
        self._last_rows = np.empty(0, np.int64)  # of those
        self._last_decode: AttentionBatch | None = None  # their last step, if it was of decodes
        self._last_sharing = sharing_arrays((), 0)

    # -- plan ------------------------------------------------------------------------------

    def plan(
        self, sequences: Sequence[RadixSequence], num_new: Sequence[int] | None = None
    ) -> AttentionBatch:
        """Give every sequence pages for its uncomputed tokens; returns the step's metadata.

        Args:
            sequences: any mix of fresh ones, later chunks and decode steps.
            num_new: at most so many tokens per sequence; by default all that are uncomputed.

        Raises:
            CacheError: a sequence was released, is in a plan already, is named twice, has
                nothing to compute, or does not fit in a row of the block table.
            InvalidKeyError: a token is negative, or media segments overlap or leave the prompt.
            OutOfPagesError: the batch does not fit; nothing was evicted or changed.

        Whatever else is raised half-way, an interrupt too, all sequences are as before.
        """
        limits = [one.num_uncomputed for one in sequences] if num_new is None else list(num_new)
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one plan")
        decodes, growing, others, rest = split_decodes(
            sequences, limits, page_size=self.page_size, max_tokens=self.table.max_tokens
        )
        validate_plannable(others, rest, self.table)
        keys = [self._key(one, limit) for one, limit in zip(others, rest, strict=True)]
        fresh = [one for one in others if one.lease is None]
        begun: list[tuple[RadixSequence, int, int]] = []
        spare: list[Lease] = []  # first ones of fresh sequences that have a second one
        try:
            for one, key in zip(others, keys, strict=True):
                if one.lease is None:
                    self._attach(one, key)
            asked = self._pages_needed(others, rest, keys, len(growing))
            if asked and asked > self.cache.num_available:
                stats = self.cache.stats()
                raise OutOfPagesError(
                    asked, stats.free_pages, stats.evictable_pages, stats.num_pages
                )
            announced = False
            for one, limit, key in zip(others, rest, keys, strict=True):
                assert one.lease is not None
                begun.append((one, one.lease.num_tokens, len(one.private)))
                if announced and one.row is None:  # it may attach to what was announced meanwhile
                    first = one.lease
                    self._attach(one, key)
                    spare.append(first)
                announced |= self._allocate(one, limit, key)
            self._append_pages(growing, begun)
            for one in decodes:
                one.num_planned = 1
            batch = self._batch(sequences, num_decodes=len(decodes))
            while spare:
                self.cache.cancel(spare[-1])
                spare.pop()
        except BaseException:
            self._rollback_plan(begun, fresh, spare, decodes)
            raise
        return batch

    def _batch(self, sequences: Sequence[RadixSequence], *, num_decodes: int) -> AttentionBatch:
        """The metadata of planned sequences; what they share is kept while it cannot change."""
        count = len(sequences)
        if not sequences or self._last_sequences != list(sequences):
            leases = [one.lease for one in sequences if one.lease is not None]
            self._last_sharing = sharing_arrays(self.cache.sharing(leases), count)
            self._last_rows = np.array([one.row for one in sequences], np.int64)
            self._last_sequences, self._last_decode = list(sequences), None
        before, self._last_decode = self._last_decode, None
        cached = [one.num_computed for one in sequences]
        if num_decodes == count > 0:
            if before is not None and before.seq_lens_kv.tolist() == cached:
                batch = before.next_decode(self._last_rows, self.table)
            else:
                batch = AttentionBatch.from_decodes(
                    self._last_rows, cached, self.table, self._last_sharing
                )
            self._last_decode = batch
            return batch
        new = [one.num_planned for one in sequences]
        return AttentionBatch.from_rows(
            self._last_rows, cached, new, self.table, self._last_sharing
        )

    def _key(self, one: RadixSequence, limit: int) -> CacheKey | None:
        """What a sequence attaches by, announces and is compared by; None if it does none of that.

        Made before anything else happens, for its errors.
        """
        if not self.share:
            return None
        if one.lease is not None and limit - one.num_draft == 1:
            done = one.num_computed
            if all(each.start + each.length <= done for each in one.media):
                pack(one.tokens[done : done + limit])
                return None
        return one.key(len(one.tokens))

    def _pages_needed(
        self,
        sequences: Sequence[RadixSequence],
        limits: Sequence[int],
        keys: Sequence[CacheKey | None],
        num_needing_page: int = 0,
    ) -> int:
        """Pages that a plan will reserve."""
        size, share = self.page_size, self.share
        return num_needing_page + pages_needed(sequences, limits, keys, page_size=size, share=share)

    def _attach(self, one: RadixSequence, key: CacheKey | None) -> None:
        known = key if key is not None and one.reuse else CacheKey(b"", one.namespace)
        one.lease = self.cache.attach(known)
        one.num_computed = one.lease.num_tokens

    def _detach(self, one: RadixSequence) -> None:
        assert one.lease is not None
        self.cache.cancel(one.lease)
        self._by_lease.pop(one.lease.id, None)
        if one.row is not None:
            self.table.release(one.row)
        one.lease, one.row = None, None
        one.num_computed = one.num_read = one.num_shared = 0

    def _allocate(self, one: RadixSequence, limit: int, key: CacheKey | None) -> bool:
        """Pages, row and announcement of one sequence; capacity is known to suffice.

        Returns whether it announced anything.
        """
        one.order = next(self._order)
        assert one.lease is not None
        if one.row is None:
            self._last_sequences = []
            self._by_lease[one.lease.id] = one
            one.num_shared = one.lease.num_pending * self.page_size
            one.num_read = one.num_computed - one.num_shared
            one.row = self.table.allocate()
            self.table.append(one.row, one.lease.pages)
        one.num_planned = min(limit, one.num_uncomputed)
        end = one.num_computed + one.num_planned
        held = len(one.lease.pages) + len(one.private)
        pages = self.cache.reserve(max(0, -(-end // self.page_size) - held))
        one.private.extend(pages)
        self.table.append(one.row, pages)
        known = one.shareable(end)
        if key is None or known - one.num_computed <= 1:
            return False
        self._adopt_lease(one, self.cache.announce(one.lease, key.prefix(known), one.private))
        return True

    def _rollback_plan(
        self,
        begun: list[tuple[RadixSequence, int, int]],
        fresh: list[RadixSequence],
        spare: list[Lease],
        decodes: list[RadixSequence],
    ) -> None:
        """A plan broke off: all its sequences are as before."""
        self._last_sequences = []
        for one in decodes:
            one.num_planned = 0
        for one, num_tokens, num_private in reversed(begun):  # followers before leaders
            self._rollback_sequence(one, num_tokens, num_private)
            if one in fresh:
                self._detach(one)
        for one in fresh:
            if one.lease is not None:
                self._detach(one)
        for lease in spare:
            self.cache.cancel(lease)

    def _append_pages(
        self, sequences: Sequence[RadixSequence], begun: list[tuple[RadixSequence, int, int]]
    ) -> None:
        """A page for each; capacity is known to suffice."""
        if not sequences:
            return
        pages = self.cache.reserve(len(sequences))
        for one, page in zip(sequences, pages, strict=True):
            assert one.lease is not None
            begun.append((one, one.lease.num_tokens, len(one.private)))
            one.private.append(page)
            self.table.append(self._row(one), (page,))

    def _rollback_sequence(self, one: RadixSequence, num_tokens: int, num_private: int) -> None:
        """Put a sequence back whose `_allocate` was carried out or broke off."""
        assert one.lease is not None
        self._retract(one, num_tokens)
        self.cache.give_back(one.private[num_private:])
        del one.private[num_private:]
        one.num_planned = 0
        if one.row is not None:
            held = len(one.lease.pages) + num_private
            self.table.truncate(one.row, min(held, self.table.num_pages(one.row)))

    def _adopt_lease(self, one: RadixSequence, lease: Lease) -> None:
        """Adopt a newer lease: the pages that it took are the tree's from now on."""
        old, one.lease = one.lease, lease
        assert old is not None
        if lease is old:
            return
        start = len(old.packed_pages) // ID_BYTES
        self._by_lease[lease.id] = self._by_lease.pop(old.id)
        pages = lease.pages[start:]
        taken = one.private[: len(pages)]
        del one.private[: len(pages)]
        if taken != pages:  # others had computed the same: from now on they are shared
            self._last_sequences = []
            self.table.rewrite(self._row(one), start, pages)

    @staticmethod
    def _row(one: RadixSequence) -> int:
        assert one.row is not None
        return one.row

    # -- after the forward pass --------------------------------------------------------------

    def commit(self, sequences: Sequence[RadixSequence], kept: Sequence[int] | None = None) -> None:
        """The planned K/V is computed: publish whole pages and use the canonical ones.

        Args:
            sequences: planned ones, in any order, a part of the batch or all of it.
            kept: m ≤ planned tokens that count, per sequence; the caller drops the others from
                `tokens`. By default all.

        Raises:
            CacheError: a sequence is not planned or named twice, or `kept` cuts into announced
                pages.
        """
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one commit")
        counts = [one.num_planned for one in sequences] if kept is None else list(kept)
        for one, num_kept in zip(sequences, counts, strict=True):
            if not one.num_planned or not 0 <= num_kept <= one.num_planned:
                raise CacheError(f"{num_kept} tokens kept of {one.num_planned} planned ones")
            assert one.lease is not None
            end = one.num_computed + num_kept
            if end < one.lease.num_tokens and not self.cache.can_retract(one.lease, end):
                raise CacheError(
                    f"{num_kept} tokens kept, but others depend on pages up to token "
                    f"{one.lease.num_tokens}, which were announced"
                )
        page_size, waiting = self.page_size, self._awaiting_leader
        for one, num_kept in zip(sequences, counts, strict=True):
            one.num_computed = end = one.num_computed + num_kept
            one.num_planned = one.num_draft = 0
            lease = one.lease
            assert lease is not None
            if end < lease.num_tokens:
                self._retract(one, end)
                waiting.append(one)
            elif self.share and (end >= lease.num_tokens + page_size or lease.num_pending):
                waiting.append(one)
        if not waiting:
            return
        waiting = sorted({id(one): one for one in waiting}.values(), key=lambda one: one.order)
        before = len(waiting) + 1
        while len(waiting) < before:  # a leader may have been planned again after its followers
            before = len(waiting)
            waiting = self._awaiting_leader = [one for one in waiting if not self._publish(one)]

    def _retract(self, one: RadixSequence, num_tokens: int) -> None:
        """Take back what was announced and not kept: drafts that were rejected."""
        old = one.lease
        assert old is not None
        if num_tokens < old.num_tokens:
            self._last_sequences = []
            lease, pages = self.cache.retract(old, num_tokens)
            one.lease, one.private = lease, [*pages, *one.private]
            self._by_lease[lease.id] = self._by_lease.pop(old.id)

    def _publish(self, one: RadixSequence) -> bool:
        """Publish what is computed; False when its leader has to come first."""
        if one.lease is None or not self.share:
            return True
        if one.num_planned or self.cache.is_blocked(one.lease):
            return False  # planned again already: that reads its pages, and its commit publishes
        end = max(one.shareable(one.num_computed), one.lease.num_tokens)
        if end >= one.lease.num_tokens + self.page_size or one.lease.num_pending:
            key = one.key(end)
            self._adopt_lease(one, self.cache.publish(one.lease, key, one.private))
        return True

    # -- branches and room -------------------------------------------------------------------

    def can_append(self, sequence: RadixSequence, num_tokens: int = 1) -> bool:
        """Whether a live sequence can be planned after `num_tokens` more are appended to it."""
        one = sequence
        if one.lease is None:
            return self.can_allocate([one], num_tokens)
        total = len(one.tokens) + num_tokens
        if one.num_planned or not one.num_computed < total <= self.table.max_tokens:
            return False
        held = len(one.lease.pages) + len(one.private)
        return self.cache.can_reserve(max(0, -(-total // self.page_size) - held))

    def can_allocate(self, sequences: Sequence[RadixSequence], num_tokens: int = 0) -> bool:
        """Whether `plan` would take these fresh sequences, `num_tokens` longer each, in one batch.

        Counts warm pages once: as found, not as free; the further tokens match nothing. Changes
        nothing.
        """
        if any(one.released or one.lease is not None for one in sequences):
            return False
        longer = []
        for i, one in enumerate(sequences):
            unlike = array("i", [2**31 - 1 - i]) * num_tokens  # no two share them, nor does a text
            twin = one.clone_unplanned()
            twin.tokens.extend(unlike)
            longer.append(twin)
        limits = [len(one.tokens) for one in longer]
        try:
            validate_plannable(longer, limits, self.table)
            keys = [self._key(one, limit) for one, limit in zip(longer, limits, strict=True)]
            for one, key in zip(longer, keys, strict=True):
                self._attach(one, key)
            return self.cache.can_reserve(self._pages_needed(longer, limits, keys))
        except CacheError:
            return False
        finally:
            for one in longer:
                if one.lease is not None:
                    self._detach(one)

    def fork(self, sequence: RadixSequence) -> tuple[RadixSequence, list[tuple[int, int]]]:
        """A second sequence with the same tokens and K/V, and the pages to copy for it.

        Whole pages that are published are shared. The others (the partial page at the end, as a
        rule) get new pages: copy K/V from the first to the second of each returned pair, with
        `KVPool.copy_pages`, before the next step.

        Raises:
            CacheError: the sequence is in a plan, was never planned, or waits for a leader; there
                is no free row.
            OutOfPagesError: no page for the copy; nothing changed.
        """
        one = sequence
        if one.lease is None or one.num_planned or one in self._awaiting_leader:
            raise CacheError(
                "only a sequence whose last step is committed, and that waits for no other, can "
                "be forked"
            )
        if not self.table.num_free_rows:
            raise CacheError("no free row in the block table; release a sequence first")
        num_copied = max(0, -(-one.num_computed // self.page_size) - len(one.lease.pages))
        pages = self.cache.reserve(num_copied)
        twin = one.clone_unplanned()
        twin.num_computed = twin.num_read = one.num_computed
        twin.lease, twin.private = self.cache.fork(one.lease), list(pages)
        twin.order, twin.row = next(self._order), self.table.allocate()
        self.table.append(twin.row, [*twin.lease.pages, *pages])
        self._by_lease[twin.lease.id] = twin
        return twin, list(zip(one.private, pages, strict=False))

    def rollback(self, sequence: RadixSequence, num_tokens: int) -> None:
        """Forget the K/V of a sequence beyond its first `num_tokens`; the caller cuts `tokens`.

        What was published stays in the cache for others. If that cuts into a published page, its
        beginning is computed again: a shared page is never written.

        Raises:
            CacheError: the sequence is in a plan, waits for a leader, or has fewer tokens computed.
        """
        one = sequence
        if one.lease is None or one.num_planned or one in self._awaiting_leader:
            raise CacheError("only a sequence whose last step is committed can be rolled back")
        if not 0 <= num_tokens <= one.num_computed:
            raise CacheError(f"{num_tokens} tokens to keep of {one.num_computed} computed ones")
        if num_tokens < one.lease.num_tokens:
            self._last_sequences = []
            old, one.lease = one.lease, self.cache.fork(one.lease, num_tokens)
            self._by_lease[one.lease.id] = self._by_lease.pop(old.id)
            self.cache.release(old, one.private)
            one.private = []
            self.table.truncate(self._row(one), len(one.lease.pages))
            num_tokens = one.lease.num_tokens
        one.num_computed = num_tokens

    def abandon(self, sequences: Sequence[RadixSequence]) -> list[RadixSequence]:
        """The step failed: nothing that was planned is computed.

        The sequences, and others that depended on pages which they announced, are put back to
        the state before their first plan and hold nothing; what they had published stays warm.

        Returns:
            every sequence that was put back.
        """
        back = {id(one): one for one in sequences if one.lease is not None}
        for one in list(back.values()):
            assert one.lease is not None
            if not self.cache.is_withdrawn(one.lease):
                for lease in self.cache.withdraw(one.lease):
                    dependent = self._by_lease.get(lease.id)
                    if dependent is not None:  # else it was taken outside the planner
                        back[id(dependent)] = dependent
        for one in back.values():
            self._release_sequence(one)
        return list(back.values())

    def release(self, sequences: Sequence[RadixSequence]) -> list[RadixSequence]:
        """End sequences: published pages stay warm, all others return. Idempotent.

        Returns:
            other sequences that depended on pages which now nobody computes; they hold nothing
            any more and can be planned again from the start.
        """
        back = self.abandon(
            [one for one in sequences if one.num_planned or one in self._awaiting_leader]
        )
        for one in sequences:
            if one.lease is not None:
                self._release_sequence(one)
            one.released = True
        return [one for one in back if not one.released]

    def _release_sequence(self, one: RadixSequence) -> None:
        assert one.lease is not None
        self._by_lease.pop(one.lease.id, None)
        self.cache.release(one.lease, one.private)
        if one.row is not None:
            self.table.release(one.row)
        if one in self._awaiting_leader:
            self._awaiting_leader.remove(one)
        one.lease, one.row = None, None
        one.private = []
        one.num_computed = one.num_planned = one.num_read = one.num_shared = one.num_draft = 0
