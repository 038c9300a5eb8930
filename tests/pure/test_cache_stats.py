"""Statistics: every number counts events and equals a recount."""

import logging
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, CacheStats, Histogram, PrefixCache
from ramify.cache.counters import RECENT_LOOKUPS, log2_bucket
from ramify.cache.types import NUM_BUCKETS
from tests.budget import examples
from tests.pure.cache_traffic import Clock, Traffic
from tests.pure.test_prefix_cache import begin, key, publish, serve

INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


def look_up(cache: PrefixCache, text: str, times: int = 1) -> None:
    for _ in range(times):
        cache.release(cache.acquire(key(text)))


# -- hit rates -----------------------------------------------------------------------------


def test_rates_are_tokens_found_over_tokens_asked_for() -> None:
    """Total, recent and ideal hit rates are hit tokens over looked-up tokens; 0 without lookups."""
    cache = PrefixCache(8, 2)
    empty = cache.stats()
    assert (empty.hit_rate, empty.recent_hit_rate, empty.ideal_hit_rate) == (0, 0, 0)

    serve(cache, "abcdef")
    look_up(cache, "abcdefgh")
    cache.clear()
    look_up(cache, "abcdefgh")

    stats = cache.stats()
    assert (stats.lookups, stats.lookup_tokens) == (3, 6 + 8 + 8)
    assert (stats.hit_tokens, stats.recent_hit_tokens, stats.ideal_hit_tokens) == (6, 6, 12)
    assert stats.hit_rate == stats.recent_hit_rate == 6 / 22
    assert stats.ideal_hit_rate == 12 / 22


@pytest.mark.parametrize("before", range(6))
def test_cancelled_lookups_never_count_lately_either(before: int) -> None:
    """Cancelled lookups leave the recent hit rate, even if a new generation began meanwhile."""
    cache = PrefixCache(64, 2)
    serve(cache, "abcd")
    look_up(cache, "abcde", RECENT_LOOKUPS - 5 + before)
    cancelled = [cache.acquire(CacheKey(range(100 * n, 100 * n + 90))) for n in range(1, 4)]
    for lease in cancelled:
        cache.cancel(lease)
    look_up(cache, "abcde", RECENT_LOOKUPS + 10)
    stats = cache.stats()

    assert stats.recent_hit_tokens * 5 == stats.recent_tokens * 4
    assert stats.recent_hit_rate == 0.8


def test_the_recent_rate_forgets() -> None:
    """The recent hit rate covers only the last 512 to 1,024 lookups."""
    cache = PrefixCache(8, 2, log_every=0)
    serve(cache, "abcd")
    seen = []

    for wanted in ("abcde", "unknown"):
        for _ in range(3 * RECENT_LOOKUPS):
            look_up(cache, wanted)
            stats = cache.stats()
            assert stats.recent_tokens <= 2 * RECENT_LOOKUPS * len(wanted) + 4
            assert stats.lookups < RECENT_LOOKUPS or stats.recent_tokens >= RECENT_LOOKUPS * 4
        seen.append(round(cache.stats().recent_hit_rate, 3))

    assert seen == [0.8, 0.0]
    assert cache.stats().hit_rate == pytest.approx(0.8 * 5 / 12, abs=0.001)


@pytest.mark.parametrize("call", ["acquire", "attach"])
@INDICES
def test_a_cancelled_lookup_was_never_counted(call: str, index: str) -> None:
    """A cancelled lookup leaves every statistic unchanged, node count excepted."""
    clock = Clock()
    cache = PrefixCache(8, 2, index=index, clock=clock)
    serve(cache, "abcdef")
    cache.evict(1)
    look_up(cache, "abcdx")
    clock.now_s += 100
    before = cache.stats()

    for text in ("abcdefgh", "abcdx", "abX", "unknown", ""):
        cache.cancel(getattr(cache, call)(key(text)))

    after = cache.stats()
    assert after.reuse_gap == before.reuse_gap
    assert {**vars_of(after), "num_nodes": 0} == {**vars_of(before), "num_nodes": 0}


def vars_of(stats: CacheStats) -> dict[str, object]:
    return {name: getattr(stats, name) for name in CacheStats.__slots__}


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 2**32),
    index=st.sampled_from(["radix", "hash"]),
    page_size=st.sampled_from([1, 2, 3]),
    ghost_pages=st.sampled_from([1000, None, 5, 0]),
)
def test_the_ideal_rate_is_that_of_an_infinite_cache(
    seed: int, index: str, page_size: int, ghost_pages: int | None
) -> None:
    """`ideal_hit_tokens` is an infinite cache's while every eviction is remembered, else lower."""
    random = Random(seed)
    cache = PrefixCache(random.randint(4, 12), page_size, index=index, ghost_pages=ghost_pages)
    traffic = Traffic(cache, random, alone=True)

    for _ in traffic.run(60):
        pass

    stored, ideal = set[tuple[bytes, bytes]](), 0
    for prompt in traffic.lookups:
        names = [
            (prompt.namespace, prompt.atoms[: 4 * end])
            for end in range(page_size, len(prompt) + 1, page_size)
        ]
        for at, name in enumerate(names):
            if name not in stored or (at + 1) * page_size >= len(prompt):
                break
            ideal += page_size
        stored.update(names)
    stats = cache.stats()
    assert stats.lookups == len(traffic.lookups)
    assert stats.hit_tokens <= stats.ideal_hit_tokens <= ideal
    if ghost_pages == 1000 or not stats.evicted_pages:
        assert stats.ideal_hit_tokens == ideal
    if ghost_pages == 0:
        assert stats.ideal_hit_tokens == stats.hit_tokens


# -- pages ---------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), index=st.sampled_from(["radix", "hash"]))
def test_every_page_is_counted_once(seed: int, index: str) -> None:
    """Free, private and cached pages add up to the pool; evictions and histograms agree."""
    random, clock = Random(seed), Clock()
    cache = PrefixCache(random.randint(6, 14), 2, index=index, clock=clock)
    traffic = Traffic(cache, random, clock)

    for _ in traffic.run(40):
        cache.pins()  # ends those whose time is over
        stats = cache.stats()
        assert stats.free_pages + stats.private_pages + stats.cached_pages == stats.num_pages
        assert stats.free_pages == sum(cache.is_free(page) for page in range(stats.num_pages))
        assert stats.private_pages == sum(len(user.private) for user in traffic.live)
        assert stats.evictable_pages <= stats.cached_pages - stats.pinned_pages
        assert stats.num_leases == len(traffic.live)
        assert stats.lookups == len(traffic.lookups)
        assert stats.lookup_tokens == sum(len(prompt) for prompt in traffic.lookups)
        assert stats.evicted_pages == sum(stats.evictions.values())
        assert stats.residency.total == stats.idle.total == stats.evicted_pages
        assert stats.reuse_gap.total <= stats.lookups


def evict_for(cache: PrefixCache) -> None:
    cache.give_back(cache.reserve(cache.num_pages))


@pytest.mark.parametrize(
    ("evict", "reason"),
    [
        (lambda cache: cache.evict(9), "asked"),
        (lambda cache: cache.clear(), "cleared"),
        (lambda cache: cache.evict_if(lambda node: True), "predicate"),
        (evict_for, "capacity"),
    ],
)
def test_evictions_are_counted_by_reason(
    evict: Callable[[PrefixCache], object], reason: str
) -> None:
    """Evicted pages are counted by reason; withdrawn pages are not counted."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")
    lease, private = begin(cache, "uvwx")
    leader = cache.announce(lease, key("uvwx"), private)
    cache.withdraw(leader)
    cache.release(leader)

    evict(cache)

    stats = cache.stats()
    none = dict.fromkeys(
        ("capacity", "session_ended", "asked", "cleared", "predicate", "window"), 0
    )
    assert stats.evictions == {**none, reason: 3}
    assert stats.evicted_pages == 3
    assert stats.ghost_pages == 5


# -- histograms ----------------------------------------------------------------------------


def test_ages_are_counted_in_powers_of_two() -> None:
    """Histograms have 24 power-of-two buckets from 1/256 s on; the last is unbounded."""
    bounds_s = Histogram((0,) * NUM_BUCKETS).bounds_s
    assert bounds_s[:3] == (1 / 256, 2 / 256, 4 / 256)
    assert len(bounds_s) == NUM_BUCKETS - 1

    for at, bound in enumerate(bounds_s):
        assert log2_bucket(bound * 0.999) == at
        assert log2_bucket(bound) == at + 1
    assert (log2_bucket(0), log2_bucket(1e12)) == (0, NUM_BUCKETS - 1)


def test_a_quantile_is_an_upper_bound() -> None:
    """A quantile is the upper end of its bucket; infinite in the last bucket, 0 without counts."""
    counts = [0] * NUM_BUCKETS
    assert Histogram(tuple(counts)).quantile_s(0.5) == 0
    counts[2], counts[10], counts[-1] = 5, 4, 1
    ages = Histogram(tuple(counts))

    assert ages.total == 10
    assert ages.quantile_s(0.5) == ages.bounds_s[2] == 4 / 256
    assert ages.quantile_s(0.51) == ages.quantile_s(0.9) == ages.bounds_s[10] == 4
    assert ages.quantile_s(1) == float("inf")


def test_residency_and_idleness_are_in_seconds_by_page() -> None:
    """Residency runs from publication to eviction, idleness from the last use to eviction."""
    clock = Clock()
    cache = PrefixCache(8, 2, clock=clock, policy="lru")
    serve(cache, "abcd")
    clock.now_s += 10
    look_up(cache, "abcde")
    serve(cache, "uv")
    clock.now_s += 1

    cache.evict(2)
    stats = cache.stats()
    assert stats.residency.counts[log2_bucket(11)] == 2
    assert stats.idle.counts[log2_bucket(1)] == 2
    cache.evict(1)

    stats = cache.stats()
    assert (stats.residency.total, stats.idle.total) == (3, 3)
    assert stats.residency.counts[log2_bucket(1)] == 1
    assert stats.idle.counts[log2_bucket(1)] == 3


def test_the_gap_before_a_hit_is_counted_by_lookup() -> None:
    """`reuse_gap` counts seconds since the last use of a hit's last node; misses count nothing."""
    clock = Clock()
    cache = PrefixCache(8, 2, clock=clock)
    serve(cache, "abcd")
    clock.now_s += 3
    look_up(cache, "abcde")
    clock.now_s += 100
    look_up(cache, "abX")
    look_up(cache, "unknown")

    gaps = cache.stats().reuse_gap

    assert gaps.total == 2
    assert (gaps.counts[log2_bucket(3)], gaps.counts[log2_bucket(100)]) == (1, 1)


def test_pages_that_are_still_in_use_have_a_last_use() -> None:
    """A hit on pages that their publisher still uses has a short reuse gap."""
    clock = Clock()
    cache = PrefixCache(8, 2, clock=clock)
    publish(cache, "abcd", *begin(cache, "abcd"))
    clock.now_s += 1

    look_up(cache, "abcde")

    assert cache.stats().reuse_gap.counts[log2_bucket(1)] == 1


def test_what_was_never_computed_is_no_ideal_hit() -> None:
    """Pending and withdrawn pages are not counted as ideal hits."""
    cache = PrefixCache(16, 2)
    serve(cache, "zz")
    cache.evict(1)
    lease, private = begin(cache, "abcd")
    leader = cache.announce(lease, key("abcd"), private)
    look_up(cache, "abcdef")
    cache.withdraw(leader)
    cache.release(leader)

    look_up(cache, "abcdef")

    assert cache.stats().ideal_hit_tokens == 0


@INDICES
def test_what_was_computed_once_stays_an_ideal_hit(index: str) -> None:
    """Computed pages stay ideal hits after eviction, re-announcement and withdrawal."""
    cache = PrefixCache(16, 2, index=index)
    serve(cache, "abcdefgh")
    cache.clear()
    lease, private = begin(cache, "abcdxy")
    leader = cache.announce(lease, key("abcdxy"), private)
    before = cache.stats().ideal_hit_tokens
    look_up(cache, "abcdefghi")
    assert cache.stats().ideal_hit_tokens - before == 8
    cache.withdraw(leader)
    cache.release(leader)

    before = cache.stats().ideal_hit_tokens
    look_up(cache, "abcdefghi")
    assert cache.stats().ideal_hit_tokens - before == 8
    assert cache.explain(key("abcdefghi")).evicted_by == "cleared"
    before = cache.stats().ideal_hit_tokens
    look_up(cache, "abcdxyz")
    assert cache.stats().ideal_hit_tokens - before == 4


# -- the log -------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize(("log_every", "expected"), [(100, 2), (1, 250), (0, 0), (251, 0)])
def test_a_line_is_logged_every_so_many_lookups(
    log_every: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A line is logged every `log_every` lookups; 0 logs nothing."""
    caplog.set_level(logging.INFO, logger="ramify.cache")
    cache = PrefixCache(8, 2, log_every=log_every)

    look_up(cache, "abc", 250)

    assert len(lines(caplog)) == expected


def test_the_line_tells_of_lookups_since_the_last_and_of_pages_now(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line has lookups since the previous line, hit rates, and used, cached and free pages."""
    caplog.set_level(logging.INFO, logger="ramify.cache")
    cache = PrefixCache(10, 2, log_every=2)
    serve(cache, "abcdef")
    held, _ = publish(cache, "uvwx", *begin(cache, "uvwx"))
    cache.evict(1)
    cache.reserve(1)
    look_up(cache, "abcdefgh")
    look_up(cache, "abcd")

    first, second = lines(caplog)
    assert first == (
        "prefix cache: 2 lookups, 0 of 10 tokens found (0.0 %; 0.0 % since the start, 0.0 % in an "
        "infinite cache); pages 0 in use, 3 cached, 7 free; 0 evicted so far"
    )
    assert second == (
        "prefix cache: 2 lookups, 6 of 12 tokens found (50.0 %; 27.3 % since the start, 36.4 % in "
        "an infinite cache); pages 4 in use, 1 cached, 5 free; 1 evicted so far"
    )
    assert held.num_tokens == 4


def test_cancelled_lookups_log_nothing_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Cancelling every second lookup does not log more often."""
    caplog.set_level(logging.INFO, logger="ramify.cache")
    cache = PrefixCache(8, 2, log_every=10)

    for _ in range(100):
        lease = cache.acquire(CacheKey([1, 2, 3]))
        cache.cancel(cache.acquire(CacheKey([1, 2, 3])))
        cache.release(lease)

    assert 9 <= len(lines(caplog)) <= 11
