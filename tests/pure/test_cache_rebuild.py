"""An untrusted cache: evict one suspect prefix, or rebuild the whole cache in place."""

import pytest

from ramify.cache import PrefixCache
from ramify.cache.maintenance import evict_suspect_prefix, reset
from ramify.errors import LeaseError, PinError
from tests.pure.test_prefix_cache import begin, key, serve

INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


@INDICES
def test_what_is_condemned_goes_with_all_behind_it_and_its_pins(index: str) -> None:
    """Evicting a suspect prefix drops its continuations and pins, but no leased page."""
    cache = PrefixCache(64, 2, index=index)
    for text in ("abcdefgh", "abcdXYZW", "uvwx"):
        serve(cache, text)
    doomed, other = cache.pin(key("abcdef"), "one"), cache.pin(key("uvwx"), "two")
    lease, private = begin(cache, "abcdXYZWx")

    first = evict_suspect_prefix(cache, key("abcd!"))
    cache.release(lease, private)
    second = evict_suspect_prefix(cache, key("abcd!"))

    assert [pin.id for pin in cache.pins()] == [other.id]
    with pytest.raises(PinError):
        cache.unpin(doomed)
    assert (len(first), len(second)) == (2, 4)
    assert all(cache.is_free(page) for page in (*first, *second))
    assert cache.match(key("abcdefghi")).num_tokens == 0
    assert cache.match(key("uvwxyz")).num_tokens == 4
    cache.check()


def test_what_nobody_has_cannot_be_condemned() -> None:
    """A suspect prefix that is not cached evicts nothing."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")

    for cache_key in (key("xyz"), key("abcd", "elsewhere"), key(""), key("a")):
        assert evict_suspect_prefix(cache, cache_key) == []
    assert cache.match(key("abcde")).num_tokens == 4


def test_a_pin_may_expire_while_it_is_condemned() -> None:
    """A pin that expires during the eviction of its prefix causes no error."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    for early in range(1, 5):
        cache = PrefixCache(8, 2, clock=clock)
        serve(cache, "abcd")
        pin = cache.pin(key("abcd"), "me", 100.0)
        now[0] = pin.expires_s - early
        assert len(evict_suspect_prefix(cache, key("abcd"))) == 2
        assert not cache.pins()
        cache.check()


@INDICES
def test_a_cache_is_built_anew_in_place(index: str) -> None:
    """`reset` frees all pages and voids leases and pins; subscriptions and observers go on."""
    cache = PrefixCache(16, 2, policy="lru", index=index)
    subscription, gone = cache.subscribe(), []
    cache.observe_evictions(lambda eviction: gone.append(eviction.reason))
    serve(cache, "abcdef")
    cache.pin(key("abcdef"), "one")
    lease, private = begin(cache, "abcdxyz")
    lookups = cache.stats().lookups
    subscription.take()

    assert reset(cache) == 1

    assert cache.stats().free_pages == cache.num_pages == cache.num_available
    assert (cache.policy, cache.index, cache.pins()) == ("lru", index, [])
    assert cache.stats().lookups == lookups
    with pytest.raises(LeaseError):
        cache.release(lease, private)
    serve(cache, "abcdef")
    cache.evict(1)
    kinds = [event.kind for event in subscription.take()]
    assert kinds[0] == "cleared"
    assert {"stored", "removed"} <= set(kinds)
    assert gone == ["asked"]
    cache.check()


@INDICES
def test_an_evicted_tail_comes_back_without_anybody_listening(index: str) -> None:
    """A node whose last page was evicted is refilled in place."""
    cache = PrefixCache(16, 2, index=index)
    serve(cache, "abcdefgh")
    cache.evict(1)
    assert cache.match(key("abcdefghi")).num_tokens == 6

    serve(cache, "abcdefgh")

    assert cache.match(key("abcdefghi")).num_tokens == 8
    cache.check()
