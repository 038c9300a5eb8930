"""Columns are hidden from the cyclic garbage collector, and nothing leaks because of it."""

import gc
import sys
from array import array
from types import SimpleNamespace

import pytest

from ramify.cache import CacheKey, PrefixCache, RadixTree
from ramify.cache.gc_untracked import _untracker, untracked


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


def num_trees() -> int:
    gc.collect()
    return sum(type(obj) is RadixTree for obj in gc.get_objects())


def test_a_cache_that_nobody_has_any_more_is_collected() -> None:
    cache = PrefixCache(64, 4)
    for number in range(100):  # more than fits: some are evicted
        serve(cache, number)
    trees = num_trees()

    del cache

    assert num_trees() == trees - 1


def test_a_number_that_is_used_again_has_an_empty_column() -> None:
    """A reused node number starts with an empty policy column, whatever its empty value."""
    cache = PrefixCache(4, 4, ghost_pages=0)
    column = cache._store.tree.column(-1, inherited=True)
    serve(cache, 1)
    (node,) = cache._store.tree.nodes()
    column[node] = 7
    cache.clear()
    assert not list(cache._store.tree.nodes())

    serve(cache, 2)

    assert [column[node] for node in cache._store.tree.nodes()] == [-1]


@pytest.mark.parametrize("lacks", ["another Python", "ctypes", "the symbol"])
def test_where_nothing_can_be_untracked_everything_works(
    monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "another Python":
        monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="other"))
    elif lacks == "ctypes":
        monkeypatch.setitem(sys.modules, "ctypes", None)
    else:
        monkeypatch.setattr("ctypes.PYFUNCTYPE", missing)
    values = [0, 0.5, b"three"]

    _untracker()(values)

    assert gc.is_tracked(values)
    assert untracked(values) is values


def missing(*_: object) -> None:
    raise AttributeError("PyObject_GC_UnTrack")
