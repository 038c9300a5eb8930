"""Images in prompts and tiers: pages are named by content, and come back under the same image only."""

from ramify.cache import CacheKey, PrefixCache
from ramify.cache.pages import Pages
from ramify.cache.promotion import attach_sink, lease_computed, publish_copies
from ramify.cache.tiers import WriteQueue
from tests.pure.test_cache_media import CAT, DOG, prompt, serve

PAGE = 4
TEXT = (1, 2, 3, 4)
TAIL = (5, 6, 7, 8, 10)


def names_written(key: CacheKey) -> list[bytes]:
    """The names under which the pages of a prompt are copied out of a pool that had other images before."""
    cache = PrefixCache(64, PAGE)
    queue = WriteQueue(cache.num_pages)
    attach_sink(cache, queue)
    serve(cache, prompt(*TEXT, (DOG, 5)))
    lease = serve(cache, key)
    names = [queue.name_of(page) for page in lease.pages]
    return [name.hash for name in names if name is not None]


def test_a_page_of_an_image_comes_back_under_that_image_only() -> None:
    """After a restart content atoms have other numbers; names are those of the digests all the same."""
    key = prompt(*TEXT, (CAT, 6), *TAIL)
    other = prompt(*TEXT, (DOG, 6), *TAIL)

    written = names_written(key)

    again = prompt(*TEXT, (CAT, 6), *TAIL)
    assert written == again.page_hashes(PAGE) and len(written) == 3
    assert [a == b for a, b in zip(written, other.page_hashes(PAGE), strict=True)] == [
        True,
        False,
        False,
    ]
    # Loaded into a pool that has computed nothing, the pages are read by the same prompt.
    cache = PrefixCache(64, PAGE)
    lease, private = publish_copies(
        cache,
        lease_computed(cache, again, 3 * PAGE),
        again.prefix(3 * PAGE),
        cache.reserve(3).packed,
    )
    cache.release(lease, Pages(private))
    cache.check()
    assert cache.match(again).num_tokens == 3 * PAGE
    assert cache.match(other).num_tokens == PAGE
