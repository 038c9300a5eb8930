"""Eviction observers: called with every evicted run while its pages are free."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import Evicted, Pages, PrefixCache
from tests.budget import examples
from tests.pure.cache_mirror import Mirror, content
from tests.pure.cache_traffic import Traffic
from tests.pure.test_prefix_cache import drained, key, serve


def test_an_observer_is_told_what_is_free_and_why() -> None:
    """An observer gets each run's namespace, atoms, position, pages and reason before reuse."""
    cache = PrefixCache(4, 2)
    pages = Pages.of(serve(cache, "abcdef", "n"))
    evictions: list[tuple[Evicted, bool]] = []
    stop = cache.observe_evictions(
        lambda eviction: evictions.append(
            (eviction, all(cache.is_free(page) for page in eviction.pages))
        )
    )

    cache.evict(1)
    cache.reserve(3)
    stop()
    stop()
    cache.clear()

    n, text = b"n", key("abcdef").atoms
    assert evictions == [
        (Evicted(n, text[16:], 2, pages[2:], "asked"), True),
        (Evicted(n, text[8:16], 1, pages[1:2], "capacity"), True),
    ]


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), index=st.sampled_from(["radix", "hash"]))
def test_observers_are_told_exactly_what_was_evicted(seed: int, index: str) -> None:
    """Over random traffic, observers see as many pages as `stats` counts, free at that moment."""
    random = Random(seed)
    cache = PrefixCache(random.randint(6, 14), 2, index=index)
    evictions: list[Evicted] = []

    def observe(eviction: Evicted) -> None:
        assert all(cache.is_free(page) for page in eviction.pages)
        assert len(eviction.atoms) == len(eviction.pages) * 2 * 4
        evictions.append(eviction)

    cache.observe_evictions(observe)
    for _ in Traffic(cache, random).run(30):
        pass

    stats = cache.stats()
    assert sum(len(eviction.pages) for eviction in evictions) == stats.evicted_pages
    for reason, count in stats.evictions.items():
        assert (
            sum(len(eviction.pages) for eviction in evictions if eviction.reason == reason) == count
        )


@pytest.mark.parametrize(
    "evict",
    [
        lambda cache: cache.evict(1),
        lambda cache: cache.reserve(8),
        lambda cache: cache.evict_if(lambda node: True),
        lambda cache: cache.clear(),
    ],
)
def test_an_observer_that_raises_leaves_a_whole_cache(
    evict: Callable[[PrefixCache], object],
) -> None:
    """The evicting call raises the observer's exception; pages, counts and events stay correct."""
    cache = PrefixCache(8, 2, ghost_pages=1)
    serve(cache, "abcdef")
    subscription = cache.subscribe()
    mirror = Mirror(cache.snapshot())

    def fail(eviction: Evicted) -> None:
        raise RuntimeError(eviction.reason)

    stop = cache.observe_evictions(fail)
    with pytest.raises(RuntimeError):
        evict(cache)
    stop()

    cache.check()
    assert cache.stats().private_pages == 0
    serve(cache, "uvwx")
    mirror.apply(subscription.take())
    assert mirror.pages == content(cache)
    assert drained(cache)


def test_each_call_stops_its_own_observer_once() -> None:
    """Stopping a registration of an observer, even twice, keeps its other registration."""
    cache = PrefixCache(8, 2)
    evictions: list[Evicted] = []
    first, second = (cache.observe_evictions(evictions.append) for _ in range(2))
    first()
    first()
    serve(cache, "abcd")
    cache.evict(2)
    assert len(evictions) == 1
    second()
    serve(cache, "abcd")
    cache.evict(2)
    assert len(evictions) == 1


def test_every_observer_is_told_though_one_raises() -> None:
    """Every observer gets every run; an observer's exception is raised after the last call."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")
    serve(cache, "abxy")
    evictions: list[Evicted] = []

    def fail(eviction: Evicted) -> None:
        raise RuntimeError(eviction.reason)

    cache.observe_evictions(fail)
    cache.observe_evictions(evictions.append)
    with pytest.raises(RuntimeError, match="cleared"):
        cache.clear()

    assert sum(len(eviction.pages) for eviction in evictions) == 3
