"""A state machine over the planner and a fake device: no order of calls gives a wrong answer."""

from array import array
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
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
    """Counts reserved pages, to compare them with what the planner said it would need."""

    num_reserved = 0

    def reserve(self, num_pages: int) -> Pages:
        pages = super().reserve(num_pages)
        self.num_reserved += num_pages
        return pages


class CountingPlanner(RadixAttentionPlanner):
    """Keeps the demand of the newest plan."""

    demand = 0

    def _pages_needed(self, entries: Sequence[PlanEntry], num_needing_page: int = 0) -> int:
        self.demand = super()._pages_needed(entries, num_needing_page)
        return self.demand


class PlannerMachine(RuleBasedStateMachine):
    """Sequences come, compute in pieces, fail, go on and leave, in any order and any mixture."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_pages=st.integers(1, 40),
        share=st.sampled_from([True, True, True, False]),
    )
    def make(self, page_size: int, num_pages: int, share: bool) -> None:
        self.cache = CountingCache(num_pages, page_size)
        self.table = PagedBlockTable(MAX_LIVE, -(-MAX_TOKENS // page_size), page_size)
        self.planner = CountingPlanner(self.cache, self.table, share=share)
        self.device = FakeExecutor(num_pages, page_size, vocab_size=VOCAB)
        self.live: list[RadixSequence] = []
        self.page_size = page_size

    # -- what may happen -----------------------------------------------------------------------

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.sampled_from([0, 1, 1, 3]),
        namespace=st.sampled_from([b"", b"", b"", b"n"]),
        reuse=st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=3),
    )
    def some_arrive(self, stem: str, tail: int, namespace: bytes, reuse: list[bool]) -> None:
        self.arrive(stem, tail, namespace, reuse)

    def arrive(self, stem: str, tail: int, namespace: bytes, reuse: list[bool]) -> None:
        """Equal prompts, of whole pages and a few tokens more; other tokens in the other namespace."""
        first = 1 + 9 * len(namespace)
        pages = ([first + ord(one) % 3] * self.page_size for one in stem)
        tokens = [token for page in pages for token in page][: MAX_TOKENS - 12]
        tokens += [first + 4] * tail or [first] * (not tokens)
        for each in reuse[: MAX_LIVE - len(self.live)]:
            self.live.append(RadixSequence(array("i", tokens), namespace, each))

    def choose(self, able: list[RadixSequence], mask: int, turn: int) -> list[RadixSequence]:
        """A part of the sequences, never none of them, in one of several orders."""
        chosen = [one for at, one in enumerate(able) if mask >> at & 1] or able
        turn %= len(chosen) or 1
        chosen = chosen[turn:] + chosen[:turn]
        return chosen[::-1] if mask & 64 else chosen

    @rule(mask=MASKS, turn=TURNS, limit=st.sampled_from([1, 2, 5, 99, 99, 99]))
    def plan_and_execute(self, mask: int, turn: int, limit: int) -> None:
        """Some of the sequences that have something to compute, all of it or a chunk."""
        able = [one for one in self.live if not one.num_planned and one.num_uncomputed]
        chosen = self.choose(able, mask, turn)
        limits = [min(limit + at % 2, one.num_uncomputed) for at, one in enumerate(chosen)]
        self.run_step(chosen, limits)

    @rule(stem=st.sampled_from(["a", "aaa", "ab"]), early=st.integers(0, 7))
    def plan_a_family(self, stem: str, early: int) -> None:
        """Nested prompts in one step; some are committed at once, perhaps before their leader."""
        first = len(self.live)
        for more in ("", "b", "bb"):
            self.arrive(stem + more, 1, b"", [True])
        family = self.live[first:]
        self.run_step(family, [one.num_uncomputed for one in family])
        self.planner.commit(
            [one for at, one in enumerate(family) if early >> at & 1 and one.num_planned]
        )

    def run_step(self, chosen: list[RadixSequence], limits: list[int]) -> None:
        """Plan and execute; the answers are right, or nothing has changed."""
        before, reserved = self.state(), self.cache.num_reserved
        try:
            batch = self.planner.plan(chosen, limits)
        except OutOfPagesError:
            assert self.state() == before
            return
        assert self.cache.num_reserved - reserved == self.planner.demand
        self.assert_made_anew(batch, chosen)
        ids: list[int] = []
        draws = []
        for at, one in enumerate(chosen):
            end = one.num_computed + one.num_planned
            ids += one.tokens[one.num_computed : end]
            if end == len(one.tokens):
                row = int(batch.cu_seqlens_q[at + 1]) - 1
                draws.append(SampleSpec(at, row, end, SamplingParams(), 0, None))
        result = self.device.execute(
            StepPlan(batch, np.array(ids, np.int64), tuple(draws), (), tuple(range(batch.num_seqs)))
        )
        for draw in draws:
            wanted = fake_next_token(chosen[draw.request_id].tokens, VOCAB)
            assert result.sampled[draw.request_id].token_ids[0] == wanted

    def assert_made_anew(self, batch: AttentionBatch, chosen: list[RadixSequence]) -> None:
        """What the planner keeps from one step to the next does not show."""
        rows = [one.row for one in chosen if one.row is not None]
        extends = [
            Extend(at, row, one.num_computed, one.num_planned)
            for at, (one, row) in enumerate(zip(chosen, rows, strict=True))
        ]
        leases = [one.lease for one in chosen if one.lease is not None]
        anew = AttentionBatch.build(extends, self.planner.table, self.cache.sharing(leases))
        for name in (one.name for one in fields(AttentionBatch)):
            found, expected = getattr(batch, name), getattr(anew, name)
            assert np.array_equal(found, expected), name
            assert getattr(found, "dtype", None) == getattr(expected, "dtype", None), name
            assert not isinstance(found, np.ndarray) or not found.flags.writeable, name

    @rule(mask=MASKS, turn=TURNS, num_steps=st.integers(2, 9))
    def decode(self, mask: int, turn: int, num_steps: int) -> None:
        """Some go on token by token, as long as there is room."""
        able = [one for one in self.live if not one.num_planned and one.num_uncomputed == 1]
        chosen = self.choose(able, mask, turn)
        for step in range(num_steps):
            if any(len(one.tokens) >= MAX_TOKENS for one in chosen):
                return
            self.run_step(chosen, [1] * len(chosen))
            if not all(one.num_planned for one in chosen):
                return
            self.planner.commit(chosen)
            for one in chosen:
                one.tokens.append((step + len(one.tokens)) % VOCAB)

    @rule(mask=MASKS, turn=TURNS, drop=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, mask: int, turn: int, drop: int) -> None:
        """Some of the planned ones; their last tokens may turn out not to count."""
        chosen = self.choose([one for one in self.live if one.num_planned], mask, turn)
        kept = []
        for one in chosen:
            assert one.lease is not None
            certain = max(0, one.lease.num_tokens - one.num_computed)
            kept.append(max(certain, one.num_planned - drop))
        self.planner.commit(chosen, kept)
        if drop:
            for one in chosen:  # as a draft that was refused: other tokens come in its place
                del one.tokens[max(one.num_computed, 1) :]

    @rule(mask=MASKS)
    def commit_the_newest(self, mask: int) -> None:
        """One or two that came last, so that followers are committed before their leaders."""
        planned = [one for one in self.live if one.num_planned]
        self.planner.commit(planned[-1 - mask % 2 :][::-1])

    @rule(mask=MASKS)
    def abandon(self, mask: int) -> None:
        planned = [one for one in self.live if one.num_planned]
        chosen = planned[mask % 8 :][:1]
        for one in self.planner.abandon(chosen):
            assert one in self.live
            assert (one.row, one.lease, one.num_planned, one.num_computed) == (None, None, 0, 0)

    @rule(mask=MASKS, count=st.sampled_from([1, 1, 4, 9]))
    def append(self, mask: int, count: int) -> None:
        """A token, or a whole turn, after what is there."""
        for at, one in enumerate(self.live):
            if mask >> at & 1 and len(one.tokens) + count <= MAX_TOKENS:
                one.tokens.extend([1 + 9 * len(one.namespace)] * count)

    @rule(mask=MASKS)
    def release(self, mask: int) -> None:
        chosen = self.live[mask % MAX_LIVE :][: 1 + mask // 64]
        back = self.planner.release(chosen)
        for one in chosen:
            self.live.remove(one)
        assert all(one in self.live and one.lease is None for one in back)

    @rule(num_pages=st.sampled_from([1, 2, 3, 1000]))
    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    @invariant()
    def every_live_page_has_one_owner(self) -> None:
        """No row holds a free page; private pages are in one row, the others in its lease."""
        owned: set[int] = set()
        for one in getattr(self, "live", ()):
            if one.row is None:
                assert one.lease is None
                assert not one.private
                continue
            assert one.lease is not None
            pages = self.table.pages(one.row)
            assert pages == [*one.lease.pages, *one.private]
            assert len(pages) >= -(-(one.num_computed + one.num_planned) // self.page_size)
            assert not any(self.cache.is_free(page) for page in pages)
            assert not owned & set(one.private)
            owned |= set(one.private)
        if hasattr(self, "cache"):
            assert self.cache.stats().private_pages == len(owned)

    @invariant()
    def every_live_sequence_can_read_its_context(self) -> None:
        for one in getattr(self, "live", ()):
            if one.row is not None:
                length = one.num_computed + one.num_planned
                assert self.read(self.table.pages(one.row), length) == list(one.tokens[:length])

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
                assert self.read(pages, num_tokens) == list(atoms[:num_tokens])

    def read(self, pages: Sequence[int], num_tokens: int) -> list[int]:
        at = np.arange(num_tokens)
        page_of = np.array(pages, np.int64)[at // self.page_size]
        return self.device.read(page_of * self.page_size + at % self.page_size)

    def state(self) -> tuple[object, ...]:
        """All that a failed plan must leave; a node may have been split."""
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
        held = [
            (one.lease, one.row, tuple(one.private), one.num_computed, one.num_planned)
            for one in self.live
        ]
        matches = [self.cache.match(one.key(len(one.tokens))) for one in self.live]
        return counts, held, matches, self.table.array.tolist(), self.table.num_free_rows

    def teardown(self) -> None:
        """When all have left, no pin is left and evicting gives every page back."""
        if not hasattr(self, "cache"):
            return
        self.planner.release(self.live)
        self.cache.check()
        stats = self.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        assert self.table.num_free_rows == MAX_LIVE
        self.cache.clear()
        assert self.cache.stats().free_pages == self.cache.num_pages


def test_no_order_of_calls_gives_a_wrong_answer_or_loses_a_page() -> None:
    """Plan, commit, abandon, append, release and evict in random order; see the invariants."""
    run_state_machine_as_test(
        PlannerMachine, settings=settings(max_examples=400, stateful_step_count=50)
    )
