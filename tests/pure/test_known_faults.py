"""Numbered faults of four earlier systems: each has a test named after it, or cannot exist here."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ramify
from ramify.attention.batch import AttentionBatch, Extend
from ramify.cache import CacheKey, PrefixCache
from ramify.errors import CacheError, ConfigError, OutOfPagesError, RamifyError
from ramify.kv.block_table import PagedBlockTable
from tests.pure import engine_bench
from tests.pure.planner_bench import Bench, sequence_of
from tests.pure.test_prefix_cache import begin, drained, key, publish, serve

TESTS = Path(__file__).resolve().parents[1]
FAULTS = [
    *(f"PB{n}" for n in range(1, 33)),
    *(f"AB{n}" for n in range(1, 29)),
    *(f"EB{n}" for n in range(1, 24)),
    *(f"YB{n}" for n in range(1, 27)),
]

TIERS = "a cached page has one place: there are no other tiers yet, and no copies in flight"
STATES = "there are no recurrent layers yet: what is cached is K/V by position, and nothing else"
ROWS = "block tables know rows, which they hand out themselves; no request names one"
DEVICE = "decisions import no tensor library, so that nothing in them can wait for a device"

REPOSITORY = "of a repository and its files: make check and the tests of the house look at those"

EXEMPT = {
    "YB3": "ruff finds every print in the library",
    "YB4": REPOSITORY,
    "YB5": "mypy is strict, in make check",
    "YB12": "a request that has ended leaves the batch; there is no row to mask",
    "YB13": "prompts are never padded to one length",
    "YB14": "there is no tensor parallelism yet; options are read by name, unknown ones refused",
    "YB16": "a speed is made of the tokens that were produced, which are what is counted",
    "YB18": REPOSITORY,
    "YB19": REPOSITORY,
    "YB20": REPOSITORY,
    "YB21": "nothing is reset between calls, which test_ab17 and test_ab16 would show",
    "YB25": "make perf compares medians with their spread",
    "EB18": "a checkpoint is a directory or a name, and find_checkpoint says where it looked",
    "EB19": REPOSITORY,
    "EB20": REPOSITORY,
    "EB22": REPOSITORY,
    "EB23": REPOSITORY,
    "PB5": TIERS,
    "PB6": TIERS,
    "PB7": TIERS,
    "PB9": TIERS,
    "PB15": STATES,
    "PB16": STATES,
    "PB17": TIERS,
    "PB23": TIERS,
    "PB28": "there is no file backend yet; page hashes for one are stable across processes",
    "PB32": "backends say by supports() why they cannot run; no probe catches exceptions",
    "AB8": STATES,
    "AB15": "tests import nothing at their top that the development extra does not install",
    "AB20": STATES,
    "AB25": "ruff finds unused and duplicate imports in make check",
    "YB1": DEVICE,
    "YB6": ROWS,
    "YB8": "allocate_all gives rows for all or raises; there is no list of what it managed",
    "YB26": "rows are a heap, and nothing is formatted that is not raised or logged",
}


def test_every_fault_has_a_test_or_a_reason_why_it_cannot_exist() -> None:
    """Each entry of `FAULTS` has a test named after it, or a reason in `EXEMPT`."""
    tested = set[str]()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tested.update(re.findall(r"(?<=_)(?:pb|ab|eb|yb)\d+(?=_|$)", node.name))

    tested = {tag.upper() for tag in tested}

    assert sorted(set(FAULTS) - tested - EXEMPT.keys()) == []
    assert sorted(tested & EXEMPT.keys()) == [], "there is a test after all"
    assert set(FAULTS) >= EXEMPT.keys() | tested


# -- cost ----------------------------------------------------------------------------------


def num_calls(call: Callable[..., object], *arguments: object) -> int:
    """Count the Python and built-in calls that `call` makes: a cost that ignores machine load."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call(*arguments)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("policy", ["auto", "lru", "lfu"])
def test_pb22_the_cost_of_an_eviction_does_not_grow_with_the_cache(policy: str) -> None:
    """Evicting 1 or 20 pages costs about the same among 100 leaves and among 10,000."""
    counts = []
    for num_leaves in (100, 10_000):
        cache = PrefixCache(num_leaves, 1, policy=policy, log_every=0)
        for at in range(num_leaves):
            lease = cache.acquire(CacheKey([at]))
            cache.release(cache.publish(lease, CacheKey([at]), cache.reserve(1)))
        cache.evict(1)  # the first one may learn or sort what came before
        counts.append([num_calls(cache.evict, 1), num_calls(cache.evict, 20)])

    assert counts[1][0] <= 1.5 * counts[0][0] + 10
    assert counts[1][1] <= 1.5 * counts[0][1] + 10


def test_ab24_positions_and_slots_are_no_loop_over_tokens() -> None:
    """Building a batch of 10,000 tokens takes as many calls as building one of 100."""
    counts = []
    for num_tokens in (100, 10_000):
        table = PagedBlockTable.of([range(num_tokens // 10)], 10)
        extend = Extend(0, 0, 0, num_tokens)
        counts.append(num_calls(AttentionBatch.build, [extend], table))

    assert counts[1] <= counts[0] + 10


# -- the cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["publish", "withdraw"])
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_pb8_a_split_of_pending_pages_loses_neither_half(index: str, ends: str) -> None:
    """Splitting a leader's pending node: both halves become ready, or free."""
    cache = PrefixCache(8, 2, index=index)
    lease, private = begin(cache, "abcdefgh")
    leader = cache.announce(lease, key("abcdefgh"), private)
    follower = cache.attach(key("abcdX"))
    assert (follower.num_tokens, follower.num_pending) == (4, 2)

    if ends == "publish":
        leader = cache.publish(leader, key("abcdefgh"))
        assert cache.match(key("abcdefghi")).num_tokens == 8
    else:
        assert cache.withdraw(leader) == [follower]
        assert cache.stats().free_pages == 8

    cache.release(leader)
    cache.release(follower)
    assert drained(cache)


def refused(cache: PrefixCache) -> dict[str, Callable[[], object]]:
    """Return a call for each error type, by the type's name, that makes `cache` raise it."""
    lease = cache.acquire(key("abcde"))
    cache.release(lease)
    return {
        "InvalidKeyError": lambda: CacheKey([-1]),
        "LeaseError": lambda: cache.release(lease),
        "OutOfPagesError": lambda: cache.reserve(99),
        "PageOwnershipError": lambda: cache.give_back([0, 0]),
        "PinError": lambda: cache.pin(key("zz"), "me"),
        "ConfigError": lambda: cache.subscribe(0),
    }


@pytest.mark.parametrize("name", list(refused(PrefixCache(4, 2))))
def test_pb26_errors_are_told_apart_by_type_and_numbers(name: str) -> None:
    """Each failure raises its own error type; OutOfPagesError carries the page counts."""
    cache = PrefixCache(4, 2)
    serve(cache, "abcd")

    with pytest.raises(RamifyError) as caught:
        refused(cache)[name]()

    assert type(caught.value).__name__ == name
    assert isinstance(caught.value, CacheError | ConfigError | ValueError)
    if isinstance(caught.value, OutOfPagesError):
        error = caught.value
        assert (error.asked, error.free, error.evictable, error.total) == (99, 2, 2, 4)


def test_pb29_names_of_the_package_are_those_of_their_modules() -> None:
    """The package's lazy names are their modules' objects; an unknown name is an AttributeError."""
    from ramify.cache import prefix_cache

    assert ramify.PrefixCache is ramify.PrefixCache is prefix_cache.PrefixCache
    with pytest.raises(AttributeError, match="no attribute 'Cache'"):
        _ = ramify.Cache


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_new_namespace_takes_over_nothing_from_a_forgotten_node(index: str) -> None:
    """A namespace root may reuse an evicted node's number and inherits nothing from it."""
    cache = PrefixCache(8, 1, policy="lru", ghost_pages=0, index=index)
    serve(cache, "abc")
    serve(cache, "xyz")
    cache.evict(3)

    serve(cache, "abc", "new")

    assert cache.match(key("abcd", "new")).num_pages == 3
    assert cache.match(key("xyz!")).num_pages == 3
    cache.check()


# -- sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ab12_ids_are_pages_and_slots_are_converted_once(page_size: int) -> None:
    """Page ids lie in the pool, and every slot lies in the page that the block table names."""
    bench = Bench(num_pages=40, page_size=page_size)
    bench.warm(range(20))
    sequence = sequence_of([*range(20), *range(50, 60)])

    batch = bench.plan(sequence)

    pages = batch.block_table[0][batch.block_table[0] >= 0]
    assert pages.max() < 40
    expected = pages[batch.positions // page_size] * page_size + batch.positions % page_size
    assert np.array_equal(batch.slot_mapping, expected)


def test_ab18_a_token_whose_kv_is_not_written_is_published_by_nobody() -> None:
    """Tokens that are appended but not computed are neither matched nor published."""
    bench = Bench(num_pages=16, page_size=4)
    subscription = bench.cache.subscribe()
    sequence = sequence_of(range(7))
    bench.run(sequence)
    sequence.tokens.extend([70, 71, 72])

    bench.plan(sequence, num_new=[1])
    assert bench.cache.match(sequence.key(10)).num_tokens == 4
    names = [name for event in subscription.take() for name in event.page_hashes]

    assert names == CacheKey(range(7)).page_hashes(4)


@pytest.mark.parametrize("num_generated", range(6))
def test_ab19_a_preempted_sequence_has_a_row_left_to_compute(num_generated: int) -> None:
    """A preempted sequence hits all full pages that it computed, and computes at least one row."""
    bench = Bench(num_pages=16, page_size=2)
    sequence = sequence_of(range(5))
    for _ in range(num_generated):
        sequence.tokens.extend(bench.run(sequence))
    bench.planner.release([sequence])

    again = sequence_of(sequence.tokens)
    batch = bench.plan(again)

    assert 1 <= batch.num_tokens <= (2 if num_generated else 5)
    assert bench.execute(batch, again) != [None]
    bench.planner.commit([again])
    bench.planner.release([again])
    bench.assert_nothing_leaked()


def test_pb12_a_split_below_a_lease_leaves_it_where_it_was() -> None:
    """Splits below a lease change none of its pages, and eviction spares them."""
    cache = PrefixCache(16, 2)
    lease, private = publish(cache, "abcdef", *begin(cache, "abcdef"))
    pages = list(lease.pages)

    cache.release(cache.acquire(key("abX")))
    cache.release(cache.acquire(key("abcdX")))
    cache.evict(16)

    assert list(lease.pages) == pages
    assert not any(cache.is_free(page) for page in pages)
    cache.release(lease, private)
    assert drained(cache)


# -- with a scheduler on top ---------------------------------------------------------------


def test_ab10_warm_prompts_are_packed_by_what_is_left_to_compute() -> None:
    """Three warm prompts of 60 tokens, each with one uncached token, fit in a step of 64 tokens."""
    bench = engine_bench.Bench(max_batch_tokens=64)
    prompts = [[1 + at] * 60 for at in range(3)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=1)
        bench.run()
    assert bench.core.cache.stats().hit_tokens == 0
    new = [bench.add(prompt, max_tokens=1) for prompt in prompts]

    ended = bench.step()

    assert sorted(event.request_id for event in ended if event.output) == new
    assert [bench.outputs[request_id].cache.read_tokens for request_id in new] == [59] * 3


def test_ab11_a_prompt_longer_than_the_budget_blocks_nobody() -> None:
    """A long prompt is chunked; a short one behind it starts with its last chunk at the latest."""
    bench = engine_bench.Bench(max_batch_tokens=16)
    long = bench.add([1] * 200, max_tokens=2)
    short = bench.add([2] * 5, max_tokens=2)

    outputs = bench.run()

    waited_s = outputs[short].metrics.ttft_s  # a step takes a second
    assert waited_s is not None
    assert waited_s <= 200 // 16 + 1
    assert outputs[long].cache.computed_tokens == 200


def test_ab17_a_cache_that_finds_nothing_would_be_seen_from_outside() -> None:
    """A second turn through the engine hits the first turn's prompt and answer."""
    bench = engine_bench.Bench()
    first = bench.add([1] * 21, max_tokens=9)
    answer = list(bench.run()[first].token_ids)

    second = bench.add([*([1] * 21), *answer, 2, 3], max_tokens=2)

    read = bench.run()[second].cache.read_tokens
    assert read == (21 + len(answer) - 1) // 4 * 4
