"""The order in which each eviction policy evicts, by small examples."""

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import POLICIES, CacheKey, Node, PrefixCache
from tests.budget import examples
from tests.pure.cache_traffic import Clock, Traffic
from tests.pure.test_prefix_cache import begin, drained, key, publish, serve

EVERY = pytest.mark.parametrize("policy", sorted(POLICIES))
INDICES = pytest.mark.parametrize("index", ["radix", "hash"])


def look_up(cache: PrefixCache, text: str, times: int = 1) -> None:
    for _ in range(times):
        cache.release(cache.acquire(key(text + "!")))


def left(cache: PrefixCache, texts: Iterable[str]) -> list[str]:
    return [text for text in texts if cache.match(key(text + "!")).num_tokens == len(text)]


def order(cache: PrefixCache, texts: Sequence[str]) -> list[str]:
    """Evict page by page; returns the prompts, one page each, in the order of their eviction."""
    gone: list[str] = []
    while len(gone) < len(texts):
        assert cache.evict(1) == 1
        (new,) = set(texts) - set(left(cache, texts)) - set(gone)
        gone.append(new)
    return gone


# -- all of them ---------------------------------------------------------------------------


@EVERY
@INDICES
def test_the_tail_goes_first_and_page_by_page(policy: str, index: str) -> None:
    """Every policy evicts a prompt page by page from its end."""
    cache = PrefixCache(8, 2, policy=policy, index=index)
    serve(cache, "abcdefgh")
    num_matched = []

    for _ in range(4):
        assert cache.evict(1) == 1
        cache.check()
        num_matched.append(cache.match(key("abcdefgh!")).num_pages)

    assert num_matched == [3, 2, 1, 0]


@EVERY
@INDICES
def test_output_goes_before_the_prompt_it_belongs_to(policy: str, index: str) -> None:
    """A prompt outlives the two answers below it, also when it is the oldest page."""
    cache = PrefixCache(8, 2, policy=policy, index=index)
    lease, private = publish(cache, "pr", *begin(cache, "pr"))
    answers = [cache.fork(lease), cache.fork(lease)]
    cache.release(lease, private)
    for answer, text in zip(answers, ("prONE!", "prTWO!"), strict=True):
        cache.release(*publish(cache, text, answer, list(cache.reserve(2))))

    cache.evict(4)

    assert cache.match(key("pr!")).num_tokens == 2
    assert cache.match(key("prON!")).num_tokens == 2
    assert cache.match(key("prTW!")).num_tokens == 2


@EVERY
@INDICES
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**32))
def test_no_policy_breaks_the_cache(policy: str, index: str, seed: int) -> None:
    """Random traffic keeps the invariants after every step, and all pages return in the end."""
    random, clock = Random(seed), Clock()
    cache = PrefixCache(random.randint(6, 12), 2, policy=policy, index=index, clock=clock)
    traffic = Traffic(cache, random, clock)

    for _ in traffic.run(30):
        cache.check()
        cache.set_priority(traffic.key(), random.randint(-2, 2))

    traffic.end()
    assert drained(cache)


@EVERY
def test_the_same_traffic_is_served_alike(policy: str) -> None:
    """Two runs agree in every count: no clock, hash seed or address decides."""
    states = []
    for _ in range(2):
        random = Random(7)
        cache = PrefixCache(12, 2, policy=policy, clock=Clock())
        for _ in Traffic(cache, random).run(300):
            pass
        states.append((cache.stats(), cache._store.ledger._free.tolist()))

    assert states[0] == states[1]


# -- each of them --------------------------------------------------------------------------


def test_lru_goes_by_release() -> None:
    """LRU evicts the prompt that was released first; a lookup counts when its lease ends."""
    cache = PrefixCache(8, 2, policy="lru")
    for text in ("aa", "bb", "cc"):
        serve(cache, text)
    lease = cache.acquire(key("aa!"))
    look_up(cache, "bb")
    cache.release(lease)

    assert order(cache, ["aa", "bb", "cc"]) == ["cc", "bb", "aa"]


def test_fifo_goes_by_birth() -> None:
    """FIFO evicts the oldest prompt, however often and recently it was looked up."""
    cache = PrefixCache(8, 2, policy="fifo")
    for text in ("aa", "bb", "cc"):
        serve(cache, text)
    look_up(cache, "aa", 9)

    assert order(cache, ["aa", "bb", "cc"]) == ["aa", "bb", "cc"]


def test_pb4_lfu_goes_by_number_of_lookups() -> None:
    """LFU keeps an old prompt with 50 lookups over a newer one with 1."""
    cache = PrefixCache(8, 2, policy="lfu")
    for text in ("aa", "bb", "cc"):
        serve(cache, text)
    look_up(cache, "aa", 50)
    look_up(cache, "cc", 2)
    look_up(cache, "bb", 1)

    assert order(cache, ["aa", "bb", "cc"]) == ["bb", "cc", "aa"]


def test_lfu_forgets_what_was_popular_long_ago() -> None:
    """After three half-lives of other traffic, three new lookups outweigh ten old ones."""
    cache = PrefixCache(8, 2, policy="lfu")
    serve(cache, "aa")
    look_up(cache, "aa", 10)
    hot = cache.pin(key("aa"), "me")
    for number in range(8 * 4 * 3):  # three half-lives
        serve(cache, f"{number:02d}"[:2])
    cache.unpin(hot)
    cache.evict_if(lambda node: node.atoms != key("aa").atoms)
    serve(cache, "bb")
    look_up(cache, "bb", 3)

    assert order(cache, ["aa", "bb"]) == ["aa", "bb"]


def test_pb4_slru_protects_what_was_looked_up_again() -> None:
    """SLRU evicts prompts without a lookup first, and the oldest first in each segment."""
    cache = PrefixCache(8, 2, policy="slru")
    texts = ["aa", "bb", "cc", "dd"]
    for text in texts:
        serve(cache, text)
    look_up(cache, "bb")
    look_up(cache, "aa")

    assert order(cache, texts) == ["cc", "dd", "bb", "aa"]


def test_priority_goes_by_what_was_set() -> None:
    """The lowest priority is evicted first (default 0), the least recent first among equals."""
    cache = PrefixCache(8, 2, policy="priority")
    texts = ["aa", "bb", "cc", "dd"]
    for text in texts:
        serve(cache, text)

    assert cache.set_priority(key("aa!"), 5) == 2
    assert cache.set_priority(key("dd!"), -1) == 2
    assert cache.set_priority(key("zz!"), 9) == 0

    assert order(cache, texts) == ["dd", "bb", "cc", "aa"]


def test_pb10_priorities_survive_splits_and_reach_the_pages_above() -> None:
    """A prefix has at least the priority of a prompt below it; sibling branches do not."""
    cache = PrefixCache(16, 2, policy="priority")
    serve(cache, "abcdef")
    assert cache.set_priority(key("abcdef!"), 100) == 6
    serve(cache, "abXX")
    serve(cache, "zzzz")
    assert cache.set_priority(key("ab!"), 1) == 2

    assert cache.evict(3) == 3
    assert left(cache, ["abcdef", "abXX", "zzzz"]) == ["abcdef"]
    cache.evict(1)
    assert cache.match(key("abcdef!")).num_tokens == 4
    cache.check()


def test_cost_keeps_what_lies_deep() -> None:
    """Of two equally old and equally used leaves, the one with the shorter prefix is evicted."""
    cache = PrefixCache(20_000, 2, policy="cost", ghost_pages=0)
    stem = [1] * 30_000
    for tokens in ([*stem, 2, 2], [3, 3], [*stem, 4, 4]):
        lease = cache.acquire(CacheKey(tokens))
        private = list(cache.reserve(len(tokens) // 2 - len(lease.pages)))
        cache.release(cache.publish(lease, CacheKey(tokens), private))

    assert cache.evict(1) == 1
    assert cache.match(CacheKey([3, 3, 9])).num_tokens == 0


def test_cost_keeps_what_is_used_often() -> None:
    """Of two leaves at equal depth, the less used one is evicted first."""
    cache = PrefixCache(8, 2, policy="cost")
    for text in ("aa", "bb"):
        serve(cache, text)
    look_up(cache, "aa", 2)

    assert order(cache, ["aa", "bb"]) == ["bb", "aa"]


# -- by predicate --------------------------------------------------------------------------


def gone_by(cache: PrefixCache, predicate: object, texts: Sequence[str]) -> set[str]:
    before = set(left(cache, texts))
    cache.evict_if(predicate)  # type: ignore[arg-type]
    cache.check()
    return before - set(left(cache, texts))


@INDICES
def test_pages_go_by_age_hits_namespace_and_step(index: str) -> None:
    """`evict_if` can decide by namespace, age, hits and last access, and evicts nothing else."""
    clock = Clock()
    cache = PrefixCache(32, 2, index=index, clock=clock)
    texts = ["aa", "bb", "cc", "dd"]
    for text in texts:
        serve(cache, text)
        clock.now_s += 10
    serve(cache, "xx", "other")
    look_up(cache, "bb", 2)

    def namespace(node: Node) -> bool:
        return node.namespace == b"other"

    assert gone_by(cache, namespace, texts) == set()
    assert cache.match(key("xx!", "other")).num_tokens == 0
    assert gone_by(cache, lambda node: clock.now_s - node.used_s > 35, texts) == {"aa"}
    assert gone_by(cache, lambda node: node.hits < 1 and node.last_access <= 3, texts) == {"cc"}
    assert gone_by(cache, lambda node: node.hits >= 2, texts) == {"bb"}
    assert left(cache, texts) == ["dd"]
    assert cache.stats().evictions["predicate"] == 4


def test_pb13_what_came_after_the_step_survives() -> None:
    """A predicate on `last_access` never evicts pages younger than its window."""
    cache = PrefixCache(16, 2)
    for text in ("aa", "bb", "cc"):
        serve(cache, text)
    step = cache.stats().lookups

    assert cache.evict_if(lambda node: node.last_access <= step - 100) == 0
    assert cache.evict_if(lambda node: node.last_access <= step - 2) == 1
    assert left(cache, ["aa", "bb", "cc"]) == ["bb", "cc"]


def test_a_predicate_is_asked_of_leaves_and_of_parents_that_become_leaves() -> None:
    """`evict_if` keeps pinned nodes and parents it does not match, and obeys its page limit."""
    cache = PrefixCache(32, 2)
    for text in ("abcd", "abef", "uvwx"):
        serve(cache, text)
    lease = cache.acquire(key("uv!"))

    assert cache.evict_if(lambda node: node.start > 0, 2) == 2
    assert cache.evict_if(lambda node: node.start > 0) == 1
    assert cache.evict_if(lambda node: node.namespace == b"none") == 0
    assert cache.evict_if(lambda node: True) == 1

    assert cache.match(key("uv!")).num_tokens == 2
    cache.release(lease)


def test_a_predicate_that_raises_leaves_a_whole_cache() -> None:
    """When a predicate raises, pages evicted before it are reported and the cache is consistent."""
    cache = PrefixCache(8, 2, ghost_pages=0)
    for text in ("abcd", "abxy"):
        serve(cache, text)
    evicted: list[object] = []
    cache.observe_evictions(evicted.append)

    def fail_at_a_parent(node: Node) -> bool:
        if node.start == 0:
            raise RuntimeError
        return True

    with pytest.raises(RuntimeError):
        cache.evict_if(fail_at_a_parent)

    cache.check()
    assert len(evicted) == cache.stats().evicted_pages == 2


def test_no_priority_costs_a_look_at_all_others() -> None:
    """1,000 different priorities still use one queue segment, like 10."""
    num_matched = []
    for num_priorities in (10, 1000):
        cache = PrefixCache(1000, 1, policy="priority", log_every=0)
        for at in range(1000):
            lease = cache.acquire(CacheKey([at]))
            cache.release(cache.publish(lease, CacheKey([at]), cache.reserve(1)))
            cache.set_priority(CacheKey([at, 0]), at % num_priorities)
        assert len(cache._store.queue._segments) == 1
        cache.evict(1)
        num_matched.append(cache.match(CacheKey([0, 0])).num_pages)

    assert num_matched == [0, 0]
