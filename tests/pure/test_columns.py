"""Columns stay out of the cyclic garbage collector's sight, and nothing leaks for it."""

import gc
import sys
import weakref
from array import array
from types import SimpleNamespace

import pytest

from ramify.cache import CacheKey, PrefixCache
from ramify.cache.columns import _untracker, column_of


def serve(cache: PrefixCache, first: int, pages: int = 2) -> None:
    key = CacheKey(array("i", [first]) * (cache.page_size * pages))
    lease = cache.acquire(key)
    cache.release(cache.publish(lease, key, cache.reserve(pages)))


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="CPython's collector")
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_no_column_is_traversed_however_long_it_has_become(index: str) -> None:
    cache = PrefixCache(6_000, 4, index=index, log_every=0)
    for number in range(3_000):
        serve(cache, number)
    gc.collect()

    columns = [column for column, _ in cache._store.tree._columns]

    assert len(columns) >= 28
    assert all(len(column) > 3_000 for column in columns)
    assert not any(gc.is_tracked(column) for column in columns)


def test_a_cache_that_nobody_has_any_more_is_collected() -> None:
    cache = PrefixCache(64, 4)
    for number in range(100):  # more than fits: some are evicted
        serve(cache, number)
    gone = weakref.ref(cache._store.tree)

    del cache
    gc.collect()

    assert gone() is None


def test_other_pythons_keep_their_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="other"))
    values = [0, 0.5, b"three"]

    _untracker()(values)

    assert gc.is_tracked(values)
    assert column_of(values) is values
