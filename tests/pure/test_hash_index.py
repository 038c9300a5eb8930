"""The flat index: pages by a hash of all before them, verified, bounded, and as good as the tree.

Tags such as A7 and AB6 number the contracts and the faults of earlier systems.
"""

from collections.abc import Callable
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, Lease, PrefixCache
from ramify.cache.hash_index import HashIndex
from ramify.cache.key import chain_hashes
from ramify.errors import OutOfPagesError
from tests.budget import examples

Chain = Callable[[bytes, bytes, int], bytes]


def one_byte(parent: bytes, page: bytes, page_bytes: int) -> bytes:
    """Hash to one byte: with 300 pages some hashes must be equal."""
    return chain_hashes(parent, page, page_bytes)[:1]


def constant(parent: bytes, page: bytes, page_bytes: int) -> bytes:
    """Hash every page to the same value."""
    return b"\0"


def make(
    num_pages: int, page_size: int = 2, chain: Chain = chain_hashes, ghost_pages: int | None = None
) -> tuple[PrefixCache, HashIndex]:
    cache = PrefixCache(num_pages, page_size, index="hash", ghost_pages=ghost_pages)
    index = HashIndex(cache._tree, chain)
    cache._tree.index = index
    return cache, index


def key(text: str) -> CacheKey:
    return CacheKey(list(text.encode()))


def serve(cache: PrefixCache, text: str) -> Lease:
    """Run a request from begin to end; returns its last lease."""
    lease = cache.acquire(key(text))
    private = cache.reserve(-(-len(text) // cache.page_size) - len(lease.pages))
    new = cache.publish(lease, key(text), private)
    cache.release(new, private[len(new.pages) - len(lease.pages) :])
    return new


def hit_pages(cache: PrefixCache, text: str) -> int:
    return cache.match(key(text + "!")).num_pages


def entries(index: HashIndex) -> tuple[int, int, int]:
    """Return the number of nodes with a hash, of known hashes, and of collided nodes."""
    return (
        sum(map(bool, index._hashes)),
        sum(map(len, index._nodes)),
        sum(map(len, index._collided.values())),
    )


# -- a hash only proposes ------------------------------------------------------------------


@pytest.mark.parametrize("chain", [one_byte, constant])
def test_a_collision_never_gives_a_wrong_page(chain: Chain) -> None:
    """With colliding hashes, a lookup hits exactly the published pages."""
    cache, index = make(400, chain=chain)
    texts = ["".join(letters) for letters in product("abcdefg", repeat=3)]
    known, unknown = texts[::2], texts[1::2]

    pages = {text: serve(cache, text * 2).pages for text in known[:90]}

    assert entries(index)[2] > 0
    for text, expected in pages.items():
        lease = cache.acquire(key(text * 2 + "!"))
        assert lease.pages == expected
        cache.release(lease)
    for text in unknown:
        assert hit_pages(cache, text * 2) < 3
    cache.check()


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_colliding_pages_are_removed_in_every_order(order: tuple[str, ...]) -> None:
    """Evicting colliding pages in any order leaves the others reachable and no entry behind."""
    cache, index = make(8, chain=constant, ghost_pages=0)
    for letter in "abcd":
        serve(cache, letter * 2)
    for letter in order:
        cache.release(cache.acquire(key(letter * 2 + "!")))  # who was used first goes first

    for gone in range(1, 5):
        assert cache.evict(1) == 1
        left = [letter for letter in "abcd" if hit_pages(cache, letter * 2)]
        assert left == sorted(order[gone:])
        cache.check()

    assert entries(index) == (0, 0, 0)


@pytest.mark.parametrize("chain", [one_byte, constant, chain_hashes])
@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(st.text("ab", max_size=10), st.integers(0, 5)), min_size=1, max_size=25
    ),
    ghost_pages=st.sampled_from([0, 4, 100]),
)
def test_any_history_leaves_just_the_entries_of_what_is_known(
    chain: Chain, steps: list[tuple[str, int]], ghost_pages: int
) -> None:
    """After any history, each cached or ghost node has exactly one hash entry."""
    cache, index = make(12, chain=chain, ghost_pages=ghost_pages)

    for text, evicted in steps:
        serve(cache, text)
        cache.evict(evicted)
        cache.check()  # every node is found by its content
        hashed, names, collided = entries(index)
        assert hashed == names + collided == cache._tree.num_nodes
        assert all(index._collided.values())


def test_ab22_a_page_is_found_behind_its_own_ancestors_only() -> None:
    """A page with equal tokens and equal hash but another parent is a miss."""
    cache, _ = make(16, chain=constant)
    serve(cache, "abcdef")

    assert [hit_pages(cache, text) for text in ("abcdef", "cdef", "abef", "xxcdef")] == [3, 0, 1, 0]


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["", "model"])
def test_the_index_knows_pages_by_the_names_that_stores_use(namespace: str) -> None:
    """A node's hash equals that of `CacheKey.page_hashes`, in every namespace."""
    cache, index = make(16)
    prompt = CacheKey(list(b"abcdefgh"), namespace)
    cache.publish(cache.acquire(prompt), prompt, cache.reserve(4))

    hashes = [index._hash_of(node) for node in cache._tree.nodes()]

    assert hashes == prompt.page_hashes(2)


def test_every_node_is_one_page() -> None:
    """Every node of the hash index is one page: nothing is split or merged."""
    cache, _ = make(16)
    for text in ("abcdefgh", "abcdxy", "abcdefghij"):
        serve(cache, text)

    assert [cache._tree.length[node] for node in cache._tree.nodes()] == [1] * 6


# -- what an engine with a flat index promises ---------------------------------------------


def test_a_lookup_hashes_each_page_once_whatever_is_cached() -> None:
    """A lookup hashes each page of the hit and the first miss once, whatever the cache size."""
    calls = []

    def counting(parent: bytes, page: bytes, page_bytes: int) -> bytes:
        calls.append(page)
        return chain_hashes(parent, page, page_bytes)

    cache, _ = make(500, chain=counting)
    seen = []
    for number in range(200):
        serve(cache, f"abcdef{number:02x}")
        calls.clear()
        assert hit_pages(cache, "abcdefzz") == 3
        seen.append(len(calls))

    assert set(seen) == {4}


def test_a7_a_page_handed_out_again_is_no_longer_found_by_its_old_hash() -> None:
    """A reallocated page is no longer reachable by its old hash."""
    cache, index = make(3, ghost_pages=0)
    old = serve(cache, "abcdef")

    pages = cache.reserve(3)

    assert sorted(pages) == sorted(old.pages)
    assert hit_pages(cache, "abcdef") == 0
    assert entries(index) == (0, 0, 0)


def test_a7_a_remembered_page_is_no_hit() -> None:
    """A ghost is no hit: its page now belongs to another request."""
    cache, _ = make(3)
    serve(cache, "abcdef")

    pages = cache.reserve(2)

    assert hit_pages(cache, "abcdef") == 1
    lease = cache.acquire(key("abcdef!"))
    assert set(lease.pages).isdisjoint(pages)
    assert len(lease.pages) == 1


@pytest.mark.parametrize("ghost_pages", [0, 8])
def test_ab6_sizes_are_bounded_by_pages_not_by_requests(ghost_pages: int) -> None:
    """Index sizes are bounded by pages and ghosts, however many requests have run."""
    cache, index = make(8, ghost_pages=ghost_pages)

    for i in range(1000):
        serve(cache, f"{i:06}")
        serve(cache, f"{i:06}")

    hashed, names, collided = entries(index)
    assert (hashed, collided) == (names, 0)
    assert hashed <= 8 + ghost_pages
    assert cache.stats().num_nodes <= 8
    assert cache._tree._capacity <= 64
    cache.check()


def test_ab7_use_refreshes_recency() -> None:
    """A hit moves its pages to the end of the LRU order."""
    cache, _ = make(8)
    for text in ("hothot", "coldie"):
        serve(cache, text)
    serve(cache, "hothot")

    cache.evict(3)

    assert (hit_pages(cache, "hothot"), hit_pages(cache, "coldie")) == (3, 0)


def test_a6_vacant_pages_are_used_before_warm_ones() -> None:
    """Free pages are used before any eviction, then the least recently released pages."""
    cache, _ = make(8)
    first, second = serve(cache, "abcd").pages, serve(cache, "uvwx").pages

    vacant = cache.reserve(4)
    warm = cache.reserve(3)

    assert set(vacant).isdisjoint([*first, *second])
    assert set(warm[:2]) | {warm[2]} == {*first, second[1]}
    assert (hit_pages(cache, "abcd"), hit_pages(cache, "uvwx")) == (0, 1)


def test_a6_a_page_that_is_in_use_is_not_there_to_be_had() -> None:
    """Leased pages are not evictable, wherever they were in the LRU order."""
    cache, _ = make(6)
    serve(cache, "abcdef")
    serve(cache, "uvwxyz")

    lease = cache.acquire(key("abcdef!"))

    assert cache.num_available == 3
    assert set(cache.reserve(3)).isdisjoint(lease.pages)
    with pytest.raises(OutOfPagesError):
        cache.reserve(1)


def test_a11_the_tail_of_a_prompt_is_freed_before_its_head() -> None:
    """Eviction takes a prompt's last page first, so that a prefix stays cached."""
    cache, _ = make(8)
    pages = serve(cache, "abcdefgh").pages
    left = []

    for _ in range(4):
        cache.evict(1)
        left.append((hit_pages(cache, "abcdefgh"), [cache.is_free(page) for page in pages]))

    assert left == [(n, [i >= n for i in range(4)]) for n in (3, 2, 1, 0)]


# -- beside the radix tree -----------------------------------------------------------------


@settings(max_examples=examples(150))
@given(
    steps=st.lists(
        st.tuples(st.text("ab", max_size=12), st.integers(0, 4)), min_size=1, max_size=30
    ),
    page_size=st.integers(1, 3),
    num_pages=st.integers(12, 30),
)
def test_both_indices_find_the_same(
    steps: list[tuple[str, int]], page_size: int, num_pages: int
) -> None:
    """The radix and the hash index give equal hits, evictions and ghosts."""
    caches = [
        PrefixCache(num_pages, page_size, policy="lru", index=index, ghost_pages=1000)
        for index in ("radix", "hash")
    ]

    for text, evicted in steps:
        leases = [serve(cache, text) for cache in caches]
        assert leases[0].num_tokens == leases[1].num_tokens
        assert caches[0].evict(evicted) == caches[1].evict(evicted)
        for other, _ in steps:
            assert hit_pages(caches[0], other) == hit_pages(caches[1], other)

    radix, flat = (cache.stats() for cache in caches)
    assert radix.hit_tokens == flat.hit_tokens
    assert radix.ideal_hit_tokens == flat.ideal_hit_tokens
    assert radix.evicted_pages == flat.evicted_pages
    assert radix.ghost_pages == flat.ghost_pages


def test_a_page_is_named_also_when_nobody_asked_for_it_before() -> None:
    """`add` hashes a page that no lookup has missed before."""
    cache, index = make(4)
    tree = cache._tree
    root = tree.add_root(b"other")

    node = tree.add(root, key("ab").atoms, b"\0" * 4, 0)

    assert index.find(root, key("abc").atoms, 0) == node
