"""`RadixAttentionPlanner.plan`: its metadata, its errors, and the pages that a batch shares."""

from collections.abc import Sequence

import numpy as np
import pytest

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache import CacheKey, Lease, PrefixCache
from ramify.errors import CacheError, OutOfPagesError
from ramify.kv.block_table import PagedBlockTable
from ramify.testing import fake_next_token
from tests.pure.planner_bench import VOCAB, Bench, pages_of, sequence_of

# -- the metadata of a plan ------------------------------------------------------------------


def test_a_fresh_sequence_gets_pages_for_all_its_tokens() -> None:
    """Three tokens with page size 1 get three slots, positions 0..2 and three query rows."""
    bench = Bench(page_size=1)
    sequence = sequence_of([7, 8, 9])

    batch = bench.plan(sequence)

    assert batch.cu_seqlens_q.tolist() == [0, 3]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.slot_mapping.tolist() == pages_of(bench, sequence)
    assert batch.slot_mapping.dtype == np.int64
    assert batch.block_table.dtype == np.int32
    assert not batch.num_cached.any()


def test_only_what_the_cache_lacks_is_a_query() -> None:
    """The block table has the cached prefix's pages; the query is the suffix after it."""
    bench = Bench(page_size=1)
    bench.warm([1, 2, 3, 4])
    decoy = sequence_of([9, 9, 9])
    bench.plan(decoy)
    sequence = sequence_of([1, 2, 3, 7, 8])

    batch = bench.plan(sequence)

    assert batch.positions.tolist() == [3, 4]
    assert batch.num_cached.tolist() == [3]
    assert (sequence.num_read, sequence.num_shared) == (3, 0)
    pages = pages_of(bench, sequence)
    assert batch.block_table[0].tolist() == pages
    assert not set(pages) & set(pages_of(bench, decoy))
    assert batch.slot_mapping.tolist() == pages[3:]


def test_an_empty_plan_is_legal() -> None:
    """No sequences: an empty batch, and nothing happens."""
    bench = Bench()
    before = bench.state()

    batch = bench.plan()

    assert batch.num_tokens == 0
    bench.planner.commit([])
    assert bench.planner.release([]) == []
    assert bench.state() == before


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_a_fully_cached_prompt_still_has_a_query_row(page_size: int) -> None:
    """PB20: an identical prompt leaves at least one token to compute, so that there are logits."""
    bench = Bench(num_pages=32, page_size=page_size)
    tokens = range(1, page_size * 2 + 1)
    bench.warm(tokens)
    sequence = sequence_of(tokens)

    batch = bench.plan(sequence)

    assert 1 <= batch.num_tokens <= page_size
    assert bench.execute(batch, sequence) == [fake_next_token(tokens, VOCAB)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16])
def test_a_matched_prefix_never_ends_inside_a_page(page_size: int) -> None:
    """Prompts that differ inside a page share the full pages before it, and no token more."""
    bench = Bench(num_pages=64, page_size=page_size)
    bench.warm(range(20))
    sequence = sequence_of([*range(13), 99, 98])

    bench.run(sequence)

    assert sequence.num_read == 13 // page_size * page_size


def test_a_cache_larger_than_the_pool_is_refused() -> None:
    """So are a table and a cache with different page sizes."""
    cache = PrefixCache(8, 4)

    with pytest.raises(ValueError, match="cache of 8 pages over a pool of 7"):
        RadixAttentionPlanner(cache, PagedBlockTable(1, 8, 4), max_pool_pages=7)
    with pytest.raises(ValueError, match="table's pages have 2 tokens, the cache's 4"):
        RadixAttentionPlanner(cache, PagedBlockTable(1, 8, 2))


# -- plan is atomic --------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    """Pages, pins, tables, statistics and cached entries stay, and the sequences can go on."""
    bench = Bench(num_pages=8, page_size=4)
    bench.warm(range(100, 112))
    live = sequence_of(range(8))
    bench.run(live)
    live.tokens.append(5)
    reader, big = sequence_of([*range(100, 112), 1]), sequence_of(range(200, 220))
    before = bench.state()

    with pytest.raises(OutOfPagesError) as caught:
        bench.plan(live, reader, big)

    assert (caught.value.asked, caught.value.free, caught.value.evictable) == (7, 3, 0)
    assert bench.state() == before
    assert bench.cache.match(reader.key(13)).num_tokens == 12
    bench.cache.check()
    for sequence in (reader, big):
        assert (sequence.lease, sequence.row, sequence.num_computed, sequence.num_planned) == (
            None,
            None,
            0,
            0,
        )
    bench.run(live, reader)
    bench.planner.release([live, reader, big])
    bench.assert_nothing_leaked()


def test_a_request_larger_than_the_pool_evicts_nothing() -> None:
    """PB3: a request that can never fit does not evict the cache."""
    bench = Bench(num_pages=4, page_size=2)
    bench.table = PagedBlockTable(2, 100, 2)
    bench.planner = RadixAttentionPlanner(bench.cache, bench.table)
    bench.warm(range(6))

    with pytest.raises(OutOfPagesError):
        bench.plan(sequence_of(range(50, 150)))

    assert bench.cache.match(sequence_of(range(7)).key(7)).num_tokens == 6


def test_no_eviction_takes_the_prefix_of_another_sequence_of_the_batch() -> None:
    """PB19: all prefixes of a plan are pinned before the first page is allocated."""
    bench = Bench(num_pages=7, page_size=1)
    for tokens in ([7, 8], [1, 2], [5]):  # the second sequence's prefix would be the first victim
        bench.warm(tokens)
    first, second = sequence_of([1, 2, 3, 4]), sequence_of([7, 8, 9])

    bench.run(first, second)

    assert (first.num_read, second.num_read) == (2, 2)
    assert bench.cache.stats().evicted_pages == 1


def test_the_prefix_of_another_sequence_is_refused_rather_than_evicted() -> None:
    """PB19: if both prefixes cannot stay, the call fails and both are still cached."""
    bench = Bench(num_pages=4, page_size=1)
    bench.warm([1, 2])
    bench.warm([7, 8])
    first, second = sequence_of([1, 2, 3]), sequence_of([7, 8, 9])

    with pytest.raises(OutOfPagesError):
        bench.plan(first, second)

    for sequence in (first, second):
        assert bench.cache.match(sequence.key(3)).num_tokens == 2
    bench.run(first)


@pytest.mark.parametrize(
    "fault", ["released", "planned", "empty", "limit", "long", "twice", "list"]
)
def test_a_plan_is_validated_whole_before_it_acts(fault: str) -> None:
    """One bad sequence in the batch: the error names the fault, the others are unchanged."""
    bench = Bench(num_pages=8, page_size=2)
    good, bad = sequence_of([1, 2, 3]), sequence_of([4, 5])
    batch, num_new, message = [good, bad], [3, 2], ""
    if fault == "released":
        bench.planner.release([bad])
        message = "was released"
    elif fault == "planned":
        bench.plan(bad)
        message = "not committed or abandoned"
    elif fault == "empty":
        bench.run(bad)
        message = "0 uncomputed tokens"
    elif fault == "limit":
        num_new, message = [3, 0], "may compute 0"
    elif fault == "long":
        bad.tokens.extend(range(20))
        message = "22 tokens but a row of the block table holds 16"
    elif fault == "twice":
        batch, num_new, message = [good, bad, good], [3, 2, 3], "twice"
    else:
        bad.tokens = [4, 5]  # type: ignore[assignment]
        message = "list but must be 32-bit"
    before = bench.state()

    with pytest.raises(CacheError, match=message):
        bench.planner.plan(batch, num_new)

    assert bench.state() == before
    bench.run(good)


def test_too_few_rows_are_reported_before_anything_happens() -> None:
    """A batch with more fresh sequences than free rows is refused whole."""
    bench = Bench(num_rows=2)
    live = sequence_of([1, 2])
    bench.run(live)
    before = bench.state()

    with pytest.raises(CacheError, match="2 new sequences but 1 free row"):
        bench.plan(sequence_of([3]), sequence_of([4]))

    assert bench.state() == before


class Interrupted(PrefixCache):
    """Raises KeyboardInterrupt when the second sequence announces its pages."""

    calls = 0

    def announce(self, lease: Lease, key: CacheKey, private: Sequence[int]) -> Lease:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return super().announce(lease, key, private)


def test_an_interrupt_inside_a_plan_leaves_a_whole_planner() -> None:
    """Ctrl-C in the middle of a batch: its sequences hold no pages and can be planned again."""
    bench = Bench(num_pages=16, page_size=2, cache_type=Interrupted)
    batch = [sequence_of([1, 2, 3, 4, 5, index]) for index in range(3)]

    with pytest.raises(KeyboardInterrupt):
        bench.plan(*batch)

    stats = bench.cache.stats()
    assert (stats.num_leases, stats.free_pages) == (0, 16)
    bench.run(*batch)
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


# -- sharing inside a batch ------------------------------------------------------------------


@pytest.mark.parametrize("page_size", range(1, 17))
def test_identical_cold_prompts_compute_their_prefix_once(page_size: int) -> None:
    """The first prompt computes the prefix; the others attach and compute at most one page."""
    bench = Bench(num_pages=120, page_size=page_size)
    batch = [sequence_of(range(1, 41)) for _ in range(3)]

    bench.run(*batch)

    shared = 39 // page_size * page_size
    assert [sequence.num_shared for sequence in batch] == [0, shared, shared]
    assert bench.device.num_computed_tokens == 40 + 2 * (40 - shared)
    rows = [pages_of(bench, sequence) for sequence in batch]
    assert all(row[: shared // page_size] == rows[0][: shared // page_size] for row in rows)


def test_nested_prompts_share_level_by_level() -> None:
    """A, A+B and A+B+C in one batch: every page is computed once."""
    bench = Bench(num_pages=32, page_size=2)
    a, ab, abc = sequence_of(range(5)), sequence_of(range(9)), sequence_of(range(13))

    bench.run(a, ab, abc)

    assert [sequence.num_shared for sequence in (a, ab, abc)] == [0, 4, 8]
    assert bench.device.num_computed_tokens == 5 + 5 + 5


def test_a_shorter_prompt_attaches_to_a_longer_leader() -> None:
    """A prompt that is a prefix of its leader's computes its last token only."""
    bench = Bench(num_pages=32, page_size=4)
    long, short = sequence_of(range(16)), sequence_of(range(9))

    bench.run(long, short)

    assert short.num_shared == 8
    assert pages_of(bench, short)[:2] == pages_of(bench, long)[:2]
    assert pages_of(bench, short)[2] != pages_of(bench, long)[2]


def test_a_follower_attaches_to_the_chunk_that_is_computed_now() -> None:
    """A follower shares the chunk that its leader computes now; it plans the remainder itself."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower = sequence_of(range(12)), sequence_of(range(12))
    bench.run(leader, num_new=[4])

    bench.run(leader, follower, num_new=[4, 3])

    assert (follower.num_read, follower.num_shared, follower.num_computed) == (4, 4, 11)


def test_sharing_inside_the_batch_counts_for_capacity() -> None:
    """A batch that fits only because its members share is planned, chunks and warm ones too."""
    bench = Bench(num_pages=6, page_size=2)
    batch = [sequence_of([*range(8), 50 + index]) for index in range(2)]
    bench.run(*batch)
    assert bench.cache.stats().free_pages == 0
    bench.planner.release(batch)

    chunked = Bench(num_pages=6, page_size=2)
    leader, follower = sequence_of(range(9)), sequence_of([*range(8), 70])
    chunked.run(leader, num_new=[4])
    chunked.run(leader, follower)
    assert chunked.cache.stats().free_pages == 0

    scored = Bench(num_pages=6, page_size=2)
    leader, follower = sequence_of(range(9), reuse=False), sequence_of([*range(8), 70])
    scored.run(leader, follower)
    assert follower.num_shared == 8
    assert scored.cache.stats().free_pages == 0


def test_namespaces_never_meet() -> None:
    """Equal tokens in two namespaces share neither cached pages nor pages in flight."""
    bench = Bench(num_pages=32, page_size=2)
    bench.warm(range(8), b"one")
    batch = [sequence_of(range(8), b"two"), sequence_of(range(8), b"three"), sequence_of(range(8))]

    bench.run(*batch)

    assert [(sequence.num_read, sequence.num_shared) for sequence in batch] == [(0, 0)] * 3
    assert len({page for sequence in batch for page in pages_of(bench, sequence)}) == 12


def test_pages_in_flight_are_never_matched() -> None:
    """`match` does not see planned pages before their commit, even after the forward pass."""
    bench = Bench(page_size=2)
    sequence, key = sequence_of(range(8)), sequence_of(range(9)).key(9)

    batch = bench.plan(sequence, num_new=[5])
    assert bench.cache.match(key).num_tokens == 0
    bench.execute(batch, sequence)
    assert bench.cache.match(key).num_tokens == 0
    bench.planner.commit([sequence])

    assert bench.cache.match(key).num_tokens == 4


def test_without_reuse_nothing_is_read_but_all_is_published() -> None:
    """A sequence with `reuse=False` computes every token, and publishes its pages."""
    bench = Bench(num_pages=32, page_size=2)
    bench.warm(range(4))
    sequence, reader = sequence_of(range(10), reuse=False), sequence_of(range(10))

    bench.run(sequence, num_new=[5])
    bench.run(sequence)
    bench.run(reader)

    assert (sequence.num_read, sequence.num_shared, reader.num_read) == (0, 0, 8)
    assert bench.device.num_computed_tokens == 4 + 10 + 2
    assert pages_of(bench, sequence)[:4] == pages_of(bench, reader)[:4]
    bench.planner.release([sequence, reader])
    bench.assert_nothing_leaked()


def test_without_sharing_every_sequence_has_pages_of_its_own() -> None:
    """share=False: no page is in two rows, nothing is cached, all pages are freed."""
    bench = Bench(num_pages=32, page_size=2, share=False)
    batch = [sequence_of(range(8)) for _ in range(3)]

    bench.run(*batch, num_new=[3, 8, 1])
    bench.run(batch[0], batch[2])

    pages = [page for sequence in batch for page in pages_of(bench, sequence)]
    assert len(set(pages)) == len(pages) == 12
    assert bench.cache.stats().cached_pages == 0
    assert bench.cache.match(batch[0].key(8)).num_tokens == 0
    bench.planner.release(batch)
    assert bench.cache.stats().free_pages == 32
    bench.assert_nothing_leaked()
