"""Part of a cached page: which page is found, who pins it, what is copied and counted."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, Media, PrefixCache, Salt
from ramify.cache.partial_page import (
    MAX_VISITED,
    count_partial_tokens,
    key_of_partial_page,
    least_copied,
    pin_partial_page,
    unpin_partial_page,
)
from ramify.errors import LeaseError, OutOfPagesError
from tests.budget import examples
from tests.pure.planner_bench import Bench, pages_of, sequence_of


def publish(cache: PrefixCache, key: CacheKey) -> None:
    """Compute a key and release it: its whole pages stay cached."""
    lease = cache.acquire(key)
    rest = cache.reserve(-(-len(key) // cache.page_size) - len(lease.pages))
    private = list(rest)
    longer = cache.publish(lease, key, private)
    cache.release(longer, private[len(longer.pages) - len(lease.pages) :])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


# -- the cache -------------------------------------------------------------------------------

ATOMS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=examples(600))
@given(
    page_size=st.integers(1, 8),
    index=st.sampled_from(["radix", "hash"]),
    cached=st.lists(st.tuples(ATOMS, st.sampled_from([b"", b"n"])), max_size=12),
    tokens=ATOMS,
)
def test_the_longest_common_prefix_of_all_cached_pages_is_found(
    page_size: int, index: str, cached: list[tuple[list[int], bytes]], tokens: list[int]
) -> None:
    """Match and partial page have together what a search through all cached prompts finds."""
    cache = PrefixCache(400, page_size, index=index)
    for other, namespace in cached:
        publish(cache, CacheKey(other, namespace))
    shared = [
        common(tokens[:-1], other[: len(other) // page_size * page_size])
        for other, namespace in cached
        if namespace == b""
    ]
    longest = max(shared, default=0)
    key = CacheKey(tokens)

    matched, num_partial = cache.match(key).num_tokens, count_partial_tokens(cache, key)
    lease = cache.acquire(key)
    partial = pin_partial_page(cache, lease, key)

    if page_size == 1:
        assert (matched, num_partial, partial) == (longest, 0, None)
    else:
        common_tokens = longest - matched
        assert num_partial == (common_tokens if common_tokens >= least_copied(page_size) else 0)
        assert (0 if partial is None else partial.num_tokens) == num_partial
    cache.check()
    if partial is not None:
        page_key = key_of_partial_page(cache, partial)
        assert len(page_key) == matched + page_size
        assert common(page_key.tokens(), tokens) >= longest
        assert cache.match(CacheKey([*page_key.tokens(), 0])).num_tokens == len(page_key)
        unpin_partial_page(cache, partial)
    cache.release(lease)
    cache.check()
    assert cache.stats().num_leases == 0


@pytest.mark.parametrize("page_size", [2, 4])
def test_a_pinned_page_is_not_evicted(page_size: int) -> None:
    """From the pin on, evicting everything leaves the page and the prefix before it; then they go."""
    cache = PrefixCache(16, page_size)
    publish(cache, CacheKey([*[1] * page_size, *[2] * page_size, *[3] * page_size]))
    key = CacheKey([*[1] * page_size, 2, 9])
    lease = cache.acquire(key)
    partial = pin_partial_page(cache, lease, key)
    assert partial is not None
    cache.release(lease)

    cache.evict(16)

    assert not cache.is_free(partial.page)
    cache.check()
    unpin_partial_page(cache, partial)
    assert cache.evict(16) > 0
    assert cache.is_free(partial.page)
    with pytest.raises(LeaseError):
        unpin_partial_page(cache, partial)


def test_a_page_that_is_split_off_later_stays_pinned() -> None:
    """Another lookup splits the node behind the pinned page: both halves stay until the unpin."""
    cache = PrefixCache(16, 4)
    publish(cache, CacheKey(range(16)))
    key = CacheKey([0, 1, 9])
    lease = cache.acquire(key)
    partial = pin_partial_page(cache, lease, key)
    assert partial is not None
    other = cache.acquire(CacheKey([*range(8), 50]))
    cache.release(other)

    cache.evict(16)
    cache.check()

    assert not cache.is_free(partial.page)
    assert key_of_partial_page(cache, partial).tokens().tolist() == [0, 1, 2, 3]
    unpin_partial_page(cache, partial)
    cache.release(lease)
    assert cache.evict(16) == 4


def test_a_node_that_has_lost_its_last_pages_is_pinned_as_far_as_it_is_there() -> None:
    """Its evicted rest is cut off; others may compute it again while the page is pinned."""
    cache = PrefixCache(16, 4)
    publish(cache, CacheKey(range(16)))
    cache.evict(2)
    key = CacheKey([0, 1, 9])
    lease = cache.acquire(key)

    partial = pin_partial_page(cache, lease, key)

    assert partial is not None
    assert partial.num_tokens == 2
    cache.check()
    for tokens in (range(16), range(12)):
        publish(cache, CacheKey(tokens))
        cache.check()
    cache.evict(16)
    assert not cache.is_free(partial.page)
    unpin_partial_page(cache, partial)
    cache.release(lease)
    cache.check()
    cache.evict(16)
    assert cache.stats().free_pages == 16


def test_pages_that_are_not_computed_or_evicted_are_no_source() -> None:
    """A page that another request still computes has no K/V yet; an evicted page has none any more."""
    cache = PrefixCache(8, 4)
    lease = cache.attach(CacheKey([1, 2, 3, 4, 5]))
    pages = cache.reserve(2)
    lease = cache.announce(lease, CacheKey([1, 2, 3, 4, 5]), pages)
    key = CacheKey([1, 2, 9, 9])
    assert count_partial_tokens(cache, key) == 0
    lease = cache.publish(lease, CacheKey([1, 2, 3, 4]))
    assert count_partial_tokens(cache, key) == 2
    cache.release(lease, pages[1:])
    cache.evict(8)

    assert count_partial_tokens(cache, key) == 0
    assert pin_partial_page(cache, cache.acquire(key), key) is None


def test_salts_and_media_separate_inside_a_page() -> None:
    """Tokens before a salt or an image are shared, those from it on only with the same content."""
    cache = PrefixCache(16, 8)
    cat, dog = Media.digest_of(b"cat"), Media.digest_of(b"dog")
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    publish(cache, CacheKey(tokens, salts=[Salt(3, "a")]))
    publish(cache, CacheKey([11, 12, 0, 0, 0, 6, 7, 8], media=[Media(cat, 2, 3)]))

    def partial(tokens: Sequence[int], **content: object) -> int:
        return count_partial_tokens(cache, CacheKey([*tokens, 9], **content))  # type: ignore[arg-type]

    assert partial(tokens) == 3
    assert partial(tokens, salts=[Salt(3, "b")]) == 3
    assert partial(tokens[:5], salts=[Salt(3, "a")]) == 5
    image = [11, 12, 0, 0, 0, 6, 99]
    assert partial(image) == 2
    assert partial(image, media=[Media(dog, 2, 3)]) == 2
    assert partial(image, media=[Media(cat, 2, 3)]) == 6
    assert partial(image[:4], media=[Media(cat, 2, 2)]) == 4


def test_the_newest_children_are_compared_and_no_more() -> None:
    """The cost of a lookup has a bound: beyond `MAX_VISITED` newer siblings a page is not found."""
    cache = PrefixCache(2 * MAX_VISITED + 2, 4)
    publish(cache, CacheKey([1, 2, 3, 4]))
    for number in range(MAX_VISITED - 1):
        publish(cache, CacheKey([1, 2, 100 + number, 0]))
    key = CacheKey([1, 2, 3, 9])
    assert count_partial_tokens(cache, key) == 3

    publish(cache, CacheKey([1, 2, 99, 0]))

    assert count_partial_tokens(cache, key) == 2


# -- the planner -----------------------------------------------------------------------------


def bench_of(num_pages: int = 16, page_size: int = 4, window: int | None = None) -> Bench:
    return Bench(num_pages, page_size, partial_pages=True, window=window)


def test_a_plan_names_source_target_and_tokens() -> None:
    """A prompt that leaves a cached page after 3 of 4 tokens computes from there on."""
    bench = bench_of()
    bench.run(first := sequence_of(range(10, 22)))
    sequence = sequence_of([*range(10, 17), 90, 91])

    batch = bench.plan(sequence)

    [copy] = batch.page_copies
    assert (copy.source, copy.num_tokens) == (pages_of(bench, first)[1], 3)
    assert copy.target == pages_of(bench, sequence)[1]
    assert batch.positions.tolist() == [7, 8]
    assert (sequence.num_read, sequence.num_copied, sequence.num_shared) == (7, 3, 0)
    bench.execute(batch, sequence)
    bench.planner.commit([sequence])
    assert sequence.source is None
    sequence.tokens.append(92)
    assert bench.plan(sequence).page_copies == ()


def test_the_source_stays_until_the_step_is_committed() -> None:
    """Between plan and copy everything else is evicted and overwritten: the answer is right."""
    bench = bench_of(num_pages=6)
    bench.warm(range(10, 22))
    sequence = sequence_of([*range(10, 17), 90])
    batch = bench.plan(sequence)
    bench.cache.evict(6)
    taken = bench.cache.reserve(bench.cache.num_available)
    bench.device.zero_pages(taken)

    bench.execute(batch, sequence)  # asserts what is read

    assert batch.page_copies[0].source not in taken
    bench.cache.give_back(taken)
    bench.planner.commit([sequence])
    bench.cache.evict(6)
    assert bench.cache.is_free(batch.page_copies[0].source)
    bench.planner.release([sequence])
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("end", ["abandon", "release", "out of pages"])
def test_a_step_that_does_not_happen_lets_the_source_go(end: str) -> None:
    """After abandon, release or a plan that failed nothing is pinned, and a second plan copies again."""
    bench = bench_of(num_pages=5)
    bench.warm(range(10, 18))
    before = bench.state()
    sequence = sequence_of([*range(10, 16), 90])
    if end == "out of pages":
        with pytest.raises(OutOfPagesError):
            bench.plan(sequence, sequence_of(range(50, 70)))
        assert bench.state() == before
    else:
        bench.plan(sequence)
        getattr(bench.planner, end)([sequence])

    assert sequence.source is None
    assert sequence.num_copied == 0
    bench.cache.check()
    assert bench.cache.stats().num_leases == 0
    if end != "release":
        bench.run(sequence)
        assert sequence.num_copied == 2
        bench.planner.release([sequence])
    bench.assert_nothing_leaked()


def test_without_room_for_the_source_it_is_computed() -> None:
    """A plan never fails for want of the page that it would copy from."""
    bench = bench_of(num_pages=3)
    bench.warm(range(10, 18))
    sequence = sequence_of([*range(10, 16), *range(90, 96)])

    batch = bench.plan(sequence)

    assert batch.page_copies == ()
    assert (sequence.num_read, sequence.num_copied, batch.num_tokens) == (4, 0, 8)
    bench.execute(batch, sequence)
    bench.planner.commit([sequence])
    bench.planner.release([sequence])
    bench.assert_nothing_leaked()


def test_sequences_of_one_step_copy_or_share() -> None:
    """What an earlier sequence of the step computes is shared whole; others copy from one source."""
    bench = bench_of(num_pages=32)
    bench.run(first := sequence_of(range(10, 22)))
    [leader, follower, other] = [
        sequence_of([*range(10, 17), 90, 91, 92, 93]),
        sequence_of([*range(10, 17), 90, 91]),
        sequence_of([*range(10, 16), 70]),
    ]

    batch = bench.plan(leader, follower, other)

    source = pages_of(bench, first)[1]
    assert [(copy.source, copy.num_tokens) for copy in batch.page_copies] == [
        (source, 3),
        (source, 2),
    ]
    assert [sequence.num_shared for sequence in (leader, follower, other)] == [0, 4, 0]
    assert [sequence.num_read for sequence in (leader, follower, other)] == [7, 4, 6]
    bench.execute(batch, leader, follower, other)
    bench.planner.commit([leader, follower, other])
    bench.planner.release([first, leader, follower, other])
    bench.assert_nothing_leaked()


def test_a_chunk_may_begin_and_end_inside_a_page() -> None:
    """The copy belongs to the first chunk; later ones go on from where it ended."""
    bench = bench_of()
    bench.warm(range(10, 22))
    sequence = sequence_of([*range(10, 15), *range(80, 90)])

    for start in (5, 8, 11, 14):
        batch = bench.plan(sequence, num_new=[3])
        assert batch.positions[0] == start
        assert len(batch.page_copies) == (start == 5)
        bench.execute(batch, sequence)
        bench.planner.commit([sequence])

    bench.planner.release([sequence])
    bench.assert_nothing_leaked()


def test_copied_tokens_are_counted_as_hits_once() -> None:
    """Hits, hits of an ideal cache and copied tokens; not again when the request is planned again."""
    bench = bench_of()
    bench.warm(range(10, 22))
    before = bench.cache.stats()
    sequence = sequence_of([*range(10, 17), 90, 91, 92])
    sequence.may_tell = lambda namespace: True

    bench.plan(sequence)
    explanation = sequence.explanation
    bench.planner.abandon([sequence])
    bench.run(sequence)

    stats = bench.cache.stats()
    assert stats.hit_tokens - before.hit_tokens == 7
    assert stats.ideal_hit_tokens - before.ideal_hit_tokens == 7
    assert stats.copied_tokens == 3
    assert explanation is not None
    assert (explanation.hit_tokens, explanation.read_tokens) == (4, 7)
    assert (explanation.reason, explanation.diverged_at) == ("diverged", 7)
    assert "7 of 10 tokens found, 3 of them in part of a page" in str(explanation)


def test_a_repeated_prompt_computes_its_last_token_alone() -> None:
    """Whatever its length is beside the pages', and that is a hit of all there is."""
    for length in range(5, 13):
        bench = bench_of()
        bench.warm(range(10, 22))
        sequence = sequence_of(range(10, 10 + length))
        sequence.may_tell = lambda namespace: True

        batch = bench.plan(sequence)

        assert batch.num_tokens == 1, length
        assert sequence.explanation is not None
        assert sequence.explanation.reason == "hit"
        bench.execute(batch, sequence)


@pytest.mark.parametrize("share", [True, False])
def test_only_sequences_that_may_read_the_cache_copy(share: bool) -> None:
    """Neither without sharing, nor with reuse=False, nor where the option is off."""
    bench = Bench(partial_pages=True, share=share)
    off = Bench()
    for planned in (bench, off):
        planned.warm(range(10, 22))

    batches = [
        bench.plan(sequence_of([*range(10, 17), 90], reuse=False)),
        off.plan(sequence_of([*range(10, 17), 90])),
    ]
    if not share:
        batches.append(bench.plan(sequence_of([*range(10, 17), 90])))

    assert [batch.page_copies for batch in batches] == [()] * len(batches)


def test_what_may_not_be_shared_is_not_copied() -> None:
    """Tokens beyond `max_shared` never enter the tree, so no prompt can copy them."""
    bench = bench_of()
    private = RadixSequence(array("i", range(10, 22)), max_shared=6)
    bench.run(private)
    bench.planner.release([private])

    sequence = sequence_of([*range(10, 21), 90])
    bench.run(sequence)

    assert (sequence.num_read, sequence.num_copied) == (4, 0)


@pytest.mark.parametrize("window", [3, 5, 9])
def test_released_pages_outside_a_window_are_no_source(window: int) -> None:
    """With windows, prompts that leave a long one anywhere get the right answer."""
    bench = bench_of(num_pages=9, window=window)
    taken = bench.cache.reserve(4)
    first = sequence_of(range(10, 40))  # 8 pages: those outside the window make room
    while first.num_uncomputed:
        bench.run(first, num_new=[3])
    bench.planner.release([first])
    assert bench.cache.stats().evictions["window"] > 0
    bench.cache.give_back(taken)
    for length in range(1, 30):
        sequence = sequence_of([*range(10, 10 + length), 90, 91])
        while sequence.num_uncomputed:
            batch = bench.plan(sequence, num_new=[6])
            bench.execute(batch, sequence)
            bench.planner.commit([sequence])
        bench.planner.release([sequence])
        bench.cache.check()
    bench.assert_nothing_leaked()
