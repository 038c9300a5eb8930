"""The prefix cache by example: prompts are text, a token per letter, two tokens per page.

Tags such as PB1 and AB3 number the faults of earlier systems, which the tests keep out.
"""

from collections.abc import Sequence
from itertools import permutations

import pytest

from ramify.cache import CacheKey, Lease, Node, PrefixCache, RadixTree
from ramify.errors import ConfigError, LeaseError, OutOfPagesError


def key(text: str, namespace: str = "") -> CacheKey:
    return CacheKey(list(text.encode()), namespace)


def begin(cache: PrefixCache, text: str, namespace: str = "") -> tuple[Lease, Sequence[int]]:
    """Acquire a prompt's cached prefix and reserve private pages for the rest; returns both."""
    lease = cache.acquire(key(text, namespace))
    return lease, cache.reserve(-(-len(text) // cache.page_size) - len(lease.pages))


def publish(
    cache: PrefixCache, text: str, lease: Lease, private: Sequence[int]
) -> tuple[Lease, Sequence[int]]:
    new = cache.publish(lease, key(text, lease.key.namespace.decode()), private)
    return new, private[len(new.pages) - len(lease.pages) :]


def serve(cache: PrefixCache, text: str, namespace: str = "") -> Sequence[int]:
    """Run a request from begin to end; returns the pages that stay cached."""
    lease, private = publish(cache, text, *begin(cache, text, namespace))
    cache.release(lease, private)
    return lease.pages


def state(cache: PrefixCache) -> tuple:
    return cache.stats(), cache._store.ledger._free.tobytes(), cached_nodes(cache)


def cached_nodes(cache: PrefixCache) -> list[Node]:
    """Return the nodes that have pages, without ghosts."""
    nodes = [cache._tree.node(number) for number in cache._tree.nodes()]
    return [node for node in nodes if node.pages]


def drained(cache: PrefixCache) -> bool:
    """Clear the cache; returns whether every page is free again."""
    cache.clear()
    cache.check()
    stats = cache.stats()
    return (stats.free_pages, stats.num_nodes) == (cache.num_pages, 0)


# -- two identical prompts in one batch ----------------------------------------------------


def assert_nobody_shares(cache: PrefixCache, tables: list[list[int]]) -> None:
    """Assert that no page in use is free and that new reservations get none of them."""
    used = {page for table in tables for page in table}
    assert not any(cache.is_free(page) for page in used)
    assert used.isdisjoint(cache.reserve(cache.num_available))
    cache.check()


@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))])
def test_identical_cold_prompts_in_one_batch_never_use_free_pages(order: tuple[int, ...]) -> None:
    """Regression 1, PB21: in any order of publishing, no request decodes from a free page.

    A peer engine frees the second request's duplicate pages but keeps them in its block table.
    """
    cache = PrefixCache(32, 2)
    requests = [begin(cache, "abcdefg") for _ in order]  # all look up before any publishes

    for who in order:
        requests[who] = publish(cache, "abcdefg", *requests[who])

    tables = [[*lease.pages, *private] for lease, private in requests]
    assert all(table[:3] == tables[0][:3] for table in tables)
    assert len({table[3] for table in tables}) == len(order)
    assert_nobody_shares(cache, tables)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_leader_a_follower_and_a_stranger_never_use_free_pages(order: tuple[int, ...]) -> None:
    """Regression 1: a leader, a follower and an independent request never use free pages."""
    cache = PrefixCache(32, 2)
    stranger = begin(cache, "abcdefg")
    lease, private = begin(cache, "abcdefg")
    leader = (cache.announce(lease, key("abcdef"), private), private[3:])
    follower = (cache.attach(key("abcdefg")), cache.reserve(1))
    requests = [leader, follower, stranger]
    assert follower[0].num_pending == 3

    for who in order:
        if who == 1 and order.index(0) > order.index(1):
            with pytest.raises(LeaseError, match="publish their leader first"):
                publish(cache, "abcdefg", *requests[1])
        else:
            requests[who] = publish(cache, "abcdefg", *requests[who])

    tables = [[*lease.pages, *private] for lease, private in requests]
    assert tables[0][:3] == tables[1][:3]
    assert_nobody_shares(cache, tables)


def test_pb21_duplicates_behind_somebody_elses_pending_pages_stay_private() -> None:
    """A request that computed a leader's pending pages too keeps its own until it can publish."""
    cache = PrefixCache(16, 2)
    other = begin(cache, "abcdefg")
    lease, private = begin(cache, "abcdefg")
    leader = cache.announce(lease, key("abcdef"), private)

    early, mine = publish(cache, "abcdefg", *other)
    assert (list(early.pages), mine) == ([], other[1])
    cache.publish(leader, key("abcdef"))
    late, mine = publish(cache, "abcdefg", early, mine)

    assert (late.pages, mine) == (leader.pages, other[1][3:])
    assert all(cache.is_free(page) for page in other[1][:3])


# -- matching ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "num_hit"),
    [("abcdefg", 6), ("abcdef", 4), ("abcd", 2), ("abcx", 2), ("axcd", 0), ("a", 0), ("", 0)],
)
def test_pb20_ab2_a_match_is_whole_pages_and_shorter_than_the_prompt(
    prompt: str, num_hit: int
) -> None:
    """A match leaves at least one token to compute, also for a fully cached prompt."""
    cache = PrefixCache(16, 2)
    pages = serve(cache, "abcdef")

    match, lease = cache.match(key(prompt)), cache.acquire(key(prompt))

    assert (match.num_tokens, match.num_pages) == (num_hit, num_hit // 2)
    assert lease.pages == pages[: num_hit // 2]
    assert lease.key == key(prompt[:num_hit])


def test_pb18_match_changes_nothing() -> None:
    """`match` changes neither nodes, eviction order nor statistics; `acquire` splits."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")
    serve(cache, "xyz")
    before = state(cache)

    for text in ("abcdefg", "abcx", "ab", "xyz", "nothing"):
        cache.match(key(text))
        cache.match(key(text, "unknown"))

    assert state(cache) == before
    assert cache.evict(1) == 1
    assert cache.match(key("abcdefg")).num_pages == 2  # not refreshed by the queries


def test_ab22_a_page_is_found_behind_its_own_ancestors_only() -> None:
    """The same page of tokens behind another prefix is a miss."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")

    assert cache.match(key("xxcdefg")).num_pages == 0
    assert cache.match(key("cdefg")).num_pages == 0


def test_ab28_namespaces_never_share() -> None:
    """A prompt in another namespace matches no page, ready or pending."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef", "one")
    lease, private = begin(cache, "uvwxyz", "one")
    cache.announce(lease, key("uvwxyz", "one"), private)

    assert cache.match(key("abcdefg", "two")).num_pages == 0
    assert cache.attach(key("uvwxyz", "two")).pages == ()
    assert cache.match(key("abcdefg", "one")).num_pages == 3


def test_ab16_a_second_turn_finds_the_answer_of_the_first() -> None:
    """Decoded tokens are published like prefilled ones, and a second turn hits them."""
    cache = PrefixCache(16, 2)
    lease, private = publish(cache, "promp", *begin(cache, "promp"))
    private = [*private, *cache.reserve(3)]
    lease, private = publish(cache, "prompanswer", lease, private)
    cache.release(lease, private)

    assert cache.match(key("prompanswer, next?")).num_tokens == 10


def test_eb12_a_prompt_of_90000_tokens_is_nothing_special() -> None:
    """A prompt of 90,000 tokens works: no operation recurses with length or depth."""
    cache = PrefixCache(6000, 16)
    tokens = [i % 7 for i in range(90_000)]
    lease = cache.acquire(CacheKey(tokens))
    private = cache.reserve(5625)
    for end in range(16, 90_001, 16 * 25):
        taken = end // 16 - len(lease.pages)
        lease, private = cache.publish(lease, CacheKey(tokens[:end]), private), private[taken:]
        cache.release(cache.acquire(CacheKey([*tokens[: end - 8], 9, *range(20)])))
    cache.release(lease, private)

    assert cache.match(CacheKey(tokens)).num_tokens == lease.num_tokens > 89_000
    assert drained(cache)


# -- pins and splits -----------------------------------------------------------------------


def test_pb1_a_split_below_a_pin_leaks_nothing() -> None:
    """A deep pin and a shorter match that splits it: after both releases every page returns."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdefghij")
    deep, shallow = cache.acquire(key("abcdefghijk")), cache.acquire(key("abcdefx"))
    assert (len(deep.pages), len(shallow.pages)) == (5, 3)

    cache.release(deep)
    assert cache.num_available == 13
    assert cache.evict(16) == 2  # the deep half, as soon as nobody pins it
    cache.release(shallow)

    assert drained(cache)


def test_pb10_a_split_keeps_what_is_known_of_a_node_on_both_halves() -> None:
    """Both halves of a split keep priority, hits, recency, pins and pending state."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdefgh")
    cache.announce(lease, key("abcdefgh"), private)
    tree = cache._tree
    (lower,) = tree.nodes()
    tree.priority[lower], tree.hits[lower], tree.last_access[lower] = 100, 7, 5

    upper = tree.split(lower, 1)

    assert tree.parent[lower] == upper
    for half in (tree.node(upper), tree.node(lower)):
        assert (half.priority, half.hits, half.last_access) == (100, 7, 5)
        assert half.pins == 1
        assert half.is_pending
    cache.check()


def test_pb4_hits_are_counted() -> None:
    """A request counts as a hit on its node and its ancestors, and on no other node."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    serve(cache, "abxy")
    for _ in range(5):
        serve(cache, "abcde")

    assert sorted(node.hits for node in cached_nodes(cache)) == [0, 5, 6]


# -- eviction ------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first_and_its_tail_before_its_head() -> None:
    """Eviction takes the oldest leaf from its end, page by page, then the next oldest."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    serve(cache, "uvwx")
    left = []

    for _ in range(4):
        assert cache.evict(1) == 1
        left.append([cache.match(key(text)).num_pages for text in ("abcd!", "uvwx!")])

    assert left == [[1, 2], [0, 2], [0, 1], [0, 0]]


def test_ab7_use_refreshes_recency() -> None:
    """A page that was just reused is not the next victim."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    serve(cache, "uvwx")
    cache.release(cache.acquire(key("abcd!")))

    cache.evict(2)

    assert cache.match(key("abcd!")).num_pages == 2
    assert cache.match(key("uvwx!")).num_pages == 0


def test_pb2_parents_become_leaves_within_one_call() -> None:
    """One call evicts a chain of three nodes."""
    cache = PrefixCache(8, 2)
    for text in ("abcdefghij", "abcdef!!", "ab!!"):
        serve(cache, text)

    assert len(cache.reserve(8)) == 8
    assert cache.stats().evicted_pages == 7


def test_neither_pinned_nor_pending_pages_are_evicted() -> None:
    """No eviction takes a leased prefix or a leader's announced pages."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")
    reader = cache.acquire(key("abcde"))
    lease, private = begin(cache, "uvwx")
    leader = cache.announce(lease, key("uvwx"), private)

    assert cache.evict(100) == 1
    assert cache.clear() == 0

    assert not any(cache.is_free(page) for page in reader.pages + leader.pages)
    assert cache.match(key("abcde")).num_pages == 2
    cache.check()


@pytest.mark.parametrize("ask", [9, 100])
def test_pb3_a_request_beyond_capacity_evicts_nothing(ask: int) -> None:
    """A request that cannot fit is refused with page counts and evicts nothing."""
    cache = PrefixCache(10, 2)
    serve(cache, "abcd")
    lease, _ = begin(cache, "uv")
    before = state(cache)

    with pytest.raises(OutOfPagesError) as caught:
        cache.reserve(ask + 1)

    assert state(cache) == before
    error = caught.value
    assert (error.asked, error.free, error.evictable, error.total) == (ask + 1, 7, 2, 10)
    assert lease.pages == ()


def test_ab1_what_is_said_to_be_available_can_be_had() -> None:
    """`num_available` excludes leased pages, and exactly that many can be reserved."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")
    assert cache.num_available == 8

    lease = cache.acquire(key("abcdefg"))

    assert cache.num_available == 5
    assert set(cache.reserve(5)).isdisjoint(lease.pages)
    with pytest.raises(OutOfPagesError):
        cache.reserve(1)


def test_ab1_fewer_than_no_tokens_are_no_question() -> None:
    with pytest.raises(ConfigError, match="num_tokens=-100"):
        PrefixCache(num_pages=4, page_size=2).can_allocate(CacheKey([1, 2]), -100)


def test_a_tree_of_empty_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        RadixTree(0)


def test_pb19_prefixes_pinned_first_survive_each_others_reservations() -> None:
    """A reservation for one request never evicts the prefix that another has acquired."""
    cache = PrefixCache(6, 2)
    first, second = serve(cache, "abcd"), serve(cache, "uvwx")
    leases = [cache.acquire(key("abcd!!!")), cache.acquire(key("uvwx!!!"))]

    assert len(cache.reserve(2)) == 2
    with pytest.raises(OutOfPagesError):
        cache.reserve(2)

    assert [lease.pages for lease in leases] == [first, second]


def test_ab6_the_queue_is_bounded_when_every_request_is_a_hit() -> None:
    """1,000 full hits leave a single entry in the eviction queue."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")

    for _ in range(1000):
        serve(cache, "abcdef")

    assert cache._store.queue.num_queued == 1


def test_clear_keeps_what_is_in_use_and_gives_the_rest_back() -> None:
    """`clear` returns how many pages it freed; leased pages stay until their lease ends."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")
    serve(cache, "uvwx", "other")
    lease = cache.acquire(key("abc"))

    assert cache.clear() == 4
    cache.release(lease)

    assert cache.clear() == 1
    assert drained(cache)


def test_a_cancelled_lookup_leaves_the_eviction_order_as_it_was() -> None:
    """A cancelled lookup does not refresh recency: LRU order stays as before."""
    cache = PrefixCache(4, 1)
    old, new = serve(cache, "a"), serve(cache, "b")

    cache.cancel(cache.acquire(key("ax")))
    cache.evict(1)

    assert cache.is_free(old[0])
    assert not cache.is_free(new[0])
