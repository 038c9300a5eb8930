"""Why a lookup finds no more: every reason by example, and none of them ever wrong."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, Explanation, PrefixCache
from ramify.cache.explain import MAX_NAMESPACES, MAX_SIBLINGS
from ramify.errors import PinError
from tests.budget import examples
from tests.pure.cache_traffic import Clock, Traffic
from tests.pure.test_prefix_cache import begin, key, serve

INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


def text_of(atoms: bytes) -> str:
    return bytes(array("i", atoms).tolist()).decode()


def everything(cache: PrefixCache) -> tuple:
    """Return all state that `explain` could change: statistics, nodes, ghosts, eviction order."""
    tree, store = cache._tree, cache._store
    ghosts = store.ghosts.oldest_first()
    return (
        cache.stats(),
        [tree.node(node) for node in tree.nodes()],
        [(node, store.ghosts.reason[node], store.ghosts.evicted_s[node]) for node in ghosts],
        list(store.queue.nodes()),
        dict(tree.roots),
        store.num_lookups,
    )


# -- reasons -------------------------------------------------------------------------------


@INDICES
def test_a_part_of_a_page_cannot_be_found(index: str) -> None:
    """A miss of less than one page has the reason "page_tail": only whole pages are shared."""
    cache = PrefixCache(16, 4, index=index)
    serve(cache, "abcdefgh")

    explanations = {text: cache.explain(key(text)) for text in ("abcdef", "abcdefg", "abcdefghij")}

    assert {explanation.reason for explanation in explanations.values()} == {"page_tail"}
    assert str(explanations["abcdef"]) == "4 of 6 tokens found; the rest is less than a page"
    assert [cache.explain(key(text)).reason for text in ("abcde", "abcdefgh")] == ["hit", "hit"]


@INDICES
@pytest.mark.parametrize("text", ["abcdef", "abcdefg"])
def test_all_that_can_be_found_is_a_hit(text: str, index: str) -> None:
    """A fully cached prompt is a hit, although its last token always has to be computed."""
    cache = PrefixCache(16, 2, index=index)
    serve(cache, "abcdef")

    explanation = cache.explain(key(text))

    hit_tokens = (len(text) - 1) // 2 * 2
    assert explanation == Explanation(len(text), hit_tokens, "hit")
    assert (
        str(explanation)
        == f"{hit_tokens} of {len(text)} tokens found; that is all there is to find"
    )


@pytest.mark.parametrize("text", ["", "a"])
def test_a_prompt_without_a_page_to_find_lacks_nothing(text: str) -> None:
    """A prompt too short to match a page is a hit of 0 tokens, whatever is cached."""
    cache = PrefixCache(16, 2)

    assert cache.explain(key(text)) == Explanation(len(text), 0, "hit")
    serve(cache, "abcd")
    assert cache.explain(key(text)) == Explanation(len(text), 0, "hit")


@INDICES
def test_the_next_page_may_be_in_work(index: str) -> None:
    """A page that another request has announced is "pending", and a hit once it is published."""
    cache = PrefixCache(16, 2, index=index)
    serve(cache, "ab")
    lease, private = begin(cache, "abcdef")
    lease = cache.announce(lease, key("abcdef"), private)

    explanation = cache.explain(key("abcdefg"))

    assert (explanation.hit_tokens, explanation.reason) == (2, "pending")
    assert str(explanation) == "2 of 7 tokens found; the next page is being computed"
    cache.publish(lease, key("abcdef"))
    assert cache.explain(key("abcdefg")).reason == "hit"


@pytest.mark.parametrize("text", ["abcdefgh", "abcdefX", "abcdXY", "abXY"])
def test_with_pending_pages_it_explains_what_attach_hits(text: str) -> None:
    """Announced pages count as found, as far as `attach` goes; the rest is explained as usual."""
    cache = PrefixCache(16, 2)
    serve(cache, "ab")
    lease, private = begin(cache, "abcdef")
    leader = cache.announce(lease, key("abcdef"), private)

    explanation = cache.explain(key(text), pending=True)

    attached = cache.attach(key(text))
    assert explanation.hit_tokens == attached.num_tokens
    assert explanation.reason == ("hit" if len(text) - attached.num_tokens <= 2 else "never_seen")
    assert cache.explain(key(text)).hit_tokens == 2
    cache.cancel(attached)
    cache.withdraw(leader)
    cache.release(leader)
    cache.check()


@INDICES
@pytest.mark.parametrize("by", ["capacity", "asked", "cleared", "predicate"])
def test_an_eviction_is_told_with_time_cause_and_idleness(by: str, index: str) -> None:
    """An evicted page is reported with its tokens, cause, time since eviction and idle time."""
    clock = Clock()
    cache = PrefixCache(4, 2, index=index, clock=clock)
    serve(cache, "abcdef")
    clock.now_s += 10
    lease = cache.acquire(key("abx"))
    clock.now_s += 5

    if by == "capacity":
        cache.give_back(cache.reserve(3))
    elif by == "asked":
        assert cache.evict(9) == 2
    elif by == "cleared":
        assert cache.clear() == 2
    else:
        assert cache.evict_if(lambda node: True) == 2
    clock.now_s += 2.5

    explanation = cache.explain(key("abcdefg"))
    assert explanation == Explanation(
        7, 2, "evicted", evicted_tokens=4, evicted_by=by, evicted_ago_s=2.5, idle_s=15.0
    )
    assert str(explanation) == (
        f"2 of 7 tokens found; the next 4 were evicted 2.5 s ago ({by}), idle for 15.0 s"
    )
    cache.release(lease)


def test_a_tail_that_was_evicted_is_told_of_the_same_node() -> None:
    """Only prompts that reach into the evicted pages of a node report an eviction."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdefgh")
    cache.evict(2)

    explanations = [
        cache.explain(key(text)) for text in ("abcdefghi", "abcdef!", "abcdeX!", "abcd!")
    ]

    assert [explanation.hit_tokens for explanation in explanations] == [4, 4, 4, 4]
    assert [explanation.reason for explanation in explanations] == [
        "evicted",
        "evicted",
        "never_seen",
        "hit",
    ]
    assert [explanation.evicted_tokens for explanation in explanations] == [4, 2, 0, 0]


def test_a_withdrawn_page_is_told_as_such() -> None:
    """A page that was announced and then withdrawn is reported as evicted by "withdrawn"."""
    clock = Clock()
    cache = PrefixCache(8, 2, clock=clock)
    lease, private = begin(cache, "abcd")
    lease = cache.announce(lease, key("abcd"), private)
    clock.now_s += 2
    cache.withdraw(lease)
    cache.release(lease)

    explanation = cache.explain(key("abcdef"))

    assert explanation.idle_s == 2
    assert (explanation.reason, explanation.evicted_by, explanation.evicted_tokens) == (
        "evicted",
        "withdrawn",
        4,
    )


def test_what_is_not_remembered_was_never_seen() -> None:
    """With `ghost_pages=0`, an evicted page is reported as never seen."""
    cache = PrefixCache(8, 2, ghost_pages=0)
    serve(cache, "abcd")
    cache.clear()

    explanation = cache.explain(key("abcde"))

    assert explanation == Explanation(5, 0, "never_seen")
    assert str(explanation) == "0 of 5 tokens found; nothing cached or remembered begins like this"


@INDICES
@pytest.mark.parametrize(
    ("text", "hit", "diverged_at", "sibling"),
    [
        ("abcdXfgh!", 4, 4, "ef"),  # inside an edge of "abcdefgh", at the first token of a page
        ("abcdeXgh!", 4, 5, "ef"),  # and at the second
        ("abXdefgh!", 2, 2, "cd"),
        ("aXcdefgh!", 0, 1, "ab"),
        ("uvwXyzz", 2, 3, "wx"),  # where a node ends: of two siblings, the one that is nearer
        ("uvyX!!", 2, 3, "yz"),
    ],
)
def test_the_first_token_that_differs_is_told_exactly(
    text: str, hit: int, diverged_at: int, sibling: str, index: str
) -> None:
    """A diverged lookup names the first differing token and the sibling's tokens after the hit."""
    cache = PrefixCache(16, 2, index=index)
    for prompt in ("abcdefgh", "uvwx", "uvyz"):
        serve(cache, prompt)

    explanation = cache.explain(key(text))

    assert (explanation.hit_tokens, explanation.reason, explanation.diverged_at) == (
        hit,
        "diverged",
        diverged_at,
    )
    assert text_of(explanation.sibling).startswith(sibling)
    assert str(explanation) == (
        f"{hit} of {len(text)} tokens found; a cached prompt is the same up to token {diverged_at}"
    )


@INDICES
@pytest.mark.parametrize("own", ["abcdXXYY", "abcd"])
def test_another_namespace_is_named_wherever_nodes_end(own: str, index: str) -> None:
    """A longer match in another namespace is reported, whether it ends inside a node or not."""
    cache = PrefixCache(32, 2, index=index)
    serve(cache, own, "A")
    serve(cache, "abcdefgh", "B")

    explanation = cache.explain(key("abcdefghi", "A"))

    assert (explanation.hit_tokens, explanation.reason, explanation.other_tokens) == (
        4,
        "namespace",
        8,
    )


def test_a_new_suffix_goes_on_like_nothing_cached() -> None:
    """A cached prefix with an unknown suffix reports that nothing cached continues like it."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcd")

    explanation = cache.explain(key("abcdefg"))

    assert str(explanation) == "4 of 7 tokens found; nothing cached or remembered goes on like this"


def test_who_shares_not_one_token_is_no_sibling() -> None:
    """A prompt that shares no token with the cache is "never_seen", not "diverged"."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")

    assert cache.explain(key("xyz")).reason == "never_seen"


@INDICES
def test_another_namespace_may_have_it(index: str) -> None:
    """Another namespace is named if it matches more tokens than any sibling in this one."""
    cache = PrefixCache(32, 2, index=index)
    serve(cache, "abcdef", "one")
    serve(cache, "abcd", "two")
    serve(cache, "axyz", "here")

    explanation = cache.explain(key("abcdefg", "here"))

    assert explanation == Explanation(7, 0, "namespace", other_namespace=b"one", other_tokens=6), (
        "or a sibling"
    )
    assert str(explanation) == "0 of 7 tokens found; another namespace has 6"
    assert cache.explain(key("abcdefg", "nobody's")).other_namespace == b"one"
    assert cache.explain(key("abXXX", "two")).reason == "diverged"


def test_a_refused_pin_is_told_with_the_eviction_that_followed() -> None:
    """An eviction after a refused pin is reported with the reason of the refusal."""
    cache = PrefixCache(8, 2, max_pinned_share=0.25)
    serve(cache, "abcdef")
    with pytest.raises(PinError):
        cache.pin(key("abcdef"), "me")
    with pytest.raises(PinError):
        cache.pin(key(""), "nobody's, which is no reason to evict anything")
    assert cache.explain(key("abcdef")).pin_refused == ""

    cache.evict(3)

    explanation = cache.explain(key("abcdef"))
    assert (explanation.reason, explanation.pin_refused) == (
        "evicted",
        "3 of at most 2 pages would be pinned",
    )
    assert "after a pin was refused (3 of at most 2 pages would be pinned)" in str(explanation)


# -- cost ----------------------------------------------------------------------------------


def test_at_most_64_siblings_are_looked_at() -> None:
    """Only the 64 newest siblings are compared, even if an older sibling shares more tokens."""
    cache = PrefixCache(4 * MAX_SIBLINGS, 4)
    start = "abcd"
    serve(cache, start + "near")
    for other in range(MAX_SIBLINGS - 1):
        serve(cache, start + chr(33 + other) + "...")
    near = cache.explain(key(start + "neaX!"))
    serve(cache, start + "last")

    assert (near.hit_tokens, near.diverged_at) == (4, 7)
    assert cache.explain(key(start + "neaX!")).diverged_at == 4


def test_at_most_64_namespaces_are_looked_at() -> None:
    """Only the 64 oldest namespaces are searched for a longer match."""
    cache = PrefixCache(4 * MAX_NAMESPACES, 2)
    for other in range(MAX_NAMESPACES):
        serve(cache, "uv", str(other))
    serve(cache, "abcd", "last")

    assert cache.explain(key("abcde", "new")).reason == "never_seen"
    cache.evict_if(lambda node: node.namespace == b"7")
    assert cache.explain(key("uvw", "new")).other_namespace == b"0"


# -- always --------------------------------------------------------------------------------


def pages(prompt_key: CacheKey, page_size: int) -> list[tuple[bytes, bytes]]:
    """Return every whole-page prefix of a key, as (namespace, atoms)."""
    ends = range(page_size, len(prompt_key) + 1, page_size)
    return [(prompt_key.namespace, prompt_key.prefix(end).atoms) for end in ends]


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 2**32),
    index=st.sampled_from(["radix", "hash"]),
    page_size=st.sampled_from([1, 2, 3]),
    ghost_pages=st.sampled_from([1000, 0, 3]),
)
def test_an_explanation_is_true(seed: int, index: str, page_size: int, ghost_pages: int) -> None:
    """After random traffic, `explain` agrees with `match` and with what the cache has stored."""
    random, clock = Random(seed), Clock()
    cache = PrefixCache(
        random.randint(6, 16), page_size, index=index, ghost_pages=ghost_pages, clock=clock
    )
    subscription, traffic = cache.subscribe(), Traffic(cache, random, clock)
    for _ in traffic.run(30):
        pass
    stored = {name for event in subscription.take() for name in event.page_hashes}
    known = {page for cache_key in traffic.lookups for page in pages(cache_key, page_size)}

    for cache_key in [*traffic.lookups[-8:], *(traffic.key() for _ in range(8))]:
        explanation = cache.explain(cache_key)
        assert str(explanation)
        hit, next_page = (
            explanation.hit_tokens,
            cache_key.prefix(explanation.hit_tokens + page_size),
        )
        assert hit == cache.match(cache_key).num_tokens
        assert explanation.num_tokens == len(cache_key)
        if len(cache_key) - hit <= page_size:
            assert explanation.reason in ("hit", "page_tail")
            continue
        assert explanation.reason not in ("hit", "page_tail")
        if explanation.reason == "evicted":
            gone = cache_key.prefix(hit + explanation.evicted_tokens)
            assert len(gone) >= hit + page_size
            assert set(pages(gone, page_size)) <= known
            assert (
                explanation.evicted_by == "withdrawn"
                or next_page.page_hashes(page_size)[-1] in stored
            )
            assert explanation.evicted_ago_s is not None
            assert 0 <= explanation.evicted_ago_s <= clock.now_s - 1000
        elif explanation.reason == "pending":
            lease = cache.attach(cache_key)
            assert lease.num_tokens > hit
            cache.cancel(lease)
        elif explanation.reason == "diverged":
            at = explanation.diverged_at
            assert at is not None
            same, own = array("i", explanation.sibling), cache_key.tokens()
            assert hit <= at < hit + page_size
            assert same[: at - hit] == own[hit:at]
            assert same[at - hit] != own[at]
        elif explanation.reason == "namespace":
            assert explanation.other_namespace is not None
            other = CacheKey(cache_key.atoms, explanation.other_namespace)
            assert cache.match(other).num_tokens == explanation.other_tokens > hit
        else:
            assert explanation.reason == "never_seen"
            assert ghost_pages < 1000 or next_page.page_hashes(page_size)[-1] not in stored


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 2**32), index=st.sampled_from(["radix", "hash"]))
def test_an_explanation_changes_nothing(seed: int, index: str) -> None:
    """`explain` changes no node, no eviction order, no statistic and no ghost."""
    random = Random(seed)
    cache = PrefixCache(10, 2, index=index)
    traffic = Traffic(cache, random)
    for _ in traffic.run(25):
        pass
    before = everything(cache)

    for _ in range(10):
        cache.explain(traffic.key())

    assert everything(cache) == before
    cache.check()
