"""Pins keep a prefix cached until they expire or are removed, within a shared budget."""

import contextlib
from typing import Any

import pytest

from ramify.cache import PrefixCache
from ramify.errors import ConfigError, OutOfPagesError, PinError
from tests.pure.cache_traffic import Clock
from tests.pure.test_prefix_cache import begin, cached_nodes, drained, key, serve, state

INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


# -- what is kept --------------------------------------------------------------------------


@INDICES
def test_a_pinned_prefix_survives_all_pressure(index: str) -> None:
    """`reserve`, `evict`, `evict_if` and `clear` take every page except pinned pages."""
    cache = PrefixCache(8, 2, index=index)
    pages = list(serve(cache, "abcdef"))
    serve(cache, "abxyz")

    pin = cache.pin(key("abcd"), "me")

    assert (pin.owner, pin.key, pin.num_pages, pin.ttl_s) == ("me", key("abcd"), 2, None)
    assert cache.evict(100) == cache.evict_if(lambda node: True) + 2
    assert cache.clear() == 0
    cache.give_back(cache.reserve(6))
    with pytest.raises(OutOfPagesError):
        cache.reserve(7)
    assert cache.match(key("abcdef")).num_tokens == 4
    assert not any(cache.is_free(page) for page in pages[:2])
    cache.check()

    cache.unpin(pin)
    assert drained(cache)


@INDICES
def test_splits_above_and_inside_a_pin_change_nothing_about_it(index: str) -> None:
    """Node splits along a pinned prefix keep the pin's end and its page count."""
    cache = PrefixCache(32, 2, index=index)
    serve(cache, "abcdefgh")
    pin = cache.pin(key("abcdefgh"), "me")

    for text in ("abcdefXX!", "abXX!", "abcdXX!"):
        serve(cache, text)
        assert cache.pins() == [pin]
        assert cache.stats().pinned_pages == 4
    cache.clear()

    assert cache.stats().cached_pages == 4
    cache.unpin(pin)
    assert drained(cache)


def test_a_prefix_that_is_cached_in_part_is_pinned_in_part() -> None:
    """`pin` covers the whole pages cached now; pages published later are not pinned."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")

    pin = cache.pin(key("abcdefg"), "me")
    serve(cache, "abcdefg")

    assert (pin.key, pin.num_pages) == (key("abcd"), 2)
    assert cache.clear() == 1


def test_all_whole_pages_of_the_key_are_pinned() -> None:
    """`pin` includes the last whole page, which a lookup of the same key would not hit."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")

    assert cache.pin(key("abcdef"), "me").num_pages == 3
    assert cache.pin(key("abcde"), "me").num_pages == 2


def test_a_pin_counts_in_no_statistics_and_teaches_no_policy() -> None:
    """Pinning counts no lookup, hit or lease and does not change recency."""
    cache = PrefixCache(16, 2, policy="lru")
    serve(cache, "abcd")
    serve(cache, "uvwx")
    before, nodes = cache.stats(), cached_nodes(cache)

    cache.unpin(cache.pin(key("abcd"), "me"))
    assert (cache.stats(), cached_nodes(cache)) == (before, nodes)
    pin = cache.pin(key("abcd"), "me")
    stats = cache.stats()
    cache.unpin(pin)
    cache.evict(2)

    assert (stats.lookups, stats.num_leases, stats.hit_tokens) == (2, 0, 0)
    assert (stats.pinned_pages, stats.evictable_pages) == (2, 2)
    assert cache.match(key("abcde")).num_tokens == 0
    assert cache.match(key("uvwxy")).num_tokens == 4


def test_pending_pages_are_not_pinned() -> None:
    """Only computed pages are pinned, because the leader of pending pages may still fail."""
    cache = PrefixCache(16, 2)
    serve(cache, "ab")
    lease, private = begin(cache, "abcdef")
    leader = cache.announce(lease, key("abcdef"), private)

    pin = cache.pin(key("abcdef"), "me")
    cache.withdraw(leader)
    cache.release(leader)

    assert pin.key == key("ab")
    cache.check()


# -- the budget ----------------------------------------------------------------------------


def test_the_budget_is_a_share_of_the_pool_and_counts_each_page_once() -> None:
    """Pins that overlap are charged for each page once."""
    cache = PrefixCache(8, 2, max_pinned_share=0.5)
    serve(cache, "abcdef")
    serve(cache, "abxy")

    for owner in range(10):
        cache.pin(key("abcdef"[: 2 + 2 * (owner % 3)]), str(owner))
    assert cache.stats().pinned_pages == 3
    cache.pin(key("abxy"), "last")

    assert cache.stats().pinned_pages == 4
    assert len(cache.pins()) == 11


def test_a_pin_over_budget_is_refused_with_the_numbers() -> None:
    """The error has the pages and the limit, nothing changes, and an unpin makes room."""
    cache = PrefixCache(8, 2, max_pinned_share=0.5)
    serve(cache, "abcdef")
    serve(cache, "uvwx")
    first = cache.pin(key("abcdef"), "me")
    before = state(cache)

    with pytest.raises(PinError, match="with these 2 pages 5 would be pinned, but at most 4 may"):
        cache.pin(key("uvwx"), "you")

    assert state(cache) == before
    assert cache.pins() == [first]
    cache.unpin(first)
    assert cache.pin(key("uvwx"), "you").num_pages == 2


@pytest.mark.parametrize(
    ("share", "fits"), [(0.0, 0), (0.24, 1), (0.125, 1), (0.25, 2), (0.5, 4), (1.0, 8)]
)
def test_the_share_is_rounded_down_to_whole_pages(share: float, fits: int) -> None:
    """The budget is the share of the pool rounded down to whole pages; 0 allows no pin."""
    cache = PrefixCache(8, 1, max_pinned_share=share)
    serve(cache, "abcdefgh")
    done = 0

    for num_pages in range(1, 9):
        with contextlib.suppress(PinError):
            done = cache.pin(key("abcdefgh"[:num_pages]), "me").num_pages

    assert done == fits


def test_an_owner_has_a_budget_of_its_own() -> None:
    """Pages that another owner pins too are not charged; the error names owner and limit."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdef")
    serve(cache, "abuvwx")
    cache.pin(key("ab"), "all")

    cache.pin(key("abcd"), "me", max_owner_pages=1)
    with pytest.raises(
        PinError, match="with these 3 pages 2 would be pinned for 'me', but at most"
    ):
        cache.pin(key("abcdef"), "me", max_owner_pages=1)
    assert "2 of at most 1 pages of 'me'" in cache._pin_table.last_refusal(key("abcdef"))
    cache.pin(key("abuvwx"), "you", max_owner_pages=2)

    assert [pin.owner for pin in cache.pins()] == ["all", "me", "you"]


def test_pins_leave_the_room_that_is_asked_for() -> None:
    """Whatever the budget of all pins would allow."""
    cache = PrefixCache(8, 2, max_pinned_share=1.0)
    serve(cache, "abcdef")

    with pytest.raises(PinError, match="3 would be pinned, but at most 2 may"):
        cache.pin(key("abcdef"), "me", room_pages=6)
    with pytest.raises(PinError, match="at most 0 may"):
        cache.pin(key("ab"), "me", room_pages=9)

    assert cache.pin(key("abcdef"), "me", room_pages=5).num_pages == 3


def test_a_refused_pin_cuts_no_node() -> None:
    """Refusing a pin that ends inside a node changes nothing, also beside another pin."""
    cache = PrefixCache(8, 2, max_pinned_share=0.25)
    serve(cache, "abcdefgh")
    before = state(cache)

    with pytest.raises(PinError, match="3 would be pinned"):
        cache.pin(key("abcdefXX"), "me")

    assert state(cache) == before
    cache.pin(key("abcdXX"), "me")
    before = state(cache)
    with pytest.raises(PinError, match="with these 3 pages 3 would be pinned"):
        cache.pin(key("abcdefXX"), "me")
    assert state(cache) == before


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    """The constructor refuses a max_pinned_share outside 0 to 1."""
    with pytest.raises(ConfigError, match="max_pinned_share"):
        PrefixCache(8, 2, max_pinned_share=share)


@INDICES
def test_pins_never_block_the_rest_of_the_pool(index: str) -> None:
    """Every page that is not pinned can be reserved when nothing else is held."""
    for num_pinned in range(1, 5):
        cache = PrefixCache(8, 1, index=index, max_pinned_share=0.5)
        serve(cache, "abcdefg")
        serve(cache, "x")
        cache.pin(key("abcdefg"[:num_pinned]), "me")

        assert cache.can_reserve(8 - num_pinned)
        assert len(cache.reserve(8 - num_pinned)) == 8 - num_pinned


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["xyz", "a", "", "aXcd"])
@pytest.mark.parametrize("namespace", ["", "unknown"])
def test_what_is_not_cached_cannot_be_pinned(text: str, namespace: str) -> None:
    """Pinning a prefix without a cached page is refused and creates no namespace."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")
    before = state(cache)

    with pytest.raises(PinError, match="no whole page of the prefix is cached"):
        cache.pin(key(text, namespace), "me")

    assert state(cache) == before
    assert b"unknown" not in cache._tree.roots


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan")])
def test_a_time_to_live_must_be_positive(ttl: float) -> None:
    """A ttl of zero, below zero or NaN is refused and pins nothing."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")
    before = state(cache)

    with pytest.raises(ConfigError, match=f"ttl={ttl}"):
        cache.pin(key("abcd"), "me", ttl)

    assert (state(cache), cache.pins()) == (before, [])


def test_a_pin_ends_once() -> None:
    """`unpin` takes a pin or its id, and refuses ended pins and unknown ids."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")
    first, other = cache.pin(key("abcd"), "me"), cache.pin(key("abcd"), "me")
    assert first.id != other.id

    cache.unpin(first)
    cache.unpin(other.id)

    for pin in (first, other.id, 99):
        with pytest.raises(PinError, match="no such pin"):
            cache.unpin(pin)
    assert drained(cache)


def test_refusals_are_remembered_within_bounds() -> None:
    """`explain` reports a refused pin until hundreds of later refusals replace it."""
    cache = PrefixCache(16, 2, max_pinned_share=0.125)
    serve(cache, "abcdef")
    with pytest.raises(PinError):
        cache.pin(key("abcdef"), "me")
    cache.clear()
    refusals = [cache.explain(key("abcdef")).pin_refused]

    for number in range(300):
        serve(cache, "abcdef", str(number))
        with pytest.raises(PinError):
            cache.pin(key("abcdef", str(number)), "me")
        cache.clear()
    refusals.append(cache.explain(key("abcdef")).pin_refused)

    assert "would be pinned" in refusals[0]
    assert refusals[1] == ""


def test_a_pin_of_another_cache_ends_none_here() -> None:
    """A pin of another cache is refused even if a pin here has the same id."""
    here, there = PrefixCache(8, 2), PrefixCache(8, 2)
    for cache, text in ((here, "abcd"), (there, "wxyz")):
        serve(cache, text)
    mine, other = here.pin(key("abcd"), "me"), there.pin(key("wxyz"), "me")
    assert mine.id == other.id

    with pytest.raises(PinError, match="no such pin"):
        here.unpin(other)

    assert here.pins() == [mine]


@pytest.mark.parametrize("ttl", ["60", [1]])
def test_a_time_that_is_no_number_leaves_no_pin(ttl: Any) -> None:
    """A ttl that is not a number is refused before any page is pinned."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")

    with pytest.raises(ConfigError, match="lives for more than 0"):
        cache.pin(key("abcd"), "me", ttl)

    assert cache.clear() == 2


# -- time ----------------------------------------------------------------------------------


def test_a_pin_expires_at_its_time() -> None:
    """At its expiry, not before, a pin's pages become evictable; `unpin` then says it expired."""
    clock = Clock()
    cache = PrefixCache(4, 2, clock=clock)
    serve(cache, "abcd")
    pin = cache.pin(key("abcd"), "me", ttl=10)
    assert (pin.ttl_s, pin.expires_s) == (10, clock.now_s + 10)

    clock.now_s += 9.9
    assert cache.pins() == [pin]
    assert not cache.can_reserve(3)
    clock.now_s += 0.1

    assert cache.can_reserve(4)
    assert cache.pins() == []
    with pytest.raises(PinError, match="expired"):
        cache.unpin(pin)
    assert drained(cache)


@pytest.mark.parametrize("call", ["reserve", "evict", "clear", "can_reserve", "evict_if", "pins"])
def test_an_expired_pin_holds_nothing_back(call: str) -> None:
    """Every call that needs pages first drops expired pins."""
    clock = Clock()
    cache = PrefixCache(4, 2, clock=clock, max_pinned_share=1.0)
    serve(cache, "abcdefgh")
    cache.pin(key("abcdefgh"), "me", ttl=1)
    clock.now_s += 1
    arguments: dict[str, Any] = {"clear": [], "pins": [], "evict_if": [lambda node: True]}

    getattr(cache, call)(*arguments.get(call, [4]))

    assert cache.stats().pinned_pages == 0
    assert cache.num_available + cache.stats().private_pages == 4
    cache.check()


def test_a_hit_brings_no_expired_pin_back() -> None:
    """A hit does not revive an expired pin, even if no call has dropped it yet."""
    clock = Clock()
    cache = PrefixCache(8, 2, clock=clock)
    serve(cache, "abcd")
    cache.pin(key("abcd"), "me", ttl=1)
    clock.now_s += 1

    cache.release(cache.acquire(key("abcde")))

    assert cache.pins() == []
    assert drained(cache)


def test_a_hit_on_the_whole_prefix_begins_its_time_anew() -> None:
    """Only a lookup that hits the whole prefix restarts a pin's ttl."""
    clock = Clock()
    cache = PrefixCache(16, 2, clock=clock)
    serve(cache, "abcdef")
    pin = cache.pin(key("abcdef"), "me", ttl=10)

    def expires_s() -> float:
        (now,) = cache.pins("me")
        assert (now.id, now.key) == (pin.id, pin.key)
        return now.expires_s

    clock.now_s += 1
    cache.match(key("abcdefg"))
    cache.explain(key("abcdefg"))
    cache.unpin(cache.pin(key("abcdef"), "you"))
    for text in ("abcdX", "abcdef", "XX"):  # the second leaves the last page to be computed
        cache.release(cache.acquire(key(text)))
    assert expires_s() == pin.expires_s
    cache.release(cache.acquire(key("abcdefg")))
    assert expires_s() == clock.now_s + 10
    clock.now_s += 3
    cache.release(cache.attach(key("abcdefghi")))

    assert expires_s() == clock.now_s + 10


def test_pins_with_and_without_an_end_live_side_by_side() -> None:
    """Each pin on a prefix expires at its own time; a pin without a ttl stays."""
    clock = Clock()
    cache = PrefixCache(16, 2, clock=clock)
    serve(cache, "abcd")
    pins = [cache.pin(key("abcd"), "me", ttl) for ttl in (5, None, 2, 8)]
    left = []

    for _ in range(5):
        left.append([pin.ttl_s for pin in cache.pins()])
        clock.now_s += 2

    assert left == [[5, None, 2, 8], [5, None, 8], [5, None, 8], [None, 8], [None]]
    assert cache.pins() == [pins[1]]


def test_pins_are_listed_by_owner() -> None:
    """`pins` lists an owner's pins, or all pins without an owner, oldest first."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    pins = [cache.pin(key("abcd"), owner) for owner in ("me", "you", "me")]

    assert cache.pins() == pins
    assert cache.pins("me") == [pins[0], pins[2]]
    assert cache.pins("nobody") == []


# -- too few pages -------------------------------------------------------------------------


def test_an_error_for_too_few_pages_names_the_pins_that_hold_them() -> None:
    """The largest first, with owner and pages; `pins` has all of them."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")
    serve(cache, "uvwx")
    small, large = cache.pin(key("uv"), ""), cache.pin(key("abcdef"), "ann")

    with pytest.raises(OutOfPagesError) as caught:
        cache.reserve(5)

    assert set(caught.value.pins) == {(small.id, "", 1), (large.id, "ann", 3)}
    assert (
        f"; pins hold pages: {large.id} of 'ann' (3 pages), {small.id} (1 page); unpin some"
        in str(caught.value)
    )
    cache.check()


def test_an_error_for_too_few_pages_is_bounded() -> None:
    """However many pins there are, and however long their owners are."""
    cache = PrefixCache(64, 2)
    for first in "abcdefghij":
        serve(cache, f"{first}xyz")
        cache.pin(key(f"{first}x"), first * 1000)

    with pytest.raises(OutOfPagesError, match="page\\), and 6 more; unpin") as caught:
        cache.reserve(64)

    assert len(caught.value.pins) == 10
    assert len(str(caught.value)) < 500


def test_without_pins_the_error_speaks_of_leases() -> None:
    """An expired pin is none."""
    clock = Clock()
    cache = PrefixCache(4, 2, clock=clock)
    serve(cache, "abcd")
    cache.pin(key("ab"), "ann", 1.0)
    clock.now_s += 2.0

    with pytest.raises(OutOfPagesError) as caught:
        cache.reserve(5)

    assert caught.value.pins == ()
    assert "pin" not in str(caught.value)
    assert "release a lease" in str(caught.value)
