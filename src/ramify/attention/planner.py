"""The planner turns requests into attention metadata: it computes only what the cache lacks.

`plan` is atomic and runs in this order: validate every sequence, pin every cached prefix, check
that the pages suffice, and only then evict, allocate and announce. Sequences of one batch share
prefixes too: a later one attaches to the pages that an earlier one is about to compute.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count, filterfalse
from operator import attrgetter

from ramify.attention.batch import AttentionBatch
from ramify.attention.batch_reuse import BatchReuse
from ramify.attention.branching import Branching
from ramify.attention.page_demand import PlanEntry, pages_needed, split_decodes, validate_plannable
from ramify.attention.partial_reuse import PartialReuse
from ramify.attention.run_ahead import RunAhead
from ramify.attention.sequence import RadixSequence
from ramify.attention.window_release import WindowRelease
from ramify.cache.call_guard import guarded
from ramify.cache.key import CacheKey, pack
from ramify.cache.leases import Lease
from ramify.cache.prefix_cache import PrefixCache
from ramify.errors import CacheError, ConfigError
from ramify.kv.block_table import PagedBlockTable

__all__ = ["RadixAttentionPlanner", "RadixSequence"]

# A sequence, and its lease's tokens and number of private pages before the plan touched it.
UndoEntry = tuple[RadixSequence, int, int]


class RadixAttentionPlanner:
    """Plans steps over a prefix cache and a block table: `plan`, `commit`, `release`.

    For one thread at a time, like the cache.

    Args:
        cache: owns the pages.
        table: a row per live sequence; same page size as the cache.
        max_pool_pages: pages of the K/V pool; the cache must not have more. None: no check.
        share: False gives every sequence its own pages and publishes nothing.
        partial_pages: where a prompt leaves the cache inside a page, copy what it shares with that
            page. Then the caller has to run `AttentionBatch.page_copies` before each step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        table: PagedBlockTable,
        *,
        max_pool_pages: int | None = None,
        share: bool = True,
        partial_pages: bool = False,
    ) -> None:
        if table.page_size != cache.page_size:
            raise ConfigError(
                f"the table's pages have {table.page_size} tokens, the cache's {cache.page_size}"
            )
        if max_pool_pages is not None and cache.num_pages > max_pool_pages:
            raise ConfigError(f"cache of {cache.num_pages} pages over a pool of {max_pool_pages}")
        self.cache, self.table, self.share = cache, table, share
        self.guard = cache.guard
        self.page_size = cache.page_size
        self._window = WindowRelease(cache, table, share=share)
        self.partial = PartialReuse(cache, table, is_on=partial_pages and share)
        self._order = count(1)
        self._by_lease: dict[int, RadixSequence] = {}  # by lease id
        self._awaiting_leader: list[RadixSequence] = []  # committed before their leader
        self._batches = BatchReuse(cache, table)
        self.ahead = RunAhead(cache, table, self._batches)
        self._branching = Branching(
            cache, table, self._window, self._batches, self._by_lease, self._order
        )

    # -- plan ------------------------------------------------------------------------------

    @guarded
    def plan(
        self, sequences: Sequence[RadixSequence], num_new: Sequence[int] | None = None
    ) -> AttentionBatch:
        """Give every sequence pages for its uncomputed tokens; returns the step's metadata.

        Args:
            sequences: fresh sequences, later prefill chunks and decodes in any mixture.
            num_new: most tokens to compute per sequence; by default all uncomputed ones.

        Raises:
            CacheError: a sequence was released, is in a plan already, is named twice, has
                nothing to compute, or does not fit in a row of the block table.
            InvalidKeyError: a token is negative, or media segments overlap or leave the prompt.
            OutOfPagesError: the batch does not fit; nothing was evicted or changed.

        Any other exception of a call on cache or table leaves all sequences unchanged too. After an
        interrupt, which may come within such a call: `ramify.attention.repair.repair_planner`.
        """
        limits = [s.num_uncomputed for s in sequences] if num_new is None else list(num_new)
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one plan")
        decodes, needing_page, others = split_decodes(
            sequences, limits, page_size=self.page_size, max_tokens=self.table.max_tokens
        )
        validate_plannable(others, self.table)
        # every key is built before any state changes: bad tokens and media raise here
        entries = [PlanEntry(s, limit, self._key(s, limit)) for s, limit in others]
        fresh = [sequence for sequence, _ in others if sequence.lease is None]
        undo: list[UndoEntry] = []
        replaced: list[Lease] = []  # first leases of fresh sequences that were attached again
        try:
            for sequence, _, key in entries:
                if sequence.lease is None:
                    self._attach(sequence, key)
                    self.partial.attach(sequence, key)
            self._make_room(entries, fresh, len(needing_page))
            announced = False
            for sequence, limit, key in entries:
                assert sequence.lease is not None
                undo.append((sequence, sequence.lease.num_tokens, len(sequence.private)))
                # Attach again: an earlier sequence of this batch may have announced its prefix.
                if announced and sequence.row is None:
                    first = sequence.lease
                    self._attach(sequence, key)
                    replaced.append(first)
                    self.partial.reattached(sequence, first)
                announced |= self._allocate(sequence, limit, key)
            self._append_pages(needing_page, undo)
            for sequence in decodes:
                sequence.num_planned = 1
            batch = self._batches.build(sequences, num_decodes=len(decodes))
            batch = self.partial.with_copies(batch, fresh)
            while replaced:
                self.cache.cancel(replaced[-1])
                replaced.pop()
            self.partial.count_hits(fresh)
            for sequence in fresh:
                sequence.has_looked_up = True
        except BaseException as error:
            try:
                self._rollback_plan(undo, fresh, replaced, decodes)
            except Exception as broken:  # noqa: BLE001 - the first error is the caller's
                error.add_note(f"the plan was not undone: {broken!r}; call repair_planner")
            raise
        return batch

    def _key(self, sequence: RadixSequence, limit: int) -> CacheKey | None:
        """The cache key of a sequence; None if sharing is off or it decodes one token."""
        if not self.share:
            return None
        if sequence.lease is not None and limit - sequence.num_draft == 1:
            computed = sequence.num_computed
            if all(media.start + media.length <= computed for media in sequence.media):
                pack(sequence.tokens[computed : computed + limit])  # raises for a negative token
                return None
        return sequence.key(len(sequence.tokens))

    def _pages_needed(self, entries: Sequence[PlanEntry], num_needing_page: int = 0) -> int:
        """Pages that a plan will reserve; `num_needing_page` of them are for decodes."""
        return num_needing_page + pages_needed(
            entries,
            page_size=self.page_size,
            share=self.share,
            is_released=self._window.is_released,
        )

    def _make_room(
        self, entries: Sequence[PlanEntry], fresh: Sequence[RadixSequence], num_needing_page: int
    ) -> None:
        """Make sure that the pages of a plan can be reserved; `fresh` sequences are attached.

        Raises:
            OutOfPagesError: they cannot; no page was freed.
        """
        needed = self._pages_needed(entries, num_needing_page)
        if not needed or needed <= self.cache.num_available:
            return
        if self.partial.drop(fresh):  # the pinned sources may be what is missing
            needed = self._pages_needed(entries, num_needing_page)
        if needed > self.cache.num_available:
            self._batches.forget()
            self._window.make_room(needed, [*self._by_lease.values(), *fresh])

    def _attach(self, sequence: RadixSequence, key: CacheKey | None) -> None:
        """Lease the cached prefix; an empty one if the sequence must not reuse the cache."""
        reused = key if key is not None and sequence.reuse else CacheKey(b"", sequence.namespace)
        sequence.lease = self.cache.attach(reused, again=sequence.has_looked_up)
        sequence.num_computed = sequence.lease.num_tokens

    def _detach(self, sequence: RadixSequence) -> None:
        """Undo `_attach`, and give the row back."""
        assert sequence.lease is not None
        sequence.has_looked_up = sequence.lease.is_again
        self.partial.end(sequence)
        self.cache.cancel(sequence.lease)
        self._forget_pages(sequence)

    def _allocate(self, sequence: RadixSequence, limit: int, key: CacheKey | None) -> bool:
        """Give a sequence its row and pages; capacity was checked. True if it announced pages."""
        sequence.order = next(self._order)
        assert sequence.lease is not None
        if sequence.row is None:
            self._batches.forget()
            self._by_lease[sequence.lease.id] = sequence
            sequence.num_shared = sequence.lease.num_pending * self.page_size
            sequence.num_read = sequence.num_computed - sequence.num_shared
            if sequence.may_tell is not None and key is not None and sequence.reuse:
                # before its own pages are announced
                explanation = self.cache.explain(key, may_tell=sequence.may_tell, pending=True)
                sequence.explanation = explanation.with_copied(sequence.num_copied)
            sequence.row = self.table.allocate()
            self.table.append(sequence.row, sequence.lease.pages)
        sequence.num_planned = min(limit, sequence.num_uncomputed)
        end = sequence.num_computed + sequence.num_planned
        held = len(sequence.lease.pages) + len(sequence.private)
        pages = self.cache.reserve(max(0, -(-end // self.page_size) - held))
        sequence.private.extend(pages)
        self.table.append(sequence.row, pages)
        known = sequence.shareable(end)
        if key is None or known - sequence.num_computed <= 1:
            return False
        self._adopt_lease(
            sequence, self.cache.announce(sequence.lease, key.prefix(known), sequence.private)
        )
        return True

    def _rollback_plan(
        self,
        undo: list[UndoEntry],
        fresh: list[RadixSequence],
        replaced: list[Lease],
        decodes: list[RadixSequence],
    ) -> None:
        """Put every sequence of a plan that failed, at whatever point, back as it was."""
        self._batches.forget()
        for sequence in decodes:
            sequence.num_planned = 0
        for sequence, num_tokens, num_private in reversed(undo):  # followers before leaders
            self._retract(sequence, num_tokens)
            self.cache.give_back(sequence.private[num_private:])
            del sequence.private[num_private:]
            sequence.num_planned = 0
            if sequence.row is not None:
                assert sequence.lease is not None
                held = len(sequence.lease.pages) + num_private
                self.table.truncate(sequence.row, min(held, self.table.num_pages(sequence.row)))
            if sequence in fresh:
                self._detach(sequence)
        for sequence in fresh:
            if sequence.lease is not None:
                self._detach(sequence)
        for lease in replaced:
            self.cache.cancel(lease)
        # The plan may have failed while it released pages.
        self._window.rewrite_rows(self._by_lease.values())

    def _append_pages(self, sequences: Sequence[RadixSequence], undo: list[UndoEntry]) -> None:
        """Give each decode a page; capacity was checked."""
        if not sequences:
            return
        pages = self.cache.reserve(len(sequences))
        for sequence, page in zip(sequences, pages, strict=True):
            assert sequence.lease is not None
            assert sequence.row is not None
            undo.append((sequence, sequence.lease.num_tokens, len(sequence.private)))
            sequence.private.append(page)
            self.table.append(sequence.row, (page,))

    def _adopt_lease(self, sequence: RadixSequence, lease: Lease) -> None:
        """Replace the lease by its successor; private pages that it covers are the tree's now."""
        old, sequence.lease = sequence.lease, lease
        assert old is not None
        if lease is old:
            return
        self._by_lease[lease.id] = self._by_lease.pop(old.id)
        pages = array("i", lease.packed_pages[len(old.packed_pages) :]).tolist()
        taken = sequence.private[: len(pages)]
        del sequence.private[: len(pages)]
        if taken != pages:  # the tree kept another sequence's pages for the same tokens
            self._batches.forget()
            assert sequence.row is not None
            self.table.rewrite(sequence.row, len(old.pages), pages)

    def _is_in_flight(self, sequence: RadixSequence) -> bool:
        """Whether it is in a plan, or committed but waiting for its leader to publish."""
        return sequence.is_planned or sequence in self._awaiting_leader

    # -- after the forward pass --------------------------------------------------------------

    @guarded
    def commit(self, sequences: Sequence[RadixSequence], kept: Sequence[int] | None = None) -> None:
        """Record that the planned K/V is computed: publish whole pages, share duplicates.

        Args:
            sequences: any planned sequences, in any order.
            kept: planned tokens to keep per sequence, e.g. the accepted drafts; the caller drops
                the others from `tokens`. By default all.

        Raises:
            CacheError: a sequence is not planned or named twice, or `kept` cuts into announced
                pages.
        """
        if len(set(map(id, sequences))) != len(sequences):
            raise CacheError("a sequence is named twice in one commit")
        counts = [sequence.num_planned for sequence in sequences] if kept is None else list(kept)
        for sequence, num_kept in zip(sequences, counts, strict=True):
            if not sequence.num_planned or not 0 <= num_kept <= sequence.num_planned:
                raise CacheError(f"{num_kept} tokens kept of {sequence.num_planned} planned tokens")
            assert sequence.lease is not None
            end = sequence.num_computed + num_kept
            if end < sequence.lease.num_tokens and not self.cache.can_retract(sequence.lease, end):
                raise CacheError(
                    f"{num_kept} tokens kept, but others depend on pages up to token "
                    f"{sequence.lease.num_tokens}, which were announced"
                )
        page_size, waiting = self.page_size, self._awaiting_leader
        for sequence, num_kept in zip(sequences, counts, strict=True):
            sequence.num_computed = end = sequence.num_computed + num_kept
            sequence.num_planned = sequence.num_draft = 0
            lease = sequence.lease
            assert lease is not None
            if sequence.source is not None:
                self.partial.end(sequence)
            if end < lease.num_tokens:
                self._retract(sequence, end)
                waiting.append(sequence)
            elif self.share and (end >= lease.num_tokens + page_size or lease.num_pending):
                waiting.append(sequence)
        if not waiting:
            return
        waiting = sorted(dict.fromkeys(waiting), key=attrgetter("order"))
        before = len(waiting) + 1
        while len(waiting) < before:  # a leader may have been planned again after its followers
            before = len(waiting)
            waiting = self._awaiting_leader = list(filterfalse(self._publish, waiting))

    def _retract(self, sequence: RadixSequence, num_tokens: int) -> None:
        """Take back announced tokens beyond `num_tokens`: drafts that were rejected."""
        old = sequence.lease
        assert old is not None
        if num_tokens < old.num_tokens:
            self._batches.forget()
            lease, pages = self.cache.retract(old, num_tokens)
            sequence.lease, sequence.private = lease, [*pages, *sequence.private]
            self._by_lease[lease.id] = self._by_lease.pop(old.id)

    def _publish(self, sequence: RadixSequence) -> bool:
        """Publish the computed pages; False if the leader has to publish first."""
        lease = sequence.lease
        if lease is None or not self.share:
            return True
        if sequence.num_planned or (lease.num_pending and self.cache.is_blocked(lease)):
            return False  # a sequence that is planned again publishes at that plan's commit
        end = max(sequence.shareable(sequence.num_computed), lease.num_tokens)
        if end >= lease.num_tokens + self.page_size or lease.num_pending:
            key = sequence.key_beyond(lease, end)
            self._adopt_lease(sequence, self.cache.publish(lease, key, sequence.private))
        return True

    # -- capacity and branches ----------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that `plan` could give to sequences: free, evictable, or before all their windows."""
        return self._window.num_available(self._by_lease.values())

    def can_append(self, sequence: RadixSequence, num_tokens: int = 1) -> bool:
        """Whether a live sequence can be planned after `num_tokens` more are appended to it."""
        if sequence.lease is None:
            return self.can_allocate([sequence], num_tokens)
        total = len(sequence.tokens) + num_tokens
        if sequence.is_planned or not sequence.num_computed < total <= self.table.max_tokens:
            return False
        held = len(sequence.lease.pages) + len(sequence.private)
        return -(-total // self.page_size) - held <= self.num_available

    @guarded
    def can_allocate(self, sequences: Sequence[RadixSequence], num_tokens: int = 0) -> bool:
        """Whether `plan` would take these fresh sequences, `num_tokens` longer each, in one batch.

        Changes nothing. Cached pages they would reuse do not count as free; more tokens match none.
        """
        if any(sequence.released or sequence.lease is not None for sequence in sequences):
            return False
        longer: list[tuple[RadixSequence, int]] = []
        for i, sequence in enumerate(sequences):
            clone = sequence.clone_unplanned()
            # a token id that no text and no other clone has
            clone.tokens.extend(array("i", [2**31 - 1 - i]) * num_tokens)
            longer.append((clone, len(clone.tokens)))
        try:
            validate_plannable(longer, self.table)
            entries = [PlanEntry(s, limit, self._key(s, limit)) for s, limit in longer]
            for sequence, _, key in entries:
                self._attach(sequence, key)
            live = [*self._by_lease.values(), *(sequence for sequence, _ in longer)]
            return self._pages_needed(entries) <= self._window.num_available(live)
        except CacheError:
            return False
        finally:
            for sequence, _ in longer:
                if sequence.lease is not None:
                    self._detach(sequence)

    @guarded
    def fork(self, sequence: RadixSequence) -> tuple[RadixSequence, list[tuple[int, int]]]:
        """Branch off a second sequence with the same tokens and K/V.

        Published pages are shared. The others, as a rule only the partial page at the end, get
        new pages.

        Returns:
            the branch, and (from, to) page pairs: copy their K/V with `KVPool.copy_pages` before
            the next step.

        Raises:
            CacheError: the sequence is in a plan, was never planned, or waits for a leader; or
                there is no free row.
            OutOfPagesError: no page for the copy; nothing changed.
        """
        if sequence.lease is None or self._is_in_flight(sequence):
            raise CacheError(
                "only a sequence whose last step is committed, and that waits for no other, can "
                "be forked; call commit first"
            )
        return self._branching.fork(sequence, sequence.lease)

    @guarded
    def rollback(self, sequence: RadixSequence, num_tokens: int) -> None:
        """Drop the K/V of a sequence beyond its first `num_tokens`; the caller cuts `tokens`.

        Published pages stay in the cache. A cut inside a published page drops that whole page from
        the sequence, since a shared page is never written: its first tokens are computed again. If
        pages in the window before the cut were released, all tokens are computed again.

        Raises:
            CacheError: the sequence is in a plan, waits for a leader, or has fewer tokens computed.
        """
        if sequence.lease is None or self._is_in_flight(sequence):
            raise CacheError("only a sequence whose last step is committed can be rolled back")
        self._branching.rollback(sequence, sequence.lease, num_tokens)

    @guarded
    def abandon(self, sequences: Sequence[RadixSequence]) -> list[RadixSequence]:
        """Reset sequences whose step failed, so that none of its planned K/V counts as computed.

        They, and others that depend on pages they announced, return to the state before their
        first plan and hold no pages; what they had published stays cached.

        Returns:
            every sequence that was reset.
        """
        reset = {id(sequence): sequence for sequence in sequences if sequence.lease is not None}
        for sequence in list(reset.values()):
            assert sequence.lease is not None
            if not self.cache.is_withdrawn(sequence.lease):
                for lease in self.cache.withdraw(sequence.lease):
                    dependent = self._by_lease.get(lease.id)
                    if dependent is not None:  # None: a lease from outside the planner
                        reset[id(dependent)] = dependent
        for sequence in reset.values():
            self._release_sequence(sequence)
        return list(reset.values())

    @guarded
    def release(self, sequences: Sequence[RadixSequence]) -> list[RadixSequence]:
        """End sequences: published pages stay cached, the others are freed. Idempotent.

        Returns:
            other sequences that depended on pages which nobody will compute now; they were reset
            and can be planned again from the start.
        """
        reset = self.abandon([sequence for sequence in sequences if self._is_in_flight(sequence)])
        for sequence in sequences:
            if sequence.lease is not None:
                self._release_sequence(sequence)
            sequence.released = True
        return [sequence for sequence in reset if not sequence.released]

    def _release_sequence(self, sequence: RadixSequence) -> None:
        assert sequence.lease is not None
        self.partial.end(sequence)
        private = self._window.owned(sequence.private)
        self.cache.release(sequence.lease, private, sequence.session)
        if sequence in self._awaiting_leader:
            self._awaiting_leader.remove(sequence)
        self._forget_pages(sequence)
        sequence.num_draft = 0

    def _forget_pages(self, sequence: RadixSequence) -> None:
        """Reset a sequence whose lease and private pages were given back, and free its row."""
        assert sequence.lease is not None
        self._by_lease.pop(sequence.lease.id, None)
        if sequence.row is not None:
            self.table.release(sequence.row)
        sequence.lease, sequence.row, sequence.private = None, None, []
        sequence.num_computed = sequence.num_planned = sequence.num_ahead = 0
        sequence.num_read = sequence.num_shared = sequence.num_copied = 0
