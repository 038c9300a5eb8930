"""The planner after the forward pass: commit, abandon and release."""

import pytest

from ramify.cache import CacheKey
from ramify.errors import CacheError, OutOfPagesError
from tests.pure.planner_bench import Bench, pages_of, sequence_of

# -- commit ----------------------------------------------------------------------------------


def test_duplicates_are_replaced_by_the_canonical_pages() -> None:
    """PB21: two equal prompts computed apart: neither holds a page that was freed."""
    bench = Bench(num_pages=16, page_size=2)
    first, second = sequence_of(range(9), reuse=False), sequence_of(range(9), reuse=False)
    bench.execute(bench.plan(first, second), first, second)

    bench.planner.commit([first, second])
    third = sequence_of(range(30, 41))
    bench.run(third)

    assert pages_of(bench, first)[:4] == pages_of(bench, second)[:4]
    assert not set(pages_of(bench, third)) & {*pages_of(bench, first), *pages_of(bench, second)}
    for sequence in (first, second):
        sequence.tokens.append(1)
    bench.run(first, second)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
@pytest.mark.parametrize("together", [True, False])
def test_commit_may_come_in_any_order(order: list[int], together: bool) -> None:
    """A follower may be committed before its leader: it is published with the leader."""
    bench = Bench(num_pages=32, page_size=2)
    batch = [sequence_of(range(5)), sequence_of(range(9)), sequence_of(range(13))]
    bench.execute(bench.plan(*batch), *batch)
    key = sequence_of(range(14)).key(14)

    if together:
        bench.planner.commit([batch[index] for index in order])
    else:
        for index in order:
            bench.planner.commit([batch[index]])
            bench.cache.check()

    assert bench.cache.match(key).num_tokens == 12
    for sequence in batch:
        sequence.tokens.append(90)
    bench.run(*batch)
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


def test_a_commit_of_the_leader_leaves_what_a_followers_next_step_reads() -> None:
    """A follower was planned again before its leader's commit: that batch has its pages."""
    bench = Bench(num_pages=24, page_size=4)
    leader, *followers = (
        sequence_of([1, 2, 3, 4, 9, 9]),
        sequence_of(range(1, 6)),
        sequence_of(range(1, 6)),
    )
    batch = [leader, *followers]
    bench.execute(bench.plan(*batch), *batch)
    for token in (6, 7, 8):
        bench.planner.commit(followers)
        for sequence in followers:
            sequence.tokens.append(token)
        bench.execute(bench.plan(*followers), *followers)
    bench.planner.commit(followers)
    late = followers[1]
    late.tokens.append(11)
    plan = bench.plan(late)
    read = plan.block_table[0].tolist()[:3]

    bench.planner.commit([leader])

    assert not any(bench.cache.is_free(page) for page in read)
    assert pages_of(bench, late)[:3] == read
    bench.execute(plan, late)
    bench.planner.commit([late])
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


def test_leases_of_others_on_announced_pages_are_theirs_to_end() -> None:
    """A lease from outside the planner on pages that are withdrawn: its owner releases it."""
    bench = Bench(num_pages=12, page_size=2)
    sequence = sequence_of(range(7))
    bench.plan(sequence)
    lease = bench.cache.attach(CacheKey(range(6)))

    bench.planner.release([sequence])

    assert bench.cache.is_withdrawn(lease)
    bench.cache.release(lease)
    bench.assert_nothing_leaked()


def test_a_follower_committed_early_is_not_matched_early() -> None:
    """Its pages follow unpublished pages: no match sees them before the leader's commit."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower = sequence_of(range(6)), sequence_of(range(12))
    bench.execute(bench.plan(leader, follower), leader, follower)

    bench.planner.commit([follower])
    assert bench.cache.match(sequence_of(range(13)).key(13)).num_tokens == 0
    bench.planner.commit([leader])

    assert bench.cache.match(sequence_of(range(13)).key(13)).num_tokens == 12


@pytest.mark.parametrize("grown", [1, 7])
def test_a_follower_committed_early_may_go_on(grown: int) -> None:
    """It appends and is planned again while its leader is still to be committed."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower = sequence_of(range(6)), sequence_of(range(12))
    bench.execute(bench.plan(leader, follower), leader, follower)
    bench.planner.commit([follower])
    follower.tokens.extend(range(40, 40 + grown))
    batch = bench.plan(follower)

    bench.planner.commit([leader])
    bench.execute(batch, follower)
    bench.planner.commit([follower])

    match = bench.cache.match(sequence_of([*follower.tokens, 1]).key(len(follower.tokens) + 1))
    assert match.num_tokens == len(follower.tokens) // 2 * 2
    bench.planner.release([leader, follower])
    bench.assert_nothing_leaked()


def test_a_chain_committed_backwards_is_published_by_its_first_leader() -> None:
    """Also if the middle sequence was planned again, after the one that follows it."""
    bench = Bench(num_pages=32, page_size=2)
    leader, middle, last = sequence_of(range(6)), sequence_of(range(10)), sequence_of(range(14))
    batch = [leader, middle, last]
    bench.execute(bench.plan(*batch), *batch)
    bench.planner.commit([last])
    bench.planner.commit([middle])
    middle.tokens.append(99)
    bench.execute(bench.plan(middle), middle)
    bench.planner.commit([middle])

    bench.planner.commit([leader])

    assert bench.cache.match(sequence_of(range(15)).key(15)).num_tokens == 14
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


def test_only_what_was_kept_counts() -> None:
    """The first m tokens of a chunk may be kept; announced pages beyond are withdrawn."""
    bench = Bench(num_pages=16, page_size=4)
    sequence = sequence_of(range(7))
    bench.execute(bench.plan(sequence), sequence)
    state = bench.state()

    for wrong in (-1, 8):
        with pytest.raises(CacheError, match="kept of 7"):
            bench.planner.commit([sequence], kept=[wrong])
    assert bench.state() == state

    bench.planner.commit([sequence], kept=[3])
    assert bench.planner.cache.match(CacheKey(range(7))).num_tokens == 0
    del sequence.tokens[3:]
    sequence.tokens.extend([60, 61, 62, 63])
    bench.run(sequence)

    assert sequence.num_computed == 7
    assert len(pages_of(bench, sequence)) == 2


def test_pages_on_which_others_depend_are_kept() -> None:
    """A draft that another sequence has attached to cannot be taken back: nothing changes."""
    bench = Bench(num_pages=16, page_size=4)
    sequence, other = sequence_of(range(7)), sequence_of([*range(4), 9])
    bench.execute(bench.plan(sequence, other), sequence, other)
    state = bench.state()

    with pytest.raises(CacheError, match="others depend"):
        bench.planner.commit([sequence], kept=[3])

    assert bench.state() == state


def test_nothing_is_committed_twice() -> None:
    """Without a plan there is nothing to commit, and a sequence may be named once."""
    bench = Bench(page_size=4)
    sequence, other = sequence_of(range(6)), sequence_of(range(6))

    with pytest.raises(CacheError):
        bench.planner.commit([sequence])
    bench.execute(bench.plan(sequence), sequence)
    with pytest.raises(CacheError, match="twice"):
        bench.planner.commit([sequence, sequence])
    with pytest.raises(CacheError):
        bench.planner.commit([sequence, other])
    assert (sequence.num_computed, sequence.num_planned) == (0, 6)
    bench.planner.commit([sequence])
    with pytest.raises(CacheError):
        bench.planner.commit([sequence])

    assert sequence.num_computed == 6


@pytest.mark.parametrize("page_size", range(1, 17))
def test_decoding_takes_a_page_when_it_needs_one(page_size: int) -> None:
    """While tokens are appended singly, the row has ceil(length / page_size) pages."""
    bench = Bench(num_pages=64, page_size=page_size)
    first, second = sequence_of([3, 1, 4]), sequence_of([3, 1, 4])

    for _ in range(2 * page_size + 5):
        for answer, sequence in zip(bench.run(first, second), (first, second), strict=True):
            assert len(pages_of(bench, sequence)) == -(-len(sequence.tokens) // page_size)
            sequence.tokens.append(answer)

    assert first.tokens == second.tokens
    bench.planner.release([first, second])
    match = bench.cache.match(first.key(len(first.tokens)))
    assert match.num_tokens == (len(first.tokens) - 1) // page_size * page_size
    bench.assert_nothing_leaked()


def test_a_prefix_in_use_is_never_evicted() -> None:
    """After commit the pages of a live sequence stay, whatever else is planned."""
    bench = Bench(num_pages=8, page_size=2)
    live = sequence_of(range(6))
    bench.run(live)

    for start in range(100, 200, 20):
        bench.warm(range(start, start + 8))
    live.tokens.append(9)
    bench.run(live)

    with pytest.raises(OutOfPagesError):
        bench.plan(sequence_of(range(300, 312)))


# -- abandon and release ---------------------------------------------------------------------


def test_a_failed_step_resets_every_sequence_that_depended_on_it() -> None:
    """Abandoning a leader resets its followers, but not an unrelated sequence."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower, beside = (
        sequence_of(range(8)),
        sequence_of(range(8)),
        sequence_of(range(50, 58)),
    )
    batch = [leader, follower, beside]
    bench.execute(bench.plan(*batch), *batch)

    reset = bench.planner.abandon([leader])

    bench.cache.check()
    assert reset == [leader, follower]
    for sequence in reset:
        assert (sequence.row, sequence.lease, sequence.num_computed, sequence.num_planned) == (
            None,
            None,
            0,
            0,
        )
        assert (sequence.num_read, sequence.num_shared) == (0, 0)
    assert bench.cache.match(sequence_of(range(9)).key(9)).num_tokens == 0
    bench.planner.commit([beside])
    bench.run(follower, leader)
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


def test_a_failed_chunk_keeps_the_chunks_before_it() -> None:
    """Pages published by earlier steps stay cached when a later chunk fails."""
    bench = Bench(num_pages=32, page_size=2)
    sequence = sequence_of(range(12))
    bench.run(sequence, num_new=[6])
    bench.execute(bench.plan(sequence, num_new=[4]), sequence)

    bench.planner.abandon([sequence])
    bench.run(sequence)

    assert sequence.num_read == 6
    assert bench.device.num_computed_tokens == 6 + 4 + 6


def test_releasing_a_leader_in_flight_returns_its_followers() -> None:
    """They hold no pages and can be planned again; the leader cannot."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower = sequence_of(range(8)), sequence_of(range(8))
    bench.plan(leader, follower)

    assert bench.planner.release([leader]) == [follower]
    assert bench.planner.release([leader]) == []

    bench.run(follower)
    with pytest.raises(CacheError, match="was released"):
        bench.plan(leader)
    assert bench.planner.release([follower]) == []
    bench.assert_nothing_leaked()


def test_releasing_a_follower_changes_no_other_sequence() -> None:
    """Its own pages are freed; the leader's stay and are published."""
    bench = Bench(num_pages=32, page_size=2)
    leader, follower = sequence_of(range(8)), sequence_of(range(12))
    bench.execute(bench.plan(leader, follower), leader, follower)

    assert bench.planner.release([follower]) == []
    bench.planner.commit([leader])

    assert bench.cache.match(sequence_of(range(13)).key(13)).num_tokens == 8
    bench.planner.release([leader])
    bench.assert_nothing_leaked()


def test_releasing_a_sequence_that_was_committed_before_its_leader() -> None:
    """Its followers are reset, its leader goes on, and no page leaks."""
    bench = Bench(num_pages=32, page_size=2)
    leader, middle, last = sequence_of(range(6)), sequence_of(range(10)), sequence_of(range(14))
    batch = [leader, middle, last]
    bench.execute(bench.plan(*batch), *batch)
    bench.planner.commit([middle])

    assert bench.planner.release([middle]) == [last]

    bench.cache.check()
    bench.planner.commit([leader])
    bench.run(last)
    bench.planner.release(batch)
    bench.assert_nothing_leaked()


def test_release_keeps_what_was_computed_warm() -> None:
    """Full computed pages stay cached; the partial page and planned pages are freed."""
    bench = Bench(num_pages=32, page_size=4)
    sequence = sequence_of(range(11))
    bench.run(sequence)
    sequence.tokens.extend(range(40, 50))
    bench.plan(sequence)

    bench.planner.release([sequence])

    assert bench.cache.match(sequence_of(range(12)).key(12)).num_tokens == 8
    assert bench.cache.stats().free_pages == 30
    bench.assert_nothing_leaked()


def test_a_released_sequence_that_was_never_planned_stays_released() -> None:
    """Release before the first plan ends it too."""
    bench = Bench()
    sequence = sequence_of([1, 2, 3])

    bench.planner.release([sequence])

    with pytest.raises(CacheError, match="was released"):
        bench.plan(sequence)
    bench.assert_nothing_leaked()
