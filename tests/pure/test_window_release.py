"""Pages outside the window of every layer: freed under pressure, restored when computed again."""

from array import array
from contextlib import suppress

import pytest

from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache import CacheKey, Lease, Pages, PrefixCache
from ramify.cache.window import (
    count_outside_window,
    has_next_page,
    is_readable,
    release_outside_window,
)
from ramify.config import live_pages
from ramify.errors import (
    ConfigError,
    LeaseError,
    OutOfPagesError,
    PinError,
    RequestTooLargeError,
)
from ramify.kv.block_table import PagedBlockTable
from tests.pure.cache_mirror import Mirror
from tests.pure.engine_bench import Bench, expected

PROMPT = list(range(1, 41))


def published(cache: PrefixCache, tokens: list[int]) -> Lease:
    """Compute what the cache lacks of `tokens`, and publish all whole pages."""
    lease = cache.acquire(CacheKey(tokens))
    num_missing = len(tokens) // cache.page_size - len(lease.pages)
    return cache.publish(lease, CacheKey(tokens), cache.reserve(num_missing))


def test_pages_before_the_window_are_freed_and_the_lease_keeps_its_length() -> None:
    """Of 10 pages of 4, a query at position 40 with a window of 9 reads from token 32 on."""
    cache = PrefixCache(16, 4, window=9)
    lease = published(cache, PROMPT)
    last = list(lease.pages)[8:]

    assert count_outside_window(cache, [lease], [40]) == 8
    assert release_outside_window(cache, [lease], [40]) == 8

    assert lease.pages == [*[16] * 8, *last]
    assert (lease.num_tokens, cache.num_available) == (40, 14)
    assert cache.stats().evictions["window"] == 8
    assert release_outside_window(cache, [lease], [40]) == 0
    cache.check()


def test_pb14_the_oldest_positions_of_a_sequence_are_freed_not_all() -> None:
    """200 tokens and a window of 100: the query at position 200 reads the last 99 of them."""
    cache = PrefixCache(200, 1, window=100)
    lease = published(cache, list(range(200)))
    pages = list(lease.pages)

    num_released = release_outside_window(cache, [lease], [200])

    assert num_released == 101
    assert all(cache.is_free(page) for page in pages[:101])
    assert not any(cache.is_free(page) for page in pages[101:])
    assert list(lease.pages) == [cache.num_pages] * 101 + pages[101:]
    cache.release(lease)
    cache.check()


def test_a_prefix_hits_only_where_its_window_is_there() -> None:
    """The whole prefix still hits; a shorter one would read released pages, and hits nothing."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])

    assert cache.match(CacheKey([*PROMPT, 7])).num_tokens == 40
    assert cache.match(CacheKey([*PROMPT[:39], 99])).num_tokens == 0
    explanation = cache.explain(CacheKey([*PROMPT[:20], 99]))
    assert (explanation.reason, explanation.evicted_by) == ("evicted", "window")
    assert explanation.evicted_tokens == 20
    with pytest.raises(LeaseError, match="window before that were released"):
        cache.fork(lease, 36)
    assert cache.fork(lease, 0).num_tokens == 0


def test_a_page_that_another_lease_holds_stays() -> None:
    """A pin, and a request that is not as far, keep what they read."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    pin = cache.pin(CacheKey(PROMPT[:8]), "operator")
    behind = cache.acquire(CacheKey([*PROMPT[:24], 99]))

    assert release_outside_window(cache, [lease], [40]) == 2
    assert release_outside_window(cache, [lease, behind], [40, 24]) == 2
    assert behind.pages[:2] == lease.pages[:2]
    assert 32 not in lease.pages[:2]
    assert list(lease.pages).count(32) == 4
    cache.unpin(pin)
    assert release_outside_window(cache, [lease, behind], [40, 24]) == 2
    cache.check()


def test_computing_the_tokens_again_restores_their_pages() -> None:
    """In chunks that end inside the released run; subscribers see each page once."""
    cache = PrefixCache(32, 4, window=9)
    events = cache.subscribe()
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    other = cache.acquire(CacheKey([*PROMPT[:22], 99]))
    assert other.num_tokens == 0
    private = cache.reserve(5)
    other = cache.publish(other, CacheKey(PROMPT[:12]), private[:3])
    assert cache.match(CacheKey(PROMPT[:13])).num_tokens == 12
    other = cache.publish(other, CacheKey(PROMPT[:20]), private[3:])

    assert other.pages == private
    assert cache.match(CacheKey(PROMPT[:21])).num_tokens == 20
    assert cache.sharing([lease, other]) == [(-1, 0), (-1, 0)]
    cache.check()
    stored, digest = set[bytes](), 0
    for event in events.take():
        for name in event.page_hashes if event.kind in ("stored", "removed") else ():
            assert (name in stored) == (event.kind == "removed")
            stored ^= {name}
    for name in stored:
        digest ^= int.from_bytes(name, "big")
    snapshot = cache.snapshot()
    assert snapshot.digest == digest.to_bytes(16, "big")
    assert {name for run in snapshot.runs for name in run.page_hashes} == stored
    assert all(32 not in run.pages for run in snapshot.runs)
    cache.release(lease)
    cache.release(other)
    assert cache.clear() == 7
    assert cache.stats().free_pages == 32


def test_a_node_that_owns_no_page_leaves_with_those_below() -> None:
    """Its pages are restored and released again; then all is evicted, and no event is doubled."""
    cache = PrefixCache(32, 4, window=9)
    events = cache.subscribe()
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    other = cache.acquire(CacheKey([*PROMPT[:22], 99]))
    other = cache.publish(other, CacheKey(PROMPT[:12]), cache.reserve(3))
    assert release_outside_window(cache, [lease, other], [40, 40]) == 3
    cache.release(other)
    cache.release(lease)
    cache.check()

    assert cache.num_available == 32
    assert cache.evict(2) == 2
    cache.check()
    assert cache.clear() == 0
    assert cache.stats().num_nodes == 0
    kinds = [(event.kind, len(event.pages)) for event in events.take()]
    assert kinds == [
        ("stored", 10),
        ("removed", 8),
        ("stored", 3),
        ("removed", 3),
        ("removed", 2),
        ("cleared", 0),
    ]


def test_a_withdrawn_lease_keeps_no_page() -> None:
    """It counts as a reader until its owner releases it."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    longer = [*PROMPT, *range(50, 60)]
    leader = cache.announce(cache.acquire(CacheKey(longer)), CacheKey(longer), cache.reserve(2))
    follower = cache.attach(CacheKey([*longer, 1]))
    assert cache.withdraw(leader) == [follower]

    assert release_outside_window(cache, [lease], [40]) == 0
    assert release_outside_window(cache, [lease, leader, follower], [40, 40, 40]) == 8
    for held_lease in (lease, leader, follower):
        cache.release(held_lease)
    assert cache.clear() == 2
    cache.check()


def test_without_a_window_nothing_is_outside() -> None:
    cache = PrefixCache(16, 4)
    lease = published(cache, PROMPT)
    assert count_outside_window(cache, [lease], [40]) == 0
    assert release_outside_window(cache, [lease], [40]) == 0
    assert is_readable(cache, [16, 16], 8)
    assert has_next_page(cache, cache.acquire(CacheKey([7])), CacheKey(PROMPT))
    assert not has_next_page(cache, lease, CacheKey(PROMPT))


def test_pages_are_restored_where_no_lease_is_left() -> None:
    """They are evictable again with the others once their second request has ended."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    cache.release(lease)
    cache.check()
    other = cache.acquire(CacheKey([*PROMPT[:22], 99]))
    other = cache.publish(other, CacheKey(PROMPT[:20]), cache.reserve(5))
    cache.check()
    cache.release(other)
    cache.check()
    assert cache.clear() == 7
    assert cache.stats().free_pages == 32


@pytest.mark.parametrize("share", [True, False])
def test_no_row_of_a_decode_names_a_freed_page(share: bool) -> None:
    """A batch that continues the last one has the pages that its row has now."""
    cache, table = PrefixCache(12, 2, window=6), PagedBlockTable(2, 60, 2)
    planner = RadixAttentionPlanner(cache, table, share=share)
    sequence, rows = RadixSequence(array("i", range(1, 9))), list[list[int]]()
    for token in range(50):
        batch = planner.plan([sequence])
        assert sequence.row is not None
        assert batch.block_table[0].tolist() == table.pages(sequence.row)
        assert not any(cache.is_free(page) for page in batch.block_table[0].tolist())
        planner.commit([sequence])
        sequence.tokens.append(token)
        rows.append(batch.block_table[0].tolist())
    assert any(12 in row for row in rows)


def test_a_lease_named_twice_is_no_second_reader() -> None:
    """It would pass for the pin and the request that read the pages."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    cache.pin(CacheKey(PROMPT[:8]), "operator")
    behind = cache.acquire(CacheKey([*PROMPT[:24], 99]))
    with pytest.raises(LeaseError, match="named twice"):
        release_outside_window(cache, [lease, lease, lease], [40, 40, 40])
    assert not any(cache.is_free(page) for page in [*lease.pages, *behind.pages])


def test_no_lease_keeps_a_freed_page_if_the_clock_raises() -> None:
    """Some nodes were released: their pages are not in the lease any more."""
    num_readings = 1000

    def clock() -> float:
        nonlocal num_readings
        num_readings -= 1
        if num_readings < 0:
            raise KeyboardInterrupt
        return 1.0

    cache = PrefixCache(32, 4, window=9, clock=clock)
    lease = published(cache, PROMPT)
    cache.release(cache.fork(lease, 16))  # splits the node
    num_readings = 1
    with pytest.raises(KeyboardInterrupt):
        release_outside_window(cache, [lease], [40])
    num_readings = 1000
    assert 32 in lease.pages
    assert not any(page < 32 and cache.is_free(page) for page in lease.pages)
    cache.check()


def test_released_tokens_count_as_hits_of_an_infinite_cache() -> None:
    """Also where nothing was evicted."""
    cache = PrefixCache(32, 4, window=9)
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    cache.acquire(CacheKey([*PROMPT[:20], 99]))
    stats = cache.stats()
    assert (stats.hit_tokens, stats.ideal_hit_tokens) == (0, 20)


def test_pages_restored_under_a_pin_stay_in_its_budget() -> None:
    """A pin counts the released pages of its prefix: who computes them again has them pinned."""
    cache = PrefixCache(32, 4, window=9, max_pinned_share=0.25)
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    with pytest.raises(PinError, match="10 would be pinned, but at most 8 may be"):
        cache.pin(CacheKey(PROMPT), "operator")
    cache = PrefixCache(32, 4, window=9, max_pinned_share=0.5)
    lease = published(cache, PROMPT)
    release_outside_window(cache, [lease], [40])
    cache.pin(CacheKey(PROMPT), "operator")
    assert cache.stats().pinned_pages == 2
    other = cache.acquire(CacheKey([*PROMPT[:39], 99]))
    cache.release(cache.publish(other, CacheKey(PROMPT[:36]), cache.reserve(9)))
    assert cache.stats().pinned_pages == 10


def test_a_branch_takes_the_pages_before_windows() -> None:
    """Without them, `fork` would find no page for the copy of the last one."""
    cache, table = PrefixCache(8, 2, window=4), PagedBlockTable(2, 60, 2)
    planner = RadixAttentionPlanner(cache, table)
    sequence = RadixSequence(array("i", range(1, 16)))
    planner.plan([sequence])
    planner.commit([sequence])
    assert cache.num_available == 0
    clone, pairs = planner.fork(sequence)
    assert len(pairs) == 1
    for own in (sequence, clone):
        assert own.lease is not None
        assert own.row is not None
        assert table.pages(own.row) == [*own.lease.pages, *own.private]
        assert not any(cache.is_free(page) for page in table.pages(own.row))
    cache.check()


def test_an_error_counts_the_pages_before_windows() -> None:
    """The scheduler gives up as many admissions as pages are missing, not more."""
    cache, table = PrefixCache(16, 2, window=4), PagedBlockTable(3, 60, 2)
    planner = RadixAttentionPlanner(cache, table)
    sequence = RadixSequence(array("i", range(1, 31)))
    planner.plan([sequence])
    planner.commit([sequence])
    num_available = planner.num_available
    assert num_available > cache.num_available
    with pytest.raises(OutOfPagesError) as caught:
        planner.plan([RadixSequence(array("i", range(40, 70)))])
    error = caught.value
    assert error.asked == 15
    assert error.free + error.evictable == num_available


def test_without_releases_a_window_changes_nothing() -> None:
    """A mirror follows the events of a cache with a window as of any other."""
    cache = PrefixCache(16, 4, window=9)
    events = cache.subscribe()
    mirror = Mirror(cache.snapshot())
    cache.release(published(cache, PROMPT))
    mirror.apply(events.take())
    assert mirror.digest == cache.snapshot().digest
    assert cache.match(CacheKey(PROMPT[:21])).num_tokens == 20


@pytest.mark.parametrize("window", [0, -1, 1.5, "9"])
def test_a_window_is_a_number_of_tokens(window: object) -> None:
    with pytest.raises(ConfigError, match="window="):
        PrefixCache(4, 4, window=window)  # type: ignore[arg-type]


# -- the engine -------------------------------------------------------------------------------

LONG = [3 + i % 40 for i in range(300)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_longer_than_the_pool_is_served(prefix_cache: bool) -> None:
    """300 tokens and an answer, through 17 pages of 4: a window of 33, and steps of 24."""
    bench = Bench(
        pool_tokens=68, window=33, max_batch_tokens=24, prefix_cache=prefix_cache, max_num_seqs=4
    )
    first = bench.add(LONG, max_tokens=30, ignore_eos=True)
    bench.run()

    assert list(bench.outputs[first].token_ids) == expected(LONG, 30, ends=())
    assert (bench.core.cache.stats().evictions["window"] > 0) == prefix_cache
    bench.assert_nothing_leaked()


def test_the_next_turn_of_a_long_conversation_hits() -> None:
    """Its window is cached, though the pages before it are gone."""
    bench = Bench(pool_tokens=68, window=33, max_batch_tokens=24, max_num_seqs=4)
    first = bench.add(LONG, max_tokens=5, ignore_eos=True)
    bench.run()
    turn = [*LONG, *bench.outputs[first].token_ids, 5, 6, 7]
    second = bench.add(turn, max_tokens=5, ignore_eos=True)
    bench.run()

    assert bench.outputs[second].cache.read_tokens >= 300
    assert list(bench.outputs[second].token_ids) == expected(turn, 5, ends=())


def test_several_long_requests_share_a_small_pool() -> None:
    """Equal and different prompts, answers of several sequences; every answer is right."""
    bench = Bench(pool_tokens=140, window=20, max_batch_tokens=32, max_num_seqs=6)
    prompts = [LONG, LONG[:200], LONG[50:], LONG, [9, *LONG[:150]]]
    ids = [bench.add(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    both = bench.add(LONG[:120], max_tokens=8, n=2, ignore_eos=True)
    bench.run()

    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(bench.outputs[request_id].token_ids) == expected(prompt, 12, ends=())
    answer = expected(LONG[:120], 8, ends=())
    assert [list(c.token_ids) for c in bench.outputs[both].completions] == [answer, answer]
    bench.assert_nothing_leaked()


def test_a_pool_below_a_window_and_a_step_refuses_what_it_cannot_hold() -> None:
    """17 pages are needed for 300 tokens, 16 are there; a request of 16 pages fits."""
    bench = Bench(pool_tokens=64, window=33, max_batch_tokens=24)
    assert live_pages(300, 4, 33, 24) == 16
    bench = Bench(pool_tokens=60, window=33, max_batch_tokens=24)

    with pytest.raises(RequestTooLargeError):
        bench.add(LONG, max_tokens=5)
    bench.add(LONG[:50], max_tokens=5)
    bench.run()


def test_a_starving_tenant_takes_a_row_though_the_pages_are_before_windows() -> None:
    """It does not wait until they are released: with a larger pool it begins no earlier."""

    def num_steps(num_pages: int) -> int:
        bench = Bench(
            4 * num_pages,
            max_num_seqs=2,
            max_batch_tokens=64,
            window=40,
            options={"fair_wait_steps": 1},
        )
        for first, tenant in ((1, "a"), (2, "b")):
            prompt = [first, *(1 + at % 49 for at in range(759))]
            bench.add(prompt, max_tokens=300, ignore_eos=True, tenant=tenant)
        for _ in range(30):
            bench.step()
        waiting = bench.add([3 + at % 47 for at in range(100)], max_tokens=4, tenant="c")
        count = 0
        while waiting not in bench.outputs:
            bench.step()
            count += 1
        return count

    assert num_steps(412) == num_steps(800)


def test_pages_of_a_lease_compare_as_numbers() -> None:
    """`Lease.pages` is the same object kind before and after a release."""
    cache = PrefixCache(8, 1, window=2)
    lease = published(cache, [1, 2, 3])
    release_outside_window(cache, [lease], [3])
    assert isinstance(lease.pages, Pages)
    assert lease.pages[0] == 8


@pytest.mark.parametrize("num_calls", range(12))
def test_a_pin_may_expire_while_a_plan_looks_for_pages(num_calls: int) -> None:
    """Whichever reading of the clock ends it, the sequence is planned or there are no pages."""
    times = [0.0]
    cache = PrefixCache(4, 2, clock=lambda: times.pop() if len(times) > 1 else times[0])
    cache.release(published(cache, [1, 2, 3, 4]))
    cache.pin(CacheKey([1, 2, 3, 4]), "operator", ttl=5.0)
    planner = RadixAttentionPlanner(cache, PagedBlockTable(2, 8, 2), share=False)
    late = RadixSequence(array("i", [7] * 8))
    times[:] = [10.0, *[0.0] * num_calls]

    with suppress(OutOfPagesError):
        planner.plan([late])
    if not late.num_planned:
        times[:] = [10.0]
        planner.plan([late])

    assert late.num_planned == 8
    cache.check()
