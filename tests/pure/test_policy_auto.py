"""The policy "auto": it adapts, and its counts are right; the benchmark measures how well."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, PrefixCache
from ramify.cache.adaptive_policy import NUM_CLASSES, HitDensityPolicy
from ramify.errors import OutOfPagesError
from tests.budget import examples
from tests.pure.cache_traffic import Traffic

Trace = list[CacheKey]


def replay(cache: PrefixCache, trace: Trace) -> PrefixCache:
    """Serve the prompts in order, each computed in full; skips those that do not fit."""
    for prompt in trace:
        lease = cache.acquire(prompt)
        try:
            private = list(cache.reserve(len(prompt) - len(lease.pages)))
        except OutOfPagesError:
            cache.cancel(lease)
            continue
        cache.release(cache.publish(lease, prompt, private))
    return cache


def hit_rate(policy: str, num_pages: int, trace: Trace) -> float:
    cache = PrefixCache(num_pages, 1, policy=policy, log_every=0)
    return replay(cache, trace).stats().hit_rate


def loop(num_prompts: int, length: int, rounds: int, first: int = 0) -> Trace:
    keys = [CacheKey([first + at] * length) for at in range(num_prompts)]
    return keys * rounds


def zipf(random: Random, count: int, length: int, first: int = 0) -> Trace:
    ranks = random.choices(range(200), [1 / (1 + rank) for rank in range(200)], k=count)
    return [CacheKey([first + rank] * length) for rank in ranks]


def chats(random: Random, count: int) -> Trace:
    """Return the prompts of conversations that grow by a turn each time."""
    live = [[at] for at in range(20)]
    trace = []
    for turn in range(count):
        chat = random.choice(live)
        chat.extend([1000 + turn] * random.randint(1, 4))
        trace.append(CacheKey(list(chat)))
        if len(chat) > 24:
            chat[:] = [2000 + turn]
    return trace


def test_auto_learns_a_loop_larger_than_the_pool() -> None:
    """On a loop where LRU never hits, auto keeps a part of the loop cached."""
    trace = loop(30, 5, 60)

    assert hit_rate("lru", 100, trace) == 0
    assert hit_rate("auto", 100, trace) > 0.5  # of at most 0.63: 95 of 150 pages


def test_auto_adapts_to_another_phase() -> None:
    """After a loop, auto adapts to popular prompts nearly as well as LRU."""
    before, after = loop(30, 5, 60), zipf(Random(3), 3000, 5, first=500)

    rates = {}
    for policy in ("lru", "auto"):
        cache = replay(PrefixCache(100, 1, policy=policy, log_every=0), before)
        middle = cache.stats().hit_tokens
        replay(cache, after)
        rates[policy] = (cache.stats().hit_tokens - middle) / (5 * len(after))

    assert rates["auto"] > rates["lru"] - 0.01


@pytest.mark.parametrize("num_pages", [40, 100, 250])
def test_auto_is_nowhere_worse_than_lru(num_pages: int) -> None:
    """The hit rate of auto is at most half a point below LRU's on all kinds of traces."""
    random = Random(1)
    traces = [zipf(random, 2500, 5), chats(random, 2500), loop(60, 5, 30)]
    mixed = [*zipf(random, 1500, 5), *chats(random, 1000), *loop(20, 3, 30, first=700)]
    random.shuffle(mixed)

    lost = [
        hit_rate("lru", num_pages, trace) - hit_rate("auto", num_pages, trace)
        for trace in (*traces, mixed)
    ]

    assert max(lost) < 0.005, lost


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    index=st.sampled_from(["radix", "hash"]),
    ghost_pages=st.sampled_from([None, 0, 3]),
)
def test_auto_knows_of_every_page_that_was_used(
    seed: int, index: str, ghost_pages: int | None
) -> None:
    """The policy's page counts by class and slot equal those recounted from the nodes."""
    random = Random(seed)
    cache = PrefixCache(random.randint(6, 12), 2, index=index, ghost_pages=ghost_pages)
    policy, tree = cache._store.policy, cache._tree
    assert isinstance(policy, HitDensityPolicy)

    for _ in Traffic(cache, random).run(50):
        alive = [Counter[int]() for _ in range(NUM_CLASSES)]
        for node in tree.nodes():
            if state := policy._state[node]:
                alive[state % 32 - 1][state // 32] += tree.length[node]
        assert policy._alive == alive


def test_what_is_learned_is_scaled_down_before_it_grows_out_of_range() -> None:
    """Rescaling the decayed counts keeps all ratios, and so the hit rate."""
    trace = [*loop(3, 4, 40), *zipf(Random(1), 300, 4, 10)]
    rates = []
    for gain in (1.0, 0.999e9):
        cache = PrefixCache(40, 1, policy="auto", log_every=0)
        policy = cache._store.queue._policy
        assert isinstance(policy, HitDensityPolicy)
        policy._gain = gain
        rates.append(replay(cache, trace).stats().hit_rate)
        assert policy._gain < 1e9

    assert rates[0] == rates[1]


def test_reuse_after_a_very_long_time_does_not_break_what_is_learned() -> None:
    """Reuse from beyond the last age bin leaves every hit density non-negative."""
    rare, hot = CacheKey(range(1000, 1005)), CacheKey(range(45))
    new = [CacheKey(range(at, at + 11)) for at in range(5000, 8000, 11)]
    cache = PrefixCache(88, 1, policy="auto", log_every=0)

    replay(cache, [rare, *[hot] * 1300, rare, *new])

    cache.check()
    policy = cache._store.queue._policy
    assert isinstance(policy, HitDensityPolicy)
    assert min(map(min, policy._index)) >= 0
