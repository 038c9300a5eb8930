"""Promises of room: what is said to fit fits, and what is said not to fit is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache import PrefixCache
from ramify.errors import CacheError, OutOfPagesError
from ramify.kv.block_table import PagedBlockTable
from tests.pure.cache_traffic import Clock
from tests.pure.planner_bench import Bench, sequence_of
from tests.pure.test_prefix_cache import key, serve, state


def can_run(bench: Bench, *batch: RadixSequence) -> bool:
    """Whether a plan takes them; if so, they have been computed, with the right answers."""
    try:
        bench.run(*batch)
    except CacheError:
        return False
    return True


# -- room ----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    page_size=st.integers(1, 4),
    num_pages=st.integers(2, 14),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    warm=st.integers(0, 8),
    num_new=st.integers(1, 12),
)
def test_can_append_is_true_just_when_the_plan_succeeds(
    page_size: int, num_pages: int, lengths: list[int], warm: int, num_new: int
) -> None:
    """Whatever else is live or warm: what is promised can be had, what is denied cannot."""
    bench = Bench(num_pages=num_pages, page_size=page_size)
    live = []
    for at, length in enumerate(lengths):
        each = sequence_of(range(100 * at, 100 * at + length))
        if bench.planner.can_allocate([each]):
            bench.run(each)
            live.append(each)
    if bench.planner.can_allocate([sequence_of(range(500, 501 + warm))]):
        bench.warm(range(500, 501 + warm))

    for one in live:
        promised, before = bench.planner.can_append(one, num_new), bench.state()
        one.tokens.extend(range(700, 700 + num_new))
        assert can_run(bench, one) == promised
        if not promised:
            assert bench.state() == before
            del one.tokens[-num_new:]


STEMS = ("", "a", "aa", "aaa", "ab", "abb", "b")
PROMPTS = st.tuples(st.sampled_from(STEMS), st.integers(1, 3))


def prompt(page_size: int, stem: str, tail: int) -> list[int]:
    return [ord(letter) for letter in stem for _ in range(page_size)] + list(range(1, 1 + tail))


@settings(max_examples=150)
@given(
    page_size=st.integers(1, 3),
    num_pages=st.integers(1, 12),
    num_rows=st.integers(1, 3),
    warm=st.lists(PROMPTS, max_size=3),
    live=PROMPTS,
    asked=st.lists(st.tuples(PROMPTS, st.booleans()), min_size=1, max_size=4),
)
def test_can_allocate_is_true_just_when_the_plan_succeeds(
    page_size: int, num_pages: int, num_rows: int, warm: list, live: tuple, asked: list
) -> None:
    """AB1: warm pages are found or free, never both; prompts of one batch share; rows count."""
    bench = Bench(num_pages, page_size, num_rows=num_rows)
    for each in warm:
        if bench.planner.can_allocate([sequence_of(prompt(page_size, *each))]):
            bench.warm(prompt(page_size, *each))
    one = sequence_of(prompt(page_size, *live))
    if bench.planner.can_allocate([one]):
        bench.run(one)
    batch = [sequence_of(prompt(page_size, *each), reuse=reuse) for each, reuse in asked]
    before = bench.state()

    promised = bench.planner.can_allocate(batch)

    assert bench.state() == before
    assert all(each.lease is None for each in batch)
    assert can_run(bench, *batch) == promised
    assert promised or bench.state() == before
    bench.planner.release([one, *batch])
    bench.assert_nothing_leaked()


def test_ab1_a_warm_page_is_not_free_as_well() -> None:
    """A prompt whose prefix is all that could be evicted does not fit; one page less does."""
    bench = Bench(num_pages=4, page_size=2)
    bench.warm(range(6))
    held = bench.cache.reserve(1)
    long, short = sequence_of(range(8)), sequence_of(range(6))

    assert not bench.planner.can_allocate([long])
    with pytest.raises(OutOfPagesError):
        bench.plan(long)
    assert bench.planner.can_allocate([short])
    bench.run(short)

    assert short.num_read == 4
    bench.cache.give_back(held)


def test_an_expired_pin_denies_no_room() -> None:
    """Neither to the promise nor to the plan."""
    clock, bench = Clock(), Bench(num_pages=4, page_size=2)
    bench.cache = PrefixCache(4, 2, clock=clock)
    bench.planner = RadixAttentionPlanner(bench.cache, bench.table)
    bench.warm(range(4))
    bench.cache.pin(sequence_of(range(4)).key(4), "me", ttl=1)
    one = sequence_of(range(50, 58))
    assert not bench.planner.can_allocate([one])

    clock.now_s += 1

    assert bench.planner.can_allocate([one])
    bench.run(one)


def test_tokens_to_come_are_shared_with_nobody() -> None:
    """Equal prompts may go on differently, and not as a cached one does."""
    bench = Bench(num_pages=5, page_size=2)
    batch = [sequence_of([1, 2, 3]), sequence_of([1, 2, 3])]
    assert not bench.planner.can_allocate(batch, 5)
    assert bench.planner.can_allocate(batch, 3)

    for at, each in enumerate(batch):
        each.tokens.extend([10 + at] * 3)

    bench.run(*batch)


def test_who_cannot_be_planned_is_promised_nothing() -> None:
    """Released, in a plan or without a token to compute."""
    bench = Bench(num_pages=16, page_size=2)
    over, busy, done = sequence_of([1]), sequence_of([2]), sequence_of([3])
    bench.run(over, done)
    bench.planner.release([over])
    bench.plan(busy)

    for one in (over, busy):
        assert not bench.planner.can_append(one)
        assert not bench.planner.can_allocate([one])
    assert not bench.planner.can_append(done, 0)
    assert bench.planner.can_append(done, 1)
    assert not bench.planner.can_allocate([sequence_of([])])


@pytest.mark.parametrize("too_long", [False, True])
def test_can_allocate_counts_tokens_to_come(too_long: bool) -> None:
    """A row of the table must hold them, and so must the pool."""
    cache = PrefixCache(6, 2)
    planner = RadixAttentionPlanner(cache, PagedBlockTable(2, 4 if too_long else 9, 2))
    one = sequence_of(range(5))

    room = [planner.can_append(one, num_tokens) for num_tokens in range(10)]

    assert room == [5 + num_tokens <= (8 if too_long else 12) for num_tokens in range(10)]
    planner.plan([one])
    planner.commit([one])
    assert [planner.can_append(one, num_tokens) for num_tokens in range(1, 10)] == room[1:]


@pytest.mark.parametrize("held", [0, 2])
def test_can_reserve_is_what_reserve_does(held: int) -> None:
    """Free and evictable pages count, pinned ones do not, and a negative number cannot be had."""
    cache = PrefixCache(6, 2)
    serve(cache, "abcdef")
    lease = cache.acquire(key("abcde") if held else key("x"))

    assert [cache.can_reserve(count) for count in range(-1, 9)] == [
        False,
        *[count <= 6 - held for count in range(9)],
    ]
    assert len(cache.reserve(6 - held)) == 6 - held
    cache.release(lease)


@settings(max_examples=150)
@given(
    num_pages=st.integers(1, 10),
    served=st.lists(st.sampled_from(["ab", "abcd", "abcdef", "abxy", "uv"]), max_size=4),
    leased=st.lists(st.sampled_from(["abc", "abcdefg", "abxyz", "uvw"]), max_size=2),
    asked=st.sampled_from(["a", "abc", "abcdefg", "abcdefghi", "uvwxyz", "abxyzzz"]),
    num_tokens=st.integers(0, 6),
    index=st.sampled_from(["radix", "hash"]),
)
def test_can_allocate_of_a_key_is_true_just_when_its_pages_can_be_had(
    num_pages: int, served: list, leased: list, asked: str, num_tokens: int, index: str
) -> None:
    """AB1: acquire, then reserve the rest: both succeed or the answer was no."""
    cache = PrefixCache(num_pages, 2, index=index)
    for text in served:
        if cache.can_allocate(key(text)):
            serve(cache, text)
    for text in leased:
        cache.acquire(key(text))
    before = state(cache)

    promised = cache.can_allocate(key(asked), num_tokens)

    assert state(cache) == before
    lease = cache.acquire(key(asked))
    missing = -(-(len(asked) + num_tokens) // 2) - len(lease.pages)
    assert promised == cache.can_reserve(missing)
    if promised:
        assert len(cache.reserve(missing)) == missing
    else:
        with pytest.raises(OutOfPagesError):
            cache.reserve(missing)
    cache.check()
