"""A state machine over the planner and a fake device: its rules but those of running ahead, its invariants."""

from array import array
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.page_demand import PlanEntry
from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache import CacheKey, Pages, PrefixCache
from ramify.engine.step import SampleSpec, StepPlan
from ramify.errors import OutOfPagesError
from ramify.kv.block_table import PagedBlockTable
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor, fake_next_token

VOCAB, MAX_LIVE, MAX_TOKENS = 40, 6, 60
STEMS = ("", "a", "aaa", "aaa", "aaaaa", "ab", "b")
MASKS, TURNS = st.integers(0, 127), st.integers(0, 5)


class CountingCache(PrefixCache):
    """Counts reserved pages, to compare them with the planner's estimate."""

    num_reserved = 0

    def reserve(self, num_pages: int) -> Pages:
        pages = super().reserve(num_pages)
        self.num_reserved += num_pages
        return pages


class CountingPlanner(RadixAttentionPlanner):
    """Records the estimate of the last plan."""

    demand = 0

    def _pages_needed(self, entries: Sequence[PlanEntry], num_needing_page: int = 0) -> int:
        self.demand = super()._pages_needed(entries, num_needing_page)
        return self.demand


class PlannerMachine(RuleBasedStateMachine):
    """Sequences arrive, compute in chunks, fail, continue and leave, in any order and mixture."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_pages=st.integers(1, 40),
        share=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([None, None, 2, 3, 7, 16, 33]),
        partial_pages=st.booleans(),
        evicts_before_copies=st.booleans(),
    )
    def make(
        self,
        page_size: int,
        num_pages: int,
        share: bool,
        window: int | None,
        partial_pages: bool,
        evicts_before_copies: bool,
    ) -> None:
        self.evicts_before_copies = evicts_before_copies
        self.cache = CountingCache(num_pages, page_size, window=window)
        self.table = PagedBlockTable(MAX_LIVE, -(-MAX_TOKENS // page_size), page_size)
        self.planner = CountingPlanner(
            self.cache, self.table, share=share, partial_pages=partial_pages
        )
        self.device = FakeExecutor(num_pages, page_size, vocab_size=VOCAB, window=window)
        self.live: list[RadixSequence] = []
        # The tokens that the steps in flight sample for sequences which run ahead.
        self.late: dict[RadixSequence, int] = {}
        self.promoted = set[RadixSequence]()  # whose plan is one that was made ahead
        self.page_size = page_size

    # -- rules ---------------------------------------------------------------------------------

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.sampled_from([0, 1, 1, 3]),
        namespace=st.sampled_from([b"", b"", b"", b"n"]),
        reuse=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=3),
    )
    def some_arrive(self, stem: str, tail: int, namespace: bytes, reuse: list[bool]) -> None:
        self.arrive(stem, tail, namespace, reuse)

    def arrive(self, stem: str, tail: int, namespace: bytes, reuse: list[bool]) -> None:
        """Equal prompts of full pages and a few tokens; other tokens in the other namespace."""
        first = 1 + 9 * len(namespace)
        pages = ([first + ord(letter) % 3] * self.page_size for letter in stem)
        tokens = [token for page in pages for token in page][: MAX_TOKENS - 12]
        tokens += [first + 4] * tail or [first] * (not tokens)
        for reads_cache in reuse[: MAX_LIVE - len(self.live)]:
            self.live.append(RadixSequence(array("i", tokens), namespace, reads_cache))

    def choose(self, able: list[RadixSequence], mask: int, turn: int) -> list[RadixSequence]:
        """A subset of the sequences, not empty if there are any, in one of several orders."""
        chosen = [sequence for index, sequence in enumerate(able) if mask >> index & 1] or able
        turn %= len(chosen) or 1
        chosen = chosen[turn:] + chosen[:turn]
        return chosen[::-1] if mask & 64 else chosen

    @rule(mask=MASKS, turn=TURNS, limit=st.sampled_from([1, 2, 5, 99, 99, 99]))
    def plan_and_execute(self, mask: int, turn: int, limit: int) -> None:
        """Some of the sequences that have something to compute, all of it or a chunk."""
        able = [
            sequence
            for sequence in self.live
            if not sequence.is_planned and sequence.num_uncomputed
        ]
        chosen = self.choose(able, mask, turn)
        limits = [
            min(limit + index % 2, sequence.num_uncomputed) for index, sequence in enumerate(chosen)
        ]
        self.run_step(chosen, limits)

    @rule(stem=st.sampled_from(["a", "aaa", "ab"]), early=st.integers(0, 7))
    def plan_a_family(self, stem: str, early: int) -> None:
        """Nested prompts in one step; some are committed at once, perhaps before their leader."""
        first = len(self.live)
        for more in ("", "b", "bb"):
            self.arrive(stem + more, 1, b"", [True])
        family = self.live[first:]
        self.run_step(family, [sequence.num_uncomputed for sequence in family])
        self.end_step(
            [
                sequence
                for index, sequence in enumerate(family)
                if early >> index & 1 and sequence.num_planned
            ]
        )

    def run_step(self, chosen: list[RadixSequence], limits: list[int]) -> None:
        """Plan and execute; the drawn tokens are right, or nothing has changed."""
        before, reserved = self.state(), self.cache.num_reserved
        try:
            batch = self.planner.plan(chosen, limits)
        except OutOfPagesError:
            assert self.state() == before
            return
        assert self.cache.num_reserved - reserved == self.planner.demand
        self.promoted.difference_update(chosen)
        self.assert_built_anew(
            batch, chosen, [(sequence.num_computed, sequence.num_planned) for sequence in chosen]
        )
        if batch.page_copies and self.evicts_before_copies:
            self.cache.evict(1000)
            free = [page for page in range(self.cache.num_pages) if self.cache.is_free(page)]
            self.device.zero_pages(free)
        self.device.copy_pages([(copy.source, copy.target) for copy in batch.page_copies])
        ids: list[int] = []
        draws = []
        for index, sequence in enumerate(chosen):
            end = sequence.num_computed + sequence.num_planned
            ids += sequence.tokens[sequence.num_computed : end]
            if end == len(sequence.tokens):
                row = int(batch.cu_seqlens_q[index + 1]) - 1
                draws.append(SampleSpec(index, row, end, SamplingParams(), 0, None))
        result = self.device.execute(
            StepPlan(batch, np.array(ids, np.int64), tuple(draws), (), tuple(range(batch.num_seqs)))
        )
        for draw in draws:
            expected = fake_next_token(chosen[draw.request_id].tokens, VOCAB)
            assert result.sampled[draw.request_id].token_ids[0] == expected

    def assert_built_anew(
        self, batch: AttentionBatch, chosen: list[RadixSequence], spans: list[tuple[int, int]]
    ) -> None:
        """The batch equals one built from scratch, whatever the planner reuses of the last step.

        Args:
            spans: tokens before those of the step, and tokens of the step, of each sequence.
        """
        rows = [sequence.row for sequence in chosen if sequence.row is not None]
        extends = [
            Extend(index, row, *span)
            for index, (row, span) in enumerate(zip(rows, spans, strict=True))
        ]
        leases = [sequence.lease for sequence in chosen if sequence.lease is not None]
        anew = AttentionBatch.build(extends, self.planner.table, self.cache.sharing(leases))
        for name in {field.name for field in fields(AttentionBatch)} - {"page_copies"}:
            actual, expected = getattr(batch, name), getattr(anew, name)
            assert np.array_equal(actual, expected), name
            assert getattr(actual, "dtype", None) == getattr(expected, "dtype", None), name
            assert not isinstance(actual, np.ndarray) or not actual.flags.writeable, name

    @rule(mask=MASKS, turn=TURNS, num_steps=st.integers(2, 9))
    def decode(self, mask: int, turn: int, num_steps: int) -> None:
        """Some sequences decode for `num_steps`, or until pages run out."""
        able = [
            sequence
            for sequence in self.live
            if not sequence.is_planned and sequence.num_uncomputed == 1
        ]
        chosen = self.choose(able, mask, turn)
        for step in range(num_steps):
            if any(len(sequence.tokens) >= MAX_TOKENS for sequence in chosen):
                return
            self.run_step(chosen, [1] * len(chosen))
            if not all(sequence.num_planned for sequence in chosen):
                return
            self.end_step(chosen)
            for sequence in chosen:
                sequence.tokens.append((step + len(sequence.tokens)) % VOCAB)

    def end_step(
        self, sequences: list[RadixSequence], kept: list[int] | None = None, *, num_ending: int = 0
    ) -> None:
        """Commit plans.

        Args:
            num_ending: sequences that end with it, of those that run ahead.
        """
        self.planner.commit(sequences, kept)

    @rule(
        mask=MASKS,
        turn=TURNS,
        drop=st.sampled_from([0, 0, 0, 1, 2]),
        num_ending=st.sampled_from([0, 0, 1, 2]),
    )
    def commit(self, mask: int, turn: int, drop: int, num_ending: int) -> None:
        """Commit some planned sequences; their last tokens may be dropped, unless they run ahead."""
        planned = [sequence for sequence in self.live if sequence.num_planned]
        chosen = self.choose([s for s in planned if not (drop and s.num_ahead)], mask, turn)
        kept = []
        for sequence in chosen:
            assert sequence.lease is not None
            certain = max(0, sequence.lease.num_tokens - sequence.num_computed)
            kept.append(max(certain, sequence.num_planned - drop))
        self.end_step(chosen, kept, num_ending=num_ending)
        if drop:
            for sequence in chosen:  # as with rejected drafts: other tokens follow
                del sequence.tokens[max(sequence.num_computed, 1) :]

    @rule(mask=MASKS)
    def commit_the_newest(self, mask: int) -> None:
        """The last one or two planned: followers are committed before their leaders."""
        planned = [sequence for sequence in self.live if sequence.num_planned]
        self.end_step(planned[-1 - mask % 2 :][::-1])

    @rule(mask=MASKS)
    def abandon(self, mask: int) -> None:
        planned = [sequence for sequence in self.live if sequence.num_planned]
        chosen = planned[mask % 8 :][:1]
        for sequence in self.planner.abandon(chosen):
            assert sequence in self.live
            assert (sequence.row, sequence.lease, sequence.is_planned, sequence.num_computed) == (
                None,
                None,
                False,
                0,
            )
            self.late.pop(sequence, None)

    @rule(mask=MASKS, count=st.sampled_from([1, 1, 4, 9]))
    def append(self, mask: int, count: int) -> None:
        """Append a token, or a whole turn."""
        for index, sequence in enumerate(self.live):
            has_room = len(sequence.tokens) + count <= MAX_TOKENS and not sequence.num_ahead
            if mask >> index & 1 and has_room:
                sequence.tokens.extend([1 + 9 * len(sequence.namespace)] * count)

    @rule(mask=MASKS)
    def release(self, mask: int) -> None:
        self.leave(self.live[mask % MAX_LIVE :][: 1 + mask // 64])

    def leave(self, chosen: list[RadixSequence]) -> None:
        """End sequences, whatever of them is in flight."""
        reset = self.planner.release(chosen)
        for sequence in chosen:
            self.live.remove(sequence)
        assert all(sequence in self.live and sequence.lease is None for sequence in reset)
        for sequence in [*chosen, *reset]:
            assert not sequence.is_planned
            self.late.pop(sequence, None)

    @rule(num_pages=st.sampled_from([1, 2, 3, 1000]))
    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    # -- invariants ----------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    @invariant()
    def every_live_page_has_one_owner(self) -> None:
        """No row holds a free page; private pages are in one row, the others in its lease."""
        owned: set[int] = set()
        for sequence in getattr(self, "live", ()):
            if sequence.row is None:
                assert sequence.lease is None
                assert not sequence.private
                continue
            assert sequence.lease is not None
            pages = self.table.pages(sequence.row)
            assert pages == [*sequence.lease.pages, *sequence.private]
            assert len(pages) >= -(
                -(sequence.num_computed + sequence.num_planned + sequence.num_ahead)
                // self.page_size
            )
            assert not any(self.cache.is_free(page) for page in pages)
            private = set(sequence.private) - {self.cache.num_pages}
            assert not owned & private
            owned |= private
        if hasattr(self, "cache"):
            assert self.cache.stats().private_pages == len(owned)

    @invariant()
    def every_live_sequence_can_read_its_context(self) -> None:
        for sequence in getattr(self, "live", ()):
            if sequence.row is not None:
                length = sequence.num_computed + sequence.num_planned
                first = self.device.first_read(sequence.num_computed)
                pages = self.table.pages(sequence.row)
                assert self.read(pages, length, first) == list(sequence.tokens[first:length])

    @invariant()
    def what_is_matched_is_computed(self) -> None:
        """Every ready page of the tree holds the K/V of exactly its atoms."""
        if not hasattr(self, "cache"):
            return
        tree = self.cache._tree
        for number in tree.nodes():
            path = [tree.node(step) for step in tree.path(number)]
            if not path[-1].is_pending:
                pages = [page for step in path for page in step.pages]
                atoms = CacheKey(b"".join(step.atoms for step in path)).tokens()
                num_tokens = len(pages) * self.page_size
                released = [at for at, page in enumerate(pages) if page == self.cache.num_pages]
                first = (max(released, default=-1) + 1) * self.page_size
                assert self.read(pages, num_tokens, first) == list(atoms[first:num_tokens])

    def read(self, pages: Sequence[int], num_tokens: int, first: int) -> list[int]:
        positions = np.arange(first, num_tokens)
        page_of = np.array(pages, np.int64)[positions // self.page_size]
        return self.device.read(page_of * self.page_size + positions % self.page_size, first)

    def state(self) -> tuple[object, ...]:
        """All that a failed plan must leave unchanged; a node may have been split."""
        stats = self.cache.stats()
        counts = (
            stats.free_pages,
            stats.private_pages,
            stats.cached_pages,
            stats.evictable_pages,
            stats.num_leases,
            stats.lookups,
            stats.lookup_tokens,
            stats.hit_tokens,
            stats.evicted_pages,
        )
        sequences = [
            (
                sequence.lease,
                sequence.row,
                tuple(sequence.private),
                sequence.num_computed,
                sequence.num_planned,
                sequence.num_ahead,
                sequence.num_copied,
                sequence.source,
            )
            for sequence in self.live
        ]
        matches = [self.cache.match(sequence.key(len(sequence.tokens))) for sequence in self.live]
        return counts, sequences, matches, self.table.array.tolist(), self.table.num_free_rows

    def teardown(self) -> None:
        """When all sequences have left, nothing is pinned and clearing frees every page."""
        if not hasattr(self, "cache"):
            return
        self.planner.release(self.live)
        self.cache.check()
        stats = self.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        assert self.table.num_free_rows == MAX_LIVE
        self.cache.clear()
        assert self.cache.stats().free_pages == self.cache.num_pages
