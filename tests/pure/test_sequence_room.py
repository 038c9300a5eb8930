"""`can_append`, `can_allocate` and `can_reserve` are true exactly if the call succeeds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache import PrefixCache
from ramify.errors import CacheError, OutOfPagesError
from ramify.kv.block_table import PagedBlockTable
from tests.budget import examples
from tests.pure.cache_traffic import Clock
from tests.pure.planner_bench import Bench, sequence_of
from tests.pure.test_prefix_cache import key, serve, state


def can_run(bench: Bench, *batch: RadixSequence) -> bool:
    """Plan and run them; False if the plan raises CacheError."""
    try:
        bench.run(*batch)
    except CacheError:
        return False
    return True


# -- planner -------------------------------------------------------------------------------


@settings(max_examples=examples(100))
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
    """Whatever else is live or cached."""
    bench = Bench(num_pages=num_pages, page_size=page_size)
    live = []
    for index, length in enumerate(lengths):
        sequence = sequence_of(range(100 * index, 100 * index + length))
        if bench.planner.can_allocate([sequence]):
            bench.run(sequence)
            live.append(sequence)
    if bench.planner.can_allocate([sequence_of(range(500, 501 + warm))]):
        bench.warm(range(500, 501 + warm))

    for sequence in live:
        promised, before = bench.planner.can_append(sequence, num_new), bench.state()
        sequence.tokens.extend(range(700, 700 + num_new))
        assert can_run(bench, sequence) == promised
        if not promised:
            assert bench.state() == before
            del sequence.tokens[-num_new:]


STEMS = ("", "a", "aa", "aaa", "ab", "abb", "b")
PROMPTS = st.tuples(st.sampled_from(STEMS), st.integers(1, 3))


def prompt(page_size: int, stem: str, tail: int) -> list[int]:
    return [ord(letter) for letter in stem for _ in range(page_size)] + list(range(1, 1 + tail))


@settings(max_examples=examples(150))
@given(
    page_size=st.integers(1, 3),
    num_pages=st.integers(1, 12),
    num_rows=st.integers(1, 3),
    warm=st.lists(PROMPTS, max_size=3),
    live=PROMPTS,
    prompts=st.lists(st.tuples(PROMPTS, st.booleans()), min_size=1, max_size=4),
)
def test_can_allocate_is_true_just_when_the_plan_succeeds(
    page_size: int, num_pages: int, num_rows: int, warm: list, live: tuple, prompts: list
) -> None:
    """AB1: cached pages are reused or free, never both; prompts of a batch share; rows count."""
    bench = Bench(num_pages, page_size, num_rows=num_rows)
    for stem_and_tail in warm:
        tokens = prompt(page_size, *stem_and_tail)
        if bench.planner.can_allocate([sequence_of(tokens)]):
            bench.warm(tokens)
    sequence = sequence_of(prompt(page_size, *live))
    if bench.planner.can_allocate([sequence]):
        bench.run(sequence)
    batch = [sequence_of(prompt(page_size, *args), reuse=reuse) for args, reuse in prompts]
    before = bench.state()

    promised = bench.planner.can_allocate(batch)

    assert bench.state() == before
    assert all(sequence.lease is None for sequence in batch)
    assert can_run(bench, *batch) == promised
    assert promised or bench.state() == before
    bench.planner.release([sequence, *batch])
    bench.assert_nothing_leaked()


def test_ab1_a_warm_page_is_not_free_as_well() -> None:
    """A prompt that reuses all evictable pages does not fit; a page less does."""
    bench = Bench(num_pages=4, page_size=2)
    bench.warm(range(6))
    reserved = bench.cache.reserve(1)
    long, short = sequence_of(range(8)), sequence_of(range(6))

    assert not bench.planner.can_allocate([long])
    with pytest.raises(OutOfPagesError):
        bench.plan(long)
    assert bench.planner.can_allocate([short])
    bench.run(short)

    assert short.num_read == 4
    bench.cache.give_back(reserved)


def test_an_expired_pin_denies_no_room() -> None:
    """Its pages count as free for `can_allocate` and for the plan."""
    clock, bench = Clock(), Bench(num_pages=4, page_size=2)
    bench.cache = PrefixCache(4, 2, clock=clock)
    bench.planner = RadixAttentionPlanner(bench.cache, bench.table)
    bench.warm(range(4))
    bench.cache.pin(sequence_of(range(4)).key(4), "me", ttl=1)
    sequence = sequence_of(range(50, 58))
    assert not bench.planner.can_allocate([sequence])

    clock.now_s += 1

    assert bench.planner.can_allocate([sequence])
    bench.run(sequence)


def test_tokens_to_come_are_shared_with_nobody() -> None:
    """Equal prompts may continue differently, and match no cached continuation."""
    bench = Bench(num_pages=5, page_size=2)
    batch = [sequence_of([1, 2, 3]), sequence_of([1, 2, 3])]
    assert not bench.planner.can_allocate(batch, 5)
    assert bench.planner.can_allocate(batch, 3)

    for index, sequence in enumerate(batch):
        sequence.tokens.extend([10 + index] * 3)

    bench.run(*batch)


def test_a_sequence_that_cannot_be_planned_fits_nowhere() -> None:
    """Released, in a plan or without a token to compute."""
    bench = Bench(num_pages=16, page_size=2)
    released, planned, done = sequence_of([1]), sequence_of([2]), sequence_of([3])
    bench.run(released, done)
    bench.planner.release([released])
    bench.plan(planned)

    for sequence in (released, planned):
        assert not bench.planner.can_append(sequence)
        assert not bench.planner.can_allocate([sequence])
    assert not bench.planner.can_append(done, 0)
    assert bench.planner.can_append(done, 1)
    assert not bench.planner.can_allocate([sequence_of([])])


@pytest.mark.parametrize("too_long", [False, True])
def test_can_allocate_counts_tokens_to_come(too_long: bool) -> None:
    """Both the table's row and the pool must have pages for them."""
    cache = PrefixCache(6, 2)
    planner = RadixAttentionPlanner(cache, PagedBlockTable(2, 4 if too_long else 9, 2))
    sequence = sequence_of(range(5))

    can_append = [planner.can_append(sequence, num_tokens) for num_tokens in range(10)]

    assert can_append == [5 + num_tokens <= (8 if too_long else 12) for num_tokens in range(10)]
    planner.plan([sequence])
    planner.commit([sequence])
    assert [planner.can_append(sequence, num_tokens) for num_tokens in range(1, 10)] == can_append[
        1:
    ]


@pytest.mark.parametrize("num_pinned", [0, 2])
def test_can_reserve_is_what_reserve_does(num_pinned: int) -> None:
    """Free and evictable pages count, pinned pages do not; false for a negative number."""
    cache = PrefixCache(6, 2)
    serve(cache, "abcdef")
    lease = cache.acquire(key("abcde") if num_pinned else key("x"))

    assert [cache.can_reserve(count) for count in range(-1, 9)] == [
        False,
        *[count <= 6 - num_pinned for count in range(9)],
    ]
    assert len(cache.reserve(6 - num_pinned)) == 6 - num_pinned
    cache.release(lease)


@settings(max_examples=examples(150))
@given(
    num_pages=st.integers(1, 10),
    served=st.lists(st.sampled_from(["ab", "abcd", "abcdef", "abxy", "uv"]), max_size=4),
    leased=st.lists(st.sampled_from(["abc", "abcdefg", "abxyz", "uvw"]), max_size=2),
    text=st.sampled_from(["a", "abc", "abcdefg", "abcdefghi", "uvwxyz", "abxyzzz"]),
    num_tokens=st.integers(0, 6),
    index=st.sampled_from(["radix", "hash"]),
)
def test_can_allocate_of_a_key_is_true_just_when_its_pages_can_be_had(
    num_pages: int, served: list, leased: list, text: str, num_tokens: int, index: str
) -> None:
    """AB1: true exactly if acquiring the key and reserving the missing pages succeeds."""
    cache = PrefixCache(num_pages, 2, index=index)
    for served_text in served:
        if cache.can_allocate(key(served_text)):
            serve(cache, served_text)
    for leased_text in leased:
        cache.acquire(key(leased_text))
    before = state(cache)

    promised = cache.can_allocate(key(text), num_tokens)

    assert state(cache) == before
    lease = cache.acquire(key(text))
    missing = -(-(len(text) + num_tokens) // 2) - len(lease.pages)
    assert promised == cache.can_reserve(missing)
    if promised:
        assert len(cache.reserve(missing)) == missing
    else:
        with pytest.raises(OutOfPagesError):
            cache.reserve(missing)
    cache.check()
