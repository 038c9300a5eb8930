"""The life of a sequence: forks, rollbacks, and drafts of which a part is kept."""

from collections.abc import Callable
from itertools import permutations

import pytest

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, PrefixCache
from ramify.errors import CacheError, LeaseError, OutOfPagesError
from ramify.testing import FakeExecutor
from tests.pure.planner_bench import Bench, pages_of, sequence_of
from tests.pure.test_prefix_cache import begin, drained, key, publish, serve, state


def copy_pages(device: FakeExecutor, pairs: list[tuple[int, int]]) -> None:
    """What `KVPool.copy_pages` does, on the fake device."""
    for plane in (device._tokens, device._positions, device._chains):
        pages = plane.reshape(-1, device.page_size)
        for source, target in pairs:
            pages[target] = pages[source]


def fork(bench: Bench, one: RadixSequence) -> RadixSequence:
    twin, pairs = bench.planner.fork(one)
    copy_pages(bench.device, pairs)
    bench.cache.check()
    return twin


def started(bench: Bench, num_prompt: int, num_decoded: int = 0) -> RadixSequence:
    """A sequence whose prompt and `num_decoded` answers are computed."""
    one = sequence_of(range(100, 100 + num_prompt))
    answer = bench.run(one)[0]
    for _ in range(num_decoded):
        one.tokens.append(answer)
        answer = bench.run(one)[0]
    return one


def ceil(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


# -- forks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", range(1, 6))
@pytest.mark.parametrize("num_decoded", [0, 1, 2, 5])
def test_a_fork_shares_whole_pages_and_copies_the_page_that_is_not_full(
    page_size: int, num_decoded: int
) -> None:
    """The twin has the same tokens; one page at most is new, and none if the last page is full."""
    bench = Bench(num_pages=32, page_size=page_size)
    one = started(bench, 7, num_decoded)
    whole, partial = divmod(one.num_computed, page_size)
    private = bench.cache.stats().private_pages

    twin, pairs = bench.planner.fork(one)

    assert (twin.tokens, twin.num_computed) == (one.tokens, one.num_computed)
    assert twin.tokens is not one.tokens
    assert pages_of(bench, twin)[:whole] == pages_of(bench, one)[:whole]
    assert pairs == list(
        zip(pages_of(bench, one)[whole:], pages_of(bench, twin)[whole:], strict=True)
    )
    assert len(pairs) == (partial > 0)
    assert all(old != new for old, new in pairs)
    assert bench.cache.stats().private_pages == private + len(pairs)
    bench.planner.release([one, twin])
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7])
def test_twins_decode_on_their_own(page_size: int, share: bool) -> None:
    """Each gets the answers to its own context, whatever the others write at the same positions."""
    bench = Bench(num_pages=120, page_size=page_size, share=share)
    one = started(bench, 5, 1)
    family = [one, fork(bench, one)]
    family.append(fork(bench, family[1]))

    for step in range(2 * page_size + 3):
        for at, each in enumerate(family):
            each.tokens.append(200 + at if step else 50 + at // 2)
        bench.run(*family)  # compares every answer with that to the whole context

    writers = [page for each in family for page in each.private]
    assert len(set(writers)) == len(writers)
    bench.planner.release(family)
    bench.assert_nothing_leaked()


def test_a_twin_that_was_not_copied_would_be_seen() -> None:
    """The copy is needed: without it the twin reads slots that nobody wrote."""
    bench = Bench(num_pages=16, page_size=4)
    one = started(bench, 6)

    twin, pairs = bench.planner.fork(one)
    twin.tokens.append(1)

    assert len(pairs) == 1
    with pytest.raises(AssertionError, match="nothing"):
        bench.run(twin)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("grown", [False, True])
def test_twins_leave_in_any_order(order: tuple[int, ...], grown: bool) -> None:
    """Who stays can go on, and when all have left every page returns."""
    bench = Bench(num_pages=24, page_size=2)
    family = [started(bench, 5)]
    family += [fork(bench, family[0]), fork(bench, family[0])]
    if grown:
        for at, each in enumerate(family):
            each.tokens.extend([at, 7, 7])
        bench.run(*family)

    for place, who in enumerate(order):
        assert bench.planner.release([family[who]]) == []
        for left in order[place + 1 :]:
            family[left].tokens.append(9)
            bench.run(family[left])

    bench.assert_nothing_leaked()


def test_a_fork_after_its_original_was_released_reads_the_same_pages() -> None:
    """The twin holds its prefix itself: no pressure takes it."""
    bench = Bench(num_pages=6, page_size=2)
    one = started(bench, 6)
    twin = fork(bench, one)
    shared = pages_of(bench, twin)

    bench.planner.release([one])
    bench.warm(range(300, 306))
    with pytest.raises(OutOfPagesError):
        bench.plan(sequence_of(range(400, 408)))

    assert pages_of(bench, twin) == shared
    twin.tokens.append(3)
    bench.run(twin)


def never_planned(bench: Bench) -> RadixSequence:
    return sequence_of([1, 2])


def planned(bench: Bench) -> RadixSequence:
    one = started(bench, 3)
    one.tokens.append(4)
    bench.plan(one)
    return one


def waiting(bench: Bench) -> RadixSequence:
    """One that is committed before its leader."""
    leader, one = sequence_of(range(6)), sequence_of(range(10))
    bench.execute(bench.plan(leader, one), leader, one)
    bench.planner.commit([one])
    return one


def released(bench: Bench) -> RadixSequence:
    one = started(bench, 3)
    bench.planner.release([one])
    return one


@pytest.mark.parametrize("verb", ["fork", "rollback"])
@pytest.mark.parametrize("make", [never_planned, planned, waiting, released])
def test_only_a_committed_sequence_is_forked_or_rolled_back(
    make: Callable[[Bench], RadixSequence], verb: str
) -> None:
    """Never planned, in a plan, waiting for a leader or released: refused, nothing changed."""
    bench = Bench(num_pages=32, page_size=2)
    one = make(bench)
    before = bench.state(), one.lease, list(one.private), one.num_computed

    with pytest.raises(CacheError, match="only a sequence whose last step is committed"):
        getattr(bench.planner, verb)(one, *[0] * (verb == "rollback"))

    assert (bench.state(), one.lease, list(one.private), one.num_computed) == before


def test_a_fork_needs_a_row_and_a_page() -> None:
    """Refused for want of either, with nothing changed; with both it succeeds."""
    bench = Bench(num_pages=4, page_size=2, num_rows=2)
    one, other = started(bench, 3), sequence_of(range(50, 52))
    bench.run(other)
    before = bench.state()

    with pytest.raises(CacheError, match="no free row"):
        bench.planner.fork(one)
    assert bench.state() == before
    bench.planner.release([other])
    taken = bench.cache.reserve(2)
    before = bench.state()
    with pytest.raises(OutOfPagesError):
        bench.planner.fork(one)
    assert bench.state() == before

    bench.cache.give_back(taken)
    twin = fork(bench, one)
    bench.planner.release([one, twin])
    bench.assert_nothing_leaked()


# -- rollback ------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_prompt", "num_decoded"), [(9, 0), (3, 6), (6, 4)])
@pytest.mark.parametrize("forked", [False, True])
def test_a_sequence_is_rolled_back_to_every_length(
    page_size: int, num_prompt: int, num_decoded: int, forked: bool
) -> None:
    """It goes on with other tokens and right answers; what it had published is still found."""
    for length in range(num_prompt + num_decoded + 1):
        bench = Bench(num_pages=64, page_size=page_size)
        one = started(bench, num_prompt, num_decoded)
        twin = fork(bench, one) if forked else None
        was, whole = one.tokens[:], one.num_computed // page_size * page_size
        published = pages_of(bench, one)[: whole // page_size]

        bench.planner.rollback(one, length)
        bench.cache.check()

        kept = length if length >= whole else length // page_size * page_size
        assert one.num_computed == kept
        assert pages_of(bench, one)[: kept // page_size] == published[: kept // page_size]
        assert bench.cache.match(CacheKey([*was, 1])).num_tokens == whole
        assert not set(one.private) & set(published)
        del one.tokens[length:]
        one.tokens.extend([70, 71, 72])
        bench.run(one)
        if twin is not None:
            twin.tokens.append(8)
            bench.run(twin)
            bench.planner.release([twin])
        bench.planner.release([one])
        assert bench.cache.match(CacheKey([*was, 1])).num_tokens == whole
        bench.assert_nothing_leaked()


@pytest.mark.parametrize("wrong", [-1, 6])
def test_a_rollback_to_a_length_that_is_not_there_is_refused(wrong: int) -> None:
    """Told with both numbers; nothing changed."""
    bench = Bench(num_pages=8, page_size=2)
    one = started(bench, 5)
    before = bench.state()

    with pytest.raises(CacheError, match=f"{wrong} tokens to keep of 5 computed"):
        bench.planner.rollback(one, wrong)

    assert bench.state() == before


def test_a_rollback_to_the_same_length_changes_nothing() -> None:
    """All that was computed is kept."""
    bench = Bench(num_pages=8, page_size=2)
    one = started(bench, 5)
    before = bench.state()

    bench.planner.rollback(one, 5)

    assert bench.state() == before


# -- extend by n, keep m -------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6])
def test_ab9_a_row_has_exactly_the_pages_that_its_tokens_need(page_size: int) -> None:
    """For every length before and every number of new tokens, those of several pages too."""
    for length in range(1, 2 * page_size + 2):
        for num_new in range(1, 3 * page_size + 2):
            bench = Bench(num_pages=20, page_size=page_size)
            one = started(bench, length)
            one.tokens.extend([5] * num_new)

            bench.plan(one)

            assert len(pages_of(bench, one)) == ceil(length + num_new, page_size)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_of_n_planned_tokens_any_m_may_be_kept(page_size: int, share: bool) -> None:
    """The others are computed anew, in the same pages; nothing that was dropped is ever found."""
    for length in range(1, page_size + 2):
        for num_new in range(1, 2 * page_size + 2):
            for kept in range(num_new + 1):
                bench = Bench(num_pages=20, page_size=page_size, share=share)
                one = started(bench, length)
                one.tokens.extend(range(10, 10 + num_new))
                bench.execute(bench.plan(one), one)
                held, end = pages_of(bench, one), length + kept

                bench.planner.commit([one], [kept])
                bench.cache.check()
                assert pages_of(bench, one) == held
                dropped = one.key(len(one.tokens))
                del one.tokens[end:]
                one.tokens.extend([90, 91])
                bench.run(one)

                assert one.num_computed == end + 2
                assert len(pages_of(bench, one)) == max(len(held), ceil(end + 2, page_size))
                assert bench.cache.match(dropped).num_tokens <= end
                bench.planner.release([one])
                bench.assert_nothing_leaked()


def test_drafts_that_others_depend_on_are_kept() -> None:
    """Refused with the number of tokens, nothing changed; what nobody has attached to may go."""
    bench = Bench(num_pages=16, page_size=2)
    leader, follower = sequence_of(range(8)), sequence_of([*range(6), 9, 9])
    bench.execute(bench.plan(leader, follower), leader, follower)
    before = bench.state()

    with pytest.raises(CacheError, match="5 tokens kept, but others depend on pages"):
        bench.planner.commit([leader], [5])

    assert bench.state() == before
    bench.planner.commit([leader, follower], [6, 2])
    assert bench.cache.match(leader.key(8)).num_tokens == 6
    bench.planner.release([leader, follower])
    bench.assert_nothing_leaked()


# -- forks of leases ----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(9))
def test_a_lease_is_forked_at_every_length(num_tokens: int) -> None:
    """In the middle of a node too: whole pages, a life of its own, the original as it was."""
    cache = PrefixCache(16, 2)
    serve(cache, "ab")
    lease, private = publish(cache, "abcdefgh", *begin(cache, "abcdefgh"))
    pages = list(lease.pages)

    twin = cache.fork(lease, num_tokens)
    cache.check()

    assert twin.pages == pages[: num_tokens // 2]
    assert twin.key == key("abcdefgh"[: num_tokens // 2 * 2])
    assert lease.pages == pages
    cache.release(lease, private)
    assert cache.evict(16) == 4 - num_tokens // 2
    cache.release(twin)
    assert drained(cache)


def test_a_fork_without_a_length_has_all_of_the_lease() -> None:
    """And can grow on its own: what it publishes is a branch."""
    cache = PrefixCache(16, 2)
    lease, _ = publish(cache, "abcd", *begin(cache, "abcd"))
    twin = cache.fork(lease)

    one, _ = publish(cache, "abcdef", lease, list(cache.reserve(1)))
    other, _ = publish(cache, "abcdxy", twin, list(cache.reserve(1)))

    assert one.pages[:2] == other.pages[:2]
    assert one.pages[2] != other.pages[2]
    assert [cache.match(key(text)).num_tokens for text in ("abcdef!", "abcdxy!")] == [6, 6]
    cache.release(one)
    cache.release(other)
    assert drained(cache)


@pytest.mark.parametrize("fault", ["long", "negative", "released", "pending", "follower"])
def test_a_lease_that_cannot_be_forked_says_why(fault: str) -> None:
    """A length it does not have, a lease that is over, pages that are not computed."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    lease, private = begin(cache, "abcdefgh")
    length, told = {"long": (6, "6 tokens asked"), "negative": (-1, "-1 tokens")}.get(
        fault, (2, "not computed yet")
    )
    if fault == "released":
        cache.release(lease, private)
        told = "is not live"
    elif fault in ("pending", "follower"):
        leader = cache.announce(lease, key("abcdef"), private)
        lease = leader if fault == "pending" else cache.attach(key("abcdefx"))
    before = state(cache)

    with pytest.raises(LeaseError, match=told):
        cache.fork(lease, length)

    assert state(cache) == before
    cache.check()
