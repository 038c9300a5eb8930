"""The life of a lease by example: announce, publish, withdraw, release, cancel, and their misuse."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from ramify.cache import Lease, PrefixCache
from ramify.errors import ConfigError, InvariantError, LeaseError, PageOwnershipError
from tests.pure.test_prefix_cache import begin, cached_nodes, drained, key, publish, serve, state


def leader_and_follower(cache: PrefixCache) -> tuple[Lease, Lease]:
    """Announce "abcdef"; a follower attaches to its "abcd" and announces "xy" behind that."""
    lease, private = begin(cache, "abcdef")
    leader = cache.announce(lease, key("abcdef"), private)
    follower = cache.attach(key("abcdxyz"))
    return leader, cache.announce(follower, key("abcdxy"), cache.reserve(1))


# -- announce and publish ------------------------------------------------------------------


def test_ab3_pages_that_were_never_computed_are_no_hit() -> None:
    """A request aborted between announcing and its forward pass leaves no cached pages."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdefg")
    leader = cache.announce(lease, key("abcdef"), private)
    assert cache.match(key("abcdefg")).num_pages == 0

    cache.release(leader, private[3:])

    assert cache.attach(key("abcdefg")).pages == ()
    assert cache.stats().free_pages == 16
    cache.check()


def test_announced_pages_are_attached_to_and_found_once_published() -> None:
    """`attach` sees and counts pending pages; `acquire` and `match` see them once published."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdef")
    leader = cache.announce(lease, key("abcdef"), private)

    follower, stranger = cache.attach(key("abcdx")), cache.acquire(key("abcdx"))
    assert (follower.pages, follower.num_pending) == (leader.pages[:2], 2)
    assert (len(stranger.pages), leader.num_pending) == (0, 3)
    leader = cache.publish(leader, key("abcdef"))

    assert leader.num_pending == 0
    assert cache.match(key("abcdx")).num_pages == 2
    assert cache.publish(follower, follower.key).pages == leader.pages[:2]


def test_a_new_lease_counts_only_what_is_pending_still() -> None:
    """After its leader publishes, a follower's next lease counts only its own pending pages."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcd")
    leader = cache.announce(lease, key("abcd"), private)
    follower = cache.attach(key("abcdef!"))
    cache.publish(leader, key("abcd"))

    follower = cache.announce(follower, key("abcdef"), cache.reserve(1))

    assert (len(follower.pages), follower.num_pending) == (3, 1)


def test_announcing_what_the_tree_knows_changes_nothing() -> None:
    """`announce` returns the same lease if the next page is already cached or pending."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdef")
    other, others = begin(cache, "abcd")
    cache.announce(lease, key("abcdef"), private)
    before = state(cache)

    assert cache.announce(other, key("abcd"), others) is other
    assert cache.announce(other, key("a"), others) is other
    assert state(cache) == before


def test_a_leader_computes_in_chunks() -> None:
    """Each chunk of a prompt is found as soon as its leader publishes it."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdefgh")
    num_hit = []

    for end in (2, 6, 8):
        before = len(lease.pages)
        lease = cache.announce(lease, key("abcdefgh"[:end]), private)
        private = private[len(lease.pages) - before :]
        num_hit.append(cache.match(key("abcdefghi")).num_tokens)
        lease = cache.publish(lease, lease.key)

    assert num_hit == [0, 2, 6]
    assert cache.match(key("abcdefghi")).num_tokens == 8
    assert cache.stats().num_nodes == 3


def test_publishing_in_steps_grows_one_node() -> None:
    """A request that decodes alone extends its leaf instead of adding a node per page."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcdefgh")

    for end in (2, 4, 5, 8):
        lease, private = publish(cache, "abcdefgh"[:end], lease, private)

    assert cache.stats().num_nodes == 1
    assert len(lease.pages) == 4


def test_a_follower_publishes_after_its_leader() -> None:
    """Publishing before the leader is refused and changes nothing."""
    cache = PrefixCache(16, 2)
    leader, follower = leader_and_follower(cache)
    before = state(cache)

    with pytest.raises(LeaseError, match="publish their leader first"):
        cache.publish(follower, key("abcdxy"))
    assert state(cache) == before
    cache.publish(leader, key("abcdef"))
    cache.publish(follower, key("abcdxy"))

    assert cache.match(key("abcdxyz")).num_pages == 3
    cache.check()


# -- how it ends ---------------------------------------------------------------------------


def test_withdraw_takes_the_pending_pages_and_names_who_relied_on_them() -> None:
    """`withdraw` frees pending pages and returns the followers, which can then only be released."""
    cache = PrefixCache(16, 2)
    serve(cache, "ab")
    leader, follower = leader_and_follower(cache)
    stranger = cache.acquire(key("abx"))

    dependents = cache.withdraw(leader)

    assert dependents == [follower]
    assert all(cache.is_free(page) for page in leader.pages[1:] + follower.pages[1:])
    assert cache.attach(key("abcdef")).num_tokens == 2
    for lease in (leader, follower):
        for call in (cache.announce, cache.publish):
            with pytest.raises(LeaseError, match="lost pages"):
                call(lease, lease.key, ())
        with pytest.raises(LeaseError, match="lost pages"):
            cache.withdraw(lease)
        cache.release(lease)
    assert cache.publish(stranger, key("ab")).pages == stranger.pages
    cache.check()


def test_withdraw_of_a_lease_that_announced_nothing_changes_nothing() -> None:
    """Withdrawing a lease without pending pages returns no dependents and keeps it live."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    lease = cache.acquire(key("abcde"))
    before = state(cache)

    assert cache.withdraw(lease) == []
    assert state(cache) == before
    cache.release(lease)


def test_a_leader_with_followers_is_not_released() -> None:
    """Releasing a leader with followers is refused until `withdraw`."""
    cache = PrefixCache(16, 2)
    leader, follower = leader_and_follower(cache)
    before = state(cache)

    with pytest.raises(LeaseError, match="withdraw"):
        cache.release(leader)
    assert state(cache) == before
    cache.withdraw(leader)
    cache.release(leader)
    cache.release(follower)

    assert cache.stats().free_pages == 16
    assert drained(cache)


def test_cancel_undoes_a_lookup_in_the_statistics() -> None:
    """AB23: a cancelled lookup adds no lookup, no hit and no node hit."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")
    before = cache.stats()

    cache.cancel(cache.acquire(key("abcdefg")))
    cache.cancel(cache.attach(key("unknown", "new")))

    assert cache.stats() == before
    assert [node.hits for node in cached_nodes(cache)] == [0]
    assert (before.lookups, before.lookup_tokens, before.hit_tokens) == (1, 6, 0)


@pytest.mark.parametrize("grow", ["announce", "publish"])
def test_a_lease_that_grew_is_not_cancelled(grow: str) -> None:
    """Cancelling a lease that announced or published is refused and changes nothing."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "abcd")
    lease = getattr(cache, grow)(lease, key("abcd"), private)
    before = state(cache)

    with pytest.raises(LeaseError, match="release it"):
        cache.cancel(lease)

    assert state(cache) == before
    cache.release(lease)
    assert drained(cache)


def test_the_hit_rate_is_tokens_found_over_tokens_asked_for() -> None:
    """The hit rate is hit tokens over looked-up tokens, and 0 before any lookup."""
    cache = PrefixCache(16, 2)
    assert cache.stats().hit_rate == 0

    serve(cache, "abcdef")
    serve(cache, "abcdxy")

    assert cache.stats().hit_rate == 4 / 12


# -- misuse --------------------------------------------------------------------------------


def released(cache: PrefixCache) -> Lease:
    lease = cache.acquire(key("abc"))
    cache.release(lease)
    return lease


def replaced(cache: PrefixCache) -> Lease:
    lease, private = begin(cache, "xy")
    cache.publish(lease, key("xy"), private)
    return lease


def evicted(cache: PrefixCache) -> Lease:
    lease = released(cache)
    cache.clear()
    return lease


def foreign(cache: PrefixCache) -> Lease:
    other = PrefixCache(16, 2)
    return [other.acquire(key("abc")) for _ in range(3)][1]


@pytest.mark.parametrize("gone", [released, replaced, evicted, foreign])
@pytest.mark.parametrize("verb", ["release", "cancel", "withdraw", "announce", "publish"])
def test_pb12_a_lease_that_is_not_live_is_refused(
    gone: Callable[[PrefixCache], Lease], verb: str
) -> None:
    """Released, replaced, evicted and foreign leases are refused, and nothing changes."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    lease = gone(cache)
    cache.acquire(key("abcd"))
    more: tuple = (lease.key, ()) if verb in ("announce", "publish") else ()
    before = state(cache)

    with pytest.raises(LeaseError, match="is not live here"):
        getattr(cache, verb)(lease, *more)

    assert state(cache) == before


@pytest.mark.parametrize("verb", ["announce", "publish"])
@pytest.mark.parametrize("wrong", [key("abxx"), key("a"), key("abcd", "other"), key("")])
def test_a_key_that_does_not_extend_the_lease_is_refused(verb: str, wrong: object) -> None:
    """A different prompt, a shorter key or another namespace is refused, and nothing changes."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    lease, private = begin(cache, "abcdef")
    before = state(cache)

    with pytest.raises(LeaseError, match="does not begin with"):
        getattr(cache, verb)(lease, wrong, private)

    assert state(cache) == before


@pytest.mark.parametrize("verb", ["announce", "publish", "release", "give_back"])
@pytest.mark.parametrize("wrong", ["free", "shared", "twice", "unknown"])
def test_pages_that_are_not_private_are_refused(verb: str, wrong: str) -> None:
    """Free, shared, unknown and repeated pages are refused, and nothing changes."""
    cache = PrefixCache(16, 2)
    shared = serve(cache, "abcd")[0]
    lease, private = begin(cache, "uvwxyz")
    page = {"free": 15, "shared": shared, "twice": private[0], "unknown": 16}[wrong]
    pages = [*private[:2], page]
    arguments: dict[str, list] = {"release": [lease, pages], "give_back": [pages]}
    before = state(cache)

    with pytest.raises(PageOwnershipError):
        getattr(cache, verb)(*arguments.get(verb, [lease, key("uvwxyz"), pages]))

    assert state(cache) == before


@pytest.mark.parametrize("verb", ["announce", "publish"])
def test_too_few_pages_are_refused(verb: str) -> None:
    """Three whole pages of tokens need three private pages."""
    cache = PrefixCache(16, 2)
    lease, private = begin(cache, "uvwxyz")
    before = state(cache)

    with pytest.raises(PageOwnershipError, match="3 whole pages"):
        getattr(cache, verb)(lease, key("uvwxyz"), private[:2])

    assert state(cache) == before


@pytest.mark.parametrize("policy", ["", "mru"])
def test_an_unknown_policy_is_refused_with_the_known_ones(policy: str) -> None:
    """The error lists the known policies."""
    with pytest.raises(ValueError, match="lru"):
        PrefixCache(4, 2, policy=policy)


def test_numbers_out_of_range_are_refused() -> None:
    """The error names the option, its value and the allowed range."""
    with pytest.raises(ConfigError, match="ghost_pages=-1 but it must be 0 or more"):
        PrefixCache(4, 2, ghost_pages=-1)
    cache = PrefixCache(4, 2, policy="priority")
    serve(cache, "abcd")
    with pytest.raises(ConfigError, match="priority=4294967296 but it must be 2147483647"):
        cache.set_priority(key("abcde"), 2**32)
    with pytest.raises(ConfigError, match=r"priority=1\.5 but it must be a whole number"):
        cache.set_priority(key("abcde"), cast(int, 1.5))
    assert cache.stats().num_leases == 0


def made(**options: Any) -> PrefixCache:
    return PrefixCache(**{"num_pages": 4, **options})


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, lease: cache.reserve(1.5),
        lambda cache, lease: cache.evict(1.0),
        lambda cache, lease: cache.evict(-1),
        lambda cache, lease: cache.evict_if(lambda node: True, "2"),
        lambda cache, lease: cache.fork(lease, 2.5),
        lambda *_: made(num_pages=2.5),
        lambda *_: made(page_size="4"),
        lambda *_: made(ghost_pages=1.5),
        lambda *_: made(log_every=-1),
        lambda *_: made(max_pinned_share="all"),
        lambda *_: made(policy=["lru"]),
    ],
)
def test_what_is_no_count_is_refused_before_anything_happens(call: Callable[..., object]) -> None:
    """Floats, texts and negative counts are refused before any page or lease changes."""
    cache = PrefixCache(4, 2)
    serve(cache, "abcdefgh")
    lease = cache.acquire(key("abcde"))
    before = state(cache)

    with pytest.raises(ConfigError):
        call(cache, lease)

    assert state(cache) == before
    cache.check()


def test_a_lookup_counter_never_overflows() -> None:
    """A node counts more than 2**31 hits."""
    cache = PrefixCache(4, 2)
    serve(cache, "abcd")
    (node,) = cache._tree.nodes()
    cache._tree.hits[node] = 2**31 - 1

    cache.release(cache.acquire(key("abcde")))

    assert cached_nodes(cache)[0].hits == 2**31


def test_a_policy_that_raises_leaves_no_lease_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a policy hook raises in `release`, the lease still ends and the cache stays consistent."""
    cache = PrefixCache(4, 2)
    serve(cache, "abcd")
    lease = cache.acquire(key("abcde"))
    with monkeypatch.context() as patch:
        patch.setattr(type(cache._store.policy), "on_release", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.release(lease)

    cache.check()
    drained(cache)


def test_what_a_lease_and_a_node_say_of_themselves() -> None:
    """`Lease.__repr__` and the node's depth and is_leaf describe a split node."""
    cache = PrefixCache(4, 2)
    serve(cache, "abcd")
    lease = cache.acquire(key("abc"))

    upper, lower = sorted(cached_nodes(cache), key=lambda node: node.depth)

    assert (upper.depth, upper.is_leaf, lower.depth, lower.is_leaf) == (1, False, 2, True)
    assert repr(lease) == f"Lease(id={lease.id}, num_tokens=2, num_pending=0)"


@pytest.mark.parametrize(("text", "reason"), [("abcdef", "evicted"), ("abcdefgh", "hit")])
def test_a_publish_brings_back_an_evicted_tail(text: str, reason: str) -> None:
    """Publishing refills a node whose tail was evicted, as far as the text goes."""
    cache = PrefixCache(16, 2)
    late = begin(cache, text)
    serve(cache, "abcdefgh")
    cache.evict(3)
    assert cache.match(key("abcdefghi")).num_pages == 1

    feed = cache.subscribe()

    lease, private = publish(cache, text, *late)

    assert cache.match(key("abcdefghi")).num_pages == len(text) // 2
    assert cache.explain(key("abcdefghi")).reason == reason
    stored = [event for event in feed.take() if event.kind == "stored"]
    assert sum(len(event.pages) for event in stored) == len(text) // 2 - 1
    cache.release(lease, private)
    drained(cache)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_holds_at_least_a_token(page_size: int) -> None:
    """The constructor refuses a page_size below 1."""
    with pytest.raises(ValueError, match=f"page_size={page_size}"):
        PrefixCache(4, page_size)


def lose_a_pin(cache: PrefixCache) -> None:
    cache._tree.ref_count[next(cache._tree.nodes())] -= 1


def lose_a_page(cache: PrefixCache) -> None:
    node = next(cache._tree.nodes())
    cache._tree.pages[node] = b""


def miscount_evictable(cache: PrefixCache) -> None:
    cache._store.num_evictable += 1


def orphan_a_pending_node(cache: PrefixCache) -> None:
    cache._tree.leader[next(cache._tree.nodes())] = 99


@pytest.mark.parametrize(
    "fault", [lose_a_pin, lose_a_page, miscount_evictable, orphan_a_pending_node]
)
def test_check_finds_the_fault(fault: Callable[[PrefixCache], None]) -> None:
    """`check` detects wrong reference counts, pages, evictable counts and leaders."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    cache.acquire(key("abcde"))
    cache.check()

    fault(cache)

    with pytest.raises(InvariantError):
        cache.check()


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_pages_that_are_not_private_are_refused_behind_pending_ones_too(index: str) -> None:
    """Repeated pages are refused even if the pages before them are pending and none is taken."""
    cache = PrefixCache(8, 2, index=index)
    leader, private = begin(cache, "abcd")
    other, _ = begin(cache, "abcd")
    cache.announce(leader, key("abcd"), private)
    with pytest.raises(PageOwnershipError):
        cache.publish(other, key("abcd"), [private[0], private[0]])
    cache.check()


def test_a_lease_on_which_another_depends_is_not_released() -> None:
    """The error says how many depend on it; it is right of one as well."""
    cache = PrefixCache(8, 2)
    lease = cache.announce(cache.acquire(key("abcdef")), key("abcdef"), cache.reserve(3))
    follower = cache.attach(key("abcdefg"))

    with pytest.raises(LeaseError, match="leases that depend on them: 1; withdraw it first"):
        cache.release(lease)

    assert cache.withdraw(lease) == [follower]
