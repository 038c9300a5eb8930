"""The end of a prompt that nobody will ask for goes; all before it, and what others use, stays."""

from ramify.cache import PrefixCache
from ramify.cache.maintenance import evict_suffix
from tests.pure.test_prefix_cache import cached_nodes, drained, key, serve


def cached(cache: PrefixCache, text: str) -> int:
    return cache.match(key(text + "??")).num_tokens


def test_whole_pages_beyond_the_given_tokens_go() -> None:
    """From one run of pages, or several; a page that is kept in part stays whole."""
    cache = PrefixCache(20, 2)
    serve(cache, "abcdefgh")
    serve(cache, "abcdefghijkl")
    serve(cache, "abcdXY")

    assert evict_suffix(cache, key("abcdefghijkl"), 7) == 3

    assert cached(cache, "abcdefghijkl") == 6
    assert cached(cache, "abcdXY") == 6
    cache.check()
    assert evict_suffix(cache, key("abcdefghijkl"), 7) == 0
    assert evict_suffix(cache, key("abcdefgh"), 0) == 1  # "abcd" is another prompt's too
    assert cached(cache, "abcdXY") == 6
    assert drained(cache)


def test_nothing_goes_that_somebody_needs() -> None:
    """Another prompt that goes on, a lease, an unknown prompt or namespace."""
    cache = PrefixCache(20, 2)
    serve(cache, "abcdef")
    serve(cache, "abcdefgh")
    before = cached_nodes(cache)

    assert evict_suffix(cache, key("abcd"), 0) == 0
    assert evict_suffix(cache, key("zz"), 0) == 0
    assert evict_suffix(cache, key("abcdefgh", "other"), 0) == 0
    lease = cache.acquire(key("abcdefgh?"))
    assert evict_suffix(cache, key("abcdefgh"), 2) == 0
    cache.release(lease)

    assert [node.pages for node in cached_nodes(cache)] == [node.pages for node in before]
    assert evict_suffix(cache, key("abcdefgh"), 2) == 3
    assert cached(cache, "abcdefgh") == 2
    assert drained(cache)


def test_what_is_left_can_still_be_evicted_and_used() -> None:
    """The rest of a run that was cut is in the order of eviction."""
    cache = PrefixCache(6, 2)
    serve(cache, "abcdefgh")
    evict_suffix(cache, key("abcdefgh"), 4)

    assert cache.stats().free_pages == 4
    serve(cache, "abcdwxyz")
    assert cache.stats().free_pages == 2
    serve(cache, "0123456789ab")
    assert cached(cache, "0123456789ab") == 12
    assert drained(cache)
