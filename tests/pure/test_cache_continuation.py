"""`continuation`: the prefix tree as a source of draft tokens."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, Lease, Media, PrefixCache, Salt
from ramify.cache.draft_lookup import MAX_SIBLINGS
from ramify.errors import InvalidKeyError, LeaseError
from tests.budget import examples

TEXT = list(range(10, 31))  # 5 pages of 4 and a token


def keep(cache: PrefixCache, key: CacheKey) -> None:
    """Publish the pages of `key` and release them."""
    lease = cache.acquire(key)
    pages = cache.reserve(key.num_pages(cache.page_size) - len(lease.pages))
    cache.release(cache.publish(lease, key, pages))


def after(cache: PrefixCache, context: list[int], limit: int = 99) -> list[int]:
    """Return the drafts for `context`, and check that the lookup breaks no invariant."""
    lease = cache.acquire(CacheKey(context))
    guess = cache.continuation(lease, context[lease.num_tokens :], limit)
    cache.release(lease)
    cache.check()
    return guess.tolist()


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("length", range(21))
def test_a_context_goes_on_as_it_did_before(index: str, length: int) -> None:
    """A context continues from any position, also inside a page, up to the last full page."""
    cache = PrefixCache(16, 4, index=index)
    keep(cache, CacheKey(TEXT))

    assert after(cache, TEXT[:length]) == TEXT[length:20]
    assert after(cache, TEXT[:length], limit=3) == TEXT[length:20][:3]
    assert after(cache, TEXT[:length], limit=0) == []


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize(
    "tail", [[99], [10, 99], [*TEXT[:3], 99], [*TEXT[:17], 99], [*TEXT[:6], 99]]
)
def test_a_context_that_nobody_had_has_no_continuation(index: str, tail: list[int]) -> None:
    """An unknown context has no continuation, also if it differs only in the last token."""
    cache = PrefixCache(16, 4, index=index)
    keep(cache, CacheKey(TEXT))

    assert after(cache, tail) == []


def test_a_tail_of_several_pages_is_followed() -> None:
    """The tail after the lease may span several pages, since a lease can lag behind the tree."""
    cache = PrefixCache(16, 4)
    keep(cache, CacheKey(TEXT[:8]))
    keep(cache, CacheKey(TEXT))
    empty = cache.acquire(CacheKey([]))

    assert cache.continuation(empty, TEXT[:18], 99).tolist() == TEXT[18:20]
    assert cache.continuation(empty, [*TEXT[:9], 99, *TEXT[10:12], 1], 99).tolist() == []
    assert cache.continuation(empty, [*TEXT[:14], 99], 99).tolist() == []


def test_the_way_that_was_used_last_is_told() -> None:
    """Among branches, the most recently used continues the context, not the newest node."""
    now = [0.0]
    cache = PrefixCache(64, 4, clock=lambda: now[0])
    for tail in (1, 2, 3):
        now[0] += 1.0
        keep(cache, CacheKey([*TEXT[:6], tail, tail, tail, tail, tail, tail]))
    assert after(cache, TEXT[:6]) == [3] * 6

    now[0] += 1.0
    keep(cache, CacheKey([*TEXT[:6], *[1] * 7]))

    assert after(cache, TEXT[:6]) == [1] * 6
    assert after(cache, [*TEXT[:6], 2]) == [2] * 5


def test_evicted_pages_tell_too() -> None:
    """Ghosts of evicted pages still continue a context."""
    cache = PrefixCache(16, 4)
    keep(cache, CacheKey(TEXT))
    cache.clear()

    assert after(cache, TEXT[:6]) == TEXT[6:20]
    assert cache.stats().cached_pages == 0


def test_pages_that_are_being_computed_tell_too() -> None:
    """Pending pages continue a context, since their tokens are known."""
    cache = PrefixCache(16, 4)
    leader = cache.acquire(CacheKey(TEXT))
    leader = cache.announce(leader, CacheKey(TEXT), cache.reserve(5))

    assert after(cache, TEXT[:6]) == TEXT[6:20]

    cache.release(leader)


def test_another_namespace_tells_nothing() -> None:
    """Tokens of another namespace are never proposed as drafts."""
    cache = PrefixCache(16, 4)
    keep(cache, CacheKey(TEXT, "theirs"))
    lease = cache.acquire(CacheKey(TEXT[:6], "ours"))

    assert cache.continuation(lease, TEXT[:6], 99).tolist() == []


def test_media_and_salts_end_it() -> None:
    """A continuation ends before the first media or salted atom."""
    cache = PrefixCache(32, 4)
    image = Media(Media.digest_of(b"image"), start=6, length=3)
    keep(cache, CacheKey(TEXT, media=[image]))
    assert after(cache, TEXT[:5]) == TEXT[5:6]
    assert after(cache, TEXT[:6]) == []
    cache = PrefixCache(32, 4)
    keep(cache, CacheKey(TEXT, salts=[Salt(9, "secret")]))

    assert after(cache, TEXT[:5]) == TEXT[5:9]
    assert after(cache, TEXT[:9]) == []
    assert after(cache, TEXT[:10]) == []


def test_at_most_so_many_siblings_are_looked_at() -> None:
    """Only the newest MAX_SIBLINGS branches are searched, which bounds the cost."""
    cache = PrefixCache(1024, 4)
    for number in range(MAX_SIBLINGS + 2):
        keep(cache, CacheKey([*TEXT[:4], 1, 100 + number, 3, 4]))

    assert after(cache, [*TEXT[:4], 1, 100]) == []
    assert after(cache, [*TEXT[:4], 1, 102]) == [3, 4]


def test_a_lease_that_has_ended_is_refused() -> None:
    """`continuation` refuses a released lease and negative token ids."""
    cache = PrefixCache(16, 4)
    keep(cache, CacheKey(TEXT))
    lease = cache.acquire(CacheKey(TEXT))

    with pytest.raises(InvalidKeyError, match="negative"):
        cache.continuation(lease, [-1], 4)
    cache.release(lease)
    with pytest.raises(LeaseError, match="not live"):
        cache.continuation(lease, [], 4)


@settings(max_examples=examples(60), deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=8),
    context=st.lists(st.integers(0, 2), max_size=12),
    page_size=st.sampled_from([1, 2, 4]),
    index=st.sampled_from(["radix", "hash"]),
    evicted=st.integers(0, 20),
)
def test_every_guess_was_said_before(
    texts: list[list[int]], context: list[int], page_size: int, index: str, evicted: int
) -> None:
    """Every continuation followed this context in a cached text; it is empty if no text did."""
    cache = PrefixCache(256, page_size, index=index)
    for text in texts:
        keep(cache, CacheKey(text))
    cache.evict(evicted)
    known = [text[: len(text) // page_size * page_size] for text in texts]
    before: Lease = cache.acquire(CacheKey(context))

    guess = cache.continuation(before, array("i", context[before.num_tokens :]), 99).tolist()

    ways = [text[len(context) :] for text in known if text[: len(context)] == context]
    assert guess in ways or (not any(ways) and guess == [])
