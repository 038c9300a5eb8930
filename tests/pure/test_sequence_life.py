"""Forks, rollbacks, and commits that keep a part of the planned tokens."""

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
    """`KVPool.copy_pages` on the fake device."""
    for plane in (device._tokens, device._positions, device._chains):
        pages = plane.reshape(-1, device.page_size)
        for source, target in pairs:
            pages[target] = pages[source]


def fork(bench: Bench, sequence: RadixSequence) -> RadixSequence:
    branch, pairs = bench.planner.fork(sequence)
    copy_pages(bench.device, pairs)
    bench.cache.check()
    return branch


def started(bench: Bench, num_prompt: int, num_decoded: int = 0) -> RadixSequence:
    """A sequence whose prompt and `num_decoded` answers are computed."""
    sequence = sequence_of(range(100, 100 + num_prompt))
    answer = bench.run(sequence)[0]
    for _ in range(num_decoded):
        sequence.tokens.append(answer)
        answer = bench.run(sequence)[0]
    return sequence


def ceil(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


# -- forks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", range(1, 6))
@pytest.mark.parametrize("num_decoded", [0, 1, 2, 5])
def test_a_fork_shares_whole_pages_and_copies_the_page_that_is_not_full(
    page_size: int, num_decoded: int
) -> None:
    """The branch has the same tokens; at most one page is new, none if the last page is full."""
    bench = Bench(num_pages=32, page_size=page_size)
    sequence = started(bench, 7, num_decoded)
    whole, partial = divmod(sequence.num_computed, page_size)
    private = bench.cache.stats().private_pages

    branch, pairs = bench.planner.fork(sequence)

    assert (branch.tokens, branch.num_computed) == (sequence.tokens, sequence.num_computed)
    assert branch.tokens is not sequence.tokens
    assert pages_of(bench, branch)[:whole] == pages_of(bench, sequence)[:whole]
    assert pairs == list(
        zip(pages_of(bench, sequence)[whole:], pages_of(bench, branch)[whole:], strict=True)
    )
    assert len(pairs) == (partial > 0)
    assert all(old != new for old, new in pairs)
    assert bench.cache.stats().private_pages == private + len(pairs)
    bench.planner.release([sequence, branch])
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7])
def test_branches_decode_on_their_own(page_size: int, share: bool) -> None:
    """Each draws the tokens of its own context, whatever the others write at the same positions."""
    bench = Bench(num_pages=120, page_size=page_size, share=share)
    sequence = started(bench, 5, 1)
    family = [sequence, fork(bench, sequence)]
    family.append(fork(bench, family[1]))

    for step in range(2 * page_size + 3):
        for index, branch in enumerate(family):
            branch.tokens.append(200 + index if step else 50 + index // 2)
        bench.run(*family)  # compares every drawn token with that of the whole context

    writers = [page for branch in family for page in branch.private]
    assert len(set(writers)) == len(writers)
    bench.planner.release(family)
    bench.assert_nothing_leaked()


def test_a_branch_that_was_not_copied_would_be_seen() -> None:
    """The copy is needed: without it the branch reads slots that were never written."""
    bench = Bench(num_pages=16, page_size=4)
    sequence = started(bench, 6)

    branch, pairs = bench.planner.fork(sequence)
    branch.tokens.append(1)

    assert len(pairs) == 1
    with pytest.raises(AssertionError, match="nothing"):
        bench.run(branch)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("grown", [False, True])
def test_branches_leave_in_any_order(order: tuple[int, ...], grown: bool) -> None:
    """The remaining branches can go on, and when all have left every page is freed."""
    bench = Bench(num_pages=24, page_size=2)
    family = [started(bench, 5)]
    family += [fork(bench, family[0]), fork(bench, family[0])]
    if grown:
        for index, branch in enumerate(family):
            branch.tokens.extend([index, 7, 7])
        bench.run(*family)

    for step, released in enumerate(order):
        assert bench.planner.release([family[released]]) == []
        for remaining in order[step + 1 :]:
            family[remaining].tokens.append(9)
            bench.run(family[remaining])

    bench.assert_nothing_leaked()


def test_a_fork_after_its_original_was_released_reads_the_same_pages() -> None:
    """The branch pins its prefix itself: no demand for pages evicts it."""
    bench = Bench(num_pages=6, page_size=2)
    sequence = started(bench, 6)
    branch = fork(bench, sequence)
    shared = pages_of(bench, branch)

    bench.planner.release([sequence])
    bench.warm(range(300, 306))
    with pytest.raises(OutOfPagesError):
        bench.plan(sequence_of(range(400, 408)))

    assert pages_of(bench, branch) == shared
    branch.tokens.append(3)
    bench.run(branch)


def never_planned(bench: Bench) -> RadixSequence:
    return sequence_of([1, 2])


def planned(bench: Bench) -> RadixSequence:
    sequence = started(bench, 3)
    sequence.tokens.append(4)
    bench.plan(sequence)
    return sequence


def waiting(bench: Bench) -> RadixSequence:
    """A sequence that is committed before its leader."""
    leader, sequence = sequence_of(range(6)), sequence_of(range(10))
    bench.execute(bench.plan(leader, sequence), leader, sequence)
    bench.planner.commit([sequence])
    return sequence


def released(bench: Bench) -> RadixSequence:
    sequence = started(bench, 3)
    bench.planner.release([sequence])
    return sequence


@pytest.mark.parametrize("verb", ["fork", "rollback"])
@pytest.mark.parametrize("make", [never_planned, planned, waiting, released])
def test_only_a_committed_sequence_is_forked_or_rolled_back(
    make: Callable[[Bench], RadixSequence], verb: str
) -> None:
    """Never planned, in a plan, waiting for a leader or released: refused, nothing changed."""
    bench = Bench(num_pages=32, page_size=2)
    sequence = make(bench)
    before = bench.state(), sequence.lease, list(sequence.private), sequence.num_computed

    with pytest.raises(CacheError, match="only a sequence whose last step is committed"):
        getattr(bench.planner, verb)(sequence, *[0] * (verb == "rollback"))

    assert (bench.state(), sequence.lease, list(sequence.private), sequence.num_computed) == before


def test_a_fork_needs_a_row_and_a_page() -> None:
    """Without a row or without a page it fails and changes nothing; with both it succeeds."""
    bench = Bench(num_pages=4, page_size=2, num_rows=2)
    sequence, other = started(bench, 3), sequence_of(range(50, 52))
    bench.run(other)
    before = bench.state()

    with pytest.raises(CacheError, match="no free row"):
        bench.planner.fork(sequence)
    assert bench.state() == before
    bench.planner.release([other])
    taken = bench.cache.reserve(2)
    before = bench.state()
    with pytest.raises(OutOfPagesError):
        bench.planner.fork(sequence)
    assert bench.state() == before

    bench.cache.give_back(taken)
    branch = fork(bench, sequence)
    bench.planner.release([sequence, branch])
    bench.assert_nothing_leaked()


# -- rollback ------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_prompt", "num_decoded"), [(9, 0), (3, 6), (6, 4)])
@pytest.mark.parametrize("forked", [False, True])
def test_a_sequence_is_rolled_back_to_every_length(
    page_size: int, num_prompt: int, num_decoded: int, forked: bool
) -> None:
    """It continues with other tokens and right results; its published pages stay cached."""
    for length in range(num_prompt + num_decoded + 1):
        bench = Bench(num_pages=64, page_size=page_size)
        sequence = started(bench, num_prompt, num_decoded)
        branch = fork(bench, sequence) if forked else None
        tokens, whole = sequence.tokens[:], sequence.num_computed // page_size * page_size
        published = pages_of(bench, sequence)[: whole // page_size]

        bench.planner.rollback(sequence, length)
        bench.cache.check()

        kept = length if length >= whole else length // page_size * page_size
        assert sequence.num_computed == kept
        assert pages_of(bench, sequence)[: kept // page_size] == published[: kept // page_size]
        assert bench.cache.match(CacheKey([*tokens, 1])).num_tokens == whole
        assert not set(sequence.private) & set(published)
        del sequence.tokens[length:]
        sequence.tokens.extend([70, 71, 72])
        bench.run(sequence)
        if branch is not None:
            branch.tokens.append(8)
            bench.run(branch)
            bench.planner.release([branch])
        bench.planner.release([sequence])
        assert bench.cache.match(CacheKey([*tokens, 1])).num_tokens == whole
        bench.assert_nothing_leaked()


@pytest.mark.parametrize("wrong", [-1, 6])
def test_a_rollback_to_a_length_that_is_not_there_is_refused(wrong: int) -> None:
    """The error has both numbers; nothing changed."""
    bench = Bench(num_pages=8, page_size=2)
    sequence = started(bench, 5)
    before = bench.state()

    with pytest.raises(CacheError, match=f"{wrong} tokens to keep of 5 computed"):
        bench.planner.rollback(sequence, wrong)

    assert bench.state() == before


def test_a_rollback_to_the_same_length_changes_nothing() -> None:
    """All computed tokens are kept."""
    bench = Bench(num_pages=8, page_size=2)
    sequence = started(bench, 5)
    before = bench.state()

    bench.planner.rollback(sequence, 5)

    assert bench.state() == before


# -- extend by n, keep m -------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6])
def test_ab9_a_row_has_exactly_the_pages_that_its_tokens_need(page_size: int) -> None:
    """For every length before and every number of new tokens, up to several pages."""
    for length in range(1, 2 * page_size + 2):
        for num_new in range(1, 3 * page_size + 2):
            bench = Bench(num_pages=20, page_size=page_size)
            sequence = started(bench, length)
            sequence.tokens.extend([5] * num_new)

            bench.plan(sequence)

            assert len(pages_of(bench, sequence)) == ceil(length + num_new, page_size)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_of_n_planned_tokens_any_m_may_be_kept(page_size: int, share: bool) -> None:
    """The others are computed again in the same pages; dropped tokens never match."""
    for length in range(1, page_size + 2):
        for num_new in range(1, 2 * page_size + 2):
            for kept in range(num_new + 1):
                bench = Bench(num_pages=20, page_size=page_size, share=share)
                sequence = started(bench, length)
                sequence.tokens.extend(range(10, 10 + num_new))
                bench.execute(bench.plan(sequence), sequence)
                pages, end = pages_of(bench, sequence), length + kept

                bench.planner.commit([sequence], [kept])
                bench.cache.check()
                assert pages_of(bench, sequence) == pages
                dropped = sequence.key(len(sequence.tokens))
                del sequence.tokens[end:]
                sequence.tokens.extend([90, 91])
                bench.run(sequence)

                assert sequence.num_computed == end + 2
                assert len(pages_of(bench, sequence)) == max(len(pages), ceil(end + 2, page_size))
                assert bench.cache.match(dropped).num_tokens <= end
                bench.planner.release([sequence])
                bench.assert_nothing_leaked()


def test_drafts_that_others_depend_on_are_kept() -> None:
    """The error has the number of tokens, nothing changed; unattached drafts may be dropped."""
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
    """In the middle of a node too: full pages only; independent of the original."""
    cache = PrefixCache(16, 2)
    serve(cache, "ab")
    lease, private = publish(cache, "abcdefgh", *begin(cache, "abcdefgh"))
    pages = list(lease.pages)

    branch = cache.fork(lease, num_tokens)
    cache.check()

    assert branch.pages == pages[: num_tokens // 2]
    assert branch.key == key("abcdefgh"[: num_tokens // 2 * 2])
    assert lease.pages == pages
    cache.release(lease, private)
    assert cache.evict(16) == 4 - num_tokens // 2
    cache.release(branch)
    assert drained(cache)


def test_a_fork_without_a_length_has_all_of_the_lease() -> None:
    """It can grow independently: its published pages are a branch of the tree."""
    cache = PrefixCache(16, 2)
    lease, _ = publish(cache, "abcd", *begin(cache, "abcd"))
    branch = cache.fork(lease)

    first, _ = publish(cache, "abcdef", lease, list(cache.reserve(1)))
    second, _ = publish(cache, "abcdxy", branch, list(cache.reserve(1)))

    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert [cache.match(key(text)).num_tokens for text in ("abcdef!", "abcdxy!")] == [6, 6]
    cache.release(first)
    cache.release(second)
    assert drained(cache)


@pytest.mark.parametrize("fault", ["long", "negative", "released", "pending", "follower"])
def test_a_lease_that_cannot_be_forked_says_why(fault: str) -> None:
    """A length it does not have, a lease that has ended, pages that are not computed."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcd")
    lease, private = begin(cache, "abcdefgh")
    length, message = {"long": (6, "num_tokens=6"), "negative": (-1, "num_tokens=-1")}.get(
        fault, (2, "not computed yet")
    )
    if fault == "released":
        cache.release(lease, private)
        message = "is not live"
    elif fault in ("pending", "follower"):
        leader = cache.announce(lease, key("abcdef"), private)
        lease = leader if fault == "pending" else cache.attach(key("abcdefx"))
    before = state(cache)

    with pytest.raises(LeaseError, match=message):
        cache.fork(lease, length)

    assert state(cache) == before
    cache.check()
