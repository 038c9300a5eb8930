"""`RadixAttentionPlanner.ahead`: one token of a sequence, behind a plan that is not committed yet."""

import pytest

from ramify.attention.planner import RadixSequence
from ramify.errors import CacheError, OutOfPagesError
from tests.pure.planner_bench import Bench, pages_of, sequence_of


def test_a_second_plan_becomes_the_first_when_that_is_committed() -> None:
    """Its query is the token behind the planned ones, in a page of its own if theirs are full."""
    bench = Bench(page_size=4)
    sequence = sequence_of([5, 6, 7, 8])
    first = bench.plan(sequence)
    token = bench.execute(first, sequence)[0]
    assert token is not None

    ahead = bench.planner.ahead.plan([sequence])
    bench.planner.commit([sequence])
    sequence.tokens.append(token)
    bench.planner.ahead.promote([sequence])

    assert (ahead.positions.tolist(), ahead.num_cached.tolist()) == ([4], [4])
    assert ahead.slot_mapping.tolist() == [4 * pages_of(bench, sequence)[1]]
    assert ahead.block_table[0].tolist() == pages_of(bench, sequence)
    assert (sequence.num_computed, sequence.num_planned, sequence.num_ahead) == (4, 1, 0)
    assert bench.execute(ahead, sequence) != [None]
    bench.planner.commit([sequence])
    bench.planner.release([sequence])
    bench.assert_nothing_leaked()


def test_pages_are_published_while_a_second_plan_is_in_flight() -> None:
    """Whole pages of the first plan are shared at its commit, the page of the second one is not."""
    bench = Bench(page_size=1)
    sequence = sequence_of([5, 6, 7])
    token = bench.execute(bench.plan(sequence), sequence)[0]
    assert token is not None

    bench.planner.ahead.plan([sequence])
    bench.planner.commit([sequence])
    sequence.tokens.append(token)

    assert bench.cache.stats().cached_pages == 3
    assert bench.cache.stats().private_pages == 1
    assert bench.cache.match(sequence.key(4)).num_tokens == 3
    bench.planner.release([sequence])  # it ended with that token
    assert sequence.num_ahead == 0
    assert bench.cache.stats().cached_pages == 3
    bench.assert_nothing_leaked()


def test_a_chunk_of_a_prompt_is_planned_behind_the_one_before() -> None:
    """It has its pages at once, publishes them at its own commit, and can be dropped and planned again."""
    bench = Bench(page_size=2)
    prompt = sequence_of([5, 6, 7, 8, 9, 10, 11])
    bench.execute(bench.plan(prompt, num_new=[3]), prompt)

    ahead = bench.planner.ahead.plan([prompt], [3])

    assert (ahead.positions.tolist(), ahead.num_cached.tolist()) == ([3, 4, 5], [3])
    assert ahead.slot_mapping.tolist() == [
        2 * pages_of(bench, prompt)[position // 2] + position % 2 for position in (3, 4, 5)
    ]
    bench.planner.commit([prompt])
    bench.planner.ahead.promote([prompt])
    assert (prompt.num_computed, prompt.num_planned, prompt.num_ahead) == (3, 3, 0)
    assert bench.cache.stats().cached_pages == 1
    pages = pages_of(bench, prompt)
    bench.planner.ahead.undo([prompt])
    bench.execute(bench.plan(prompt, num_new=[3]), prompt)
    assert pages_of(bench, prompt) == pages
    last = bench.planner.ahead.plan([prompt], [1])
    assert last.positions.tolist() == [6]
    bench.planner.commit([prompt])
    bench.planner.ahead.promote([prompt])
    assert bench.cache.stats().cached_pages == 3
    assert bench.execute(last, prompt) != [None]
    bench.planner.commit([prompt])
    bench.planner.release([prompt])
    bench.assert_nothing_leaked()


def test_a_page_that_another_sequence_published_first_is_adopted() -> None:
    """Two equal prompts in two plans: the row of the later commit gets the tree's page under its plan."""
    bench = Bench(page_size=2)
    first, second = sequence_of([5, 6, 7], reuse=False), sequence_of([5, 6, 7], reuse=False)
    token = bench.execute(bench.plan(first), first)[0]
    bench.execute(bench.plan(second), second)
    assert token is not None
    own = pages_of(bench, second)

    ahead = bench.planner.ahead.plan([first, second])
    bench.planner.commit([first])
    bench.planner.commit([second])
    for sequence in (first, second):
        sequence.tokens.append(token)
    bench.planner.ahead.promote([first, second])

    assert ahead.block_table[1].tolist() == own  # begun with these, which nobody writes before it
    assert pages_of(bench, second) == [pages_of(bench, first)[0], own[1]]
    assert bench.execute(ahead, first, second)[0] is not None
    bench.planner.commit([first, second])
    bench.planner.release([first, second])
    bench.assert_nothing_leaked()


def test_a_second_plan_without_pages_changes_nothing() -> None:
    """OutOfPagesError comes before any page is given."""
    bench = Bench(num_pages=2, page_size=2)
    first, second = sequence_of([1, 2]), sequence_of([3])
    bench.plan(first, second)
    before = bench.state()

    with pytest.raises(OutOfPagesError):
        bench.planner.ahead.plan([first, second])

    assert bench.state() == before
    assert (first.num_ahead, second.num_ahead) == (0, 0)
    assert bench.planner.ahead.plan([second]).positions.tolist() == [1]
    bench.planner.release([first, second])
    bench.assert_nothing_leaked()


def test_what_is_not_in_flight_cannot_run_ahead() -> None:
    """A sequence without a plan, with too few tokens, with drafts, or planned ahead already is refused."""
    bench = Bench(page_size=4)
    fresh, chunked, drafted = sequence_of([1]), sequence_of([1, 2, 3]), sequence_of([7, 8])
    bench.plan(chunked, num_new=[2])
    drafted.num_draft = 1
    bench.plan(drafted)
    before = bench.state()

    for sequence, num_new in ((fresh, 1), (chunked, 2), (chunked, 0), (drafted, 1)):
        with pytest.raises(CacheError):
            bench.planner.ahead.plan([sequence], [num_new])
    other = sequence_of([9])
    bench.plan(other)
    with pytest.raises(CacheError, match="twice"):
        bench.planner.ahead.plan([other, other])
    bench.planner.ahead.plan([other])
    with pytest.raises(CacheError):
        bench.planner.ahead.plan([other])

    bench.planner.release([other])
    assert bench.state()[0] == before[0]
    bench.planner.release([chunked, drafted])
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("call", ["fork", "rollback", "plan"])
def test_a_sequence_with_a_second_plan_is_in_flight(call: str) -> None:
    """It cannot be forked, rolled back or planned before that plan is committed too."""
    bench = Bench(page_size=4)
    sequence = sequence_of([1, 2, 3])
    token = bench.execute(bench.plan(sequence), sequence)[0]
    assert token is not None
    bench.planner.ahead.plan([sequence])
    bench.planner.commit([sequence])
    sequence.tokens.append(token)

    with pytest.raises(CacheError):
        _call(bench, call, sequence)

    bench.planner.ahead.cancel([sequence])
    bench.run(sequence)
    bench.planner.release([sequence])
    bench.assert_nothing_leaked()


def _call(bench: Bench, call: str, sequence: RadixSequence) -> None:
    if call == "fork":
        bench.planner.fork(sequence)
    elif call == "rollback":
        bench.planner.rollback(sequence, 1)
    else:
        bench.planner.plan([sequence])
