"""A request is one lookup in the statistics, however often it is admitted."""

import pytest

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheStats, PrefixCache
from ramify.cache.inspection import top_nodes
from tests.pure import planner_bench
from tests.pure.engine_bench import Bench
from tests.pure.test_prefix_cache import key, serve


def lookups(stats: CacheStats) -> tuple[int, int, int]:
    return stats.lookups, stats.lookup_tokens, stats.hit_tokens


def hits(cache: PrefixCache) -> list[int]:
    return [node.hits for node in top_nodes(cache, 10).nodes]


def test_ab23_preempted_requests_are_one_lookup_each() -> None:
    """12 cold prompts that share nothing and preempt one another: 12 lookups, hit rate 0."""
    bench = Bench(128, 4, max_batch_tokens=64)
    prompts = [[1 + at, *range(2, 13)] for at in range(12)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=20, ignore_eos=True)

    bench.run()

    stats = bench.core.stats()
    assert stats.num_preemptions
    assert lookups(stats.cache) == (12, 12 * 12, 0)
    assert stats.cache.hit_rate == stats.cache.recent_hit_rate == stats.cache.ideal_hit_rate == 0
    assert sum(stats.cache.reuse_gap.counts) == 0


def test_failed_steps_count_no_lookup_again() -> None:
    """A request whose first and third forward pass fail is computed again, and is one lookup."""
    bench = Bench(128, 4, fail_at=(0, 2))
    bench.add(range(1, 20), max_tokens=6, ignore_eos=True)

    bench.run()

    stats = bench.core.stats()
    assert stats.failures.failed_steps == 2
    assert lookups(stats.cache) == (1, 19, 0)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_the_answers_of_a_prompt_are_one_lookup(max_num_seqs: int) -> None:
    """With n = 4 the prompt is looked up once, whether or not there are rows to fork it at once."""
    bench = Bench(256, 4, max_num_seqs=max_num_seqs)
    bench.add(range(1, 20), max_tokens=6, ignore_eos=True, n=4)

    bench.run()

    assert lookups(bench.core.stats().cache) == (1, 19, 0)


def test_a_sequence_planned_again_is_one_lookup() -> None:
    """After `abandon`, and in a fork that was abandoned, the same sequence counts nothing more."""
    bench = planner_bench.Bench()
    sequence = RadixSequence(range(1, 11))  # type: ignore[arg-type]
    bench.plan(sequence)
    bench.planner.abandon([sequence])
    bench.plan(sequence)
    bench.planner.commit([sequence])
    fork, _ = bench.planner.fork(sequence)
    fork.tokens.append(11)
    bench.plan(fork)
    bench.planner.abandon([fork])
    bench.plan(fork)

    assert lookups(bench.cache.stats()) == (1, 10, 0)
    assert fork.num_read == 8
    bench.planner.release([sequence, fork])
    bench.cache.check()


def test_a_plan_that_failed_counts_nothing() -> None:
    """The lookup of a sequence that did not fit is counted when it is planned, not before."""
    bench = planner_bench.Bench(num_pages=4)
    large, small = (RadixSequence(range(100 * n, 100 * n + 9)) for n in (1, 2))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="pages"):
        bench.planner.plan([large, small])
    assert lookups(bench.cache.stats()) == (0, 0, 0)

    bench.plan(large)

    assert lookups(bench.cache.stats()) == (1, 9, 0)


def test_attach_again_pins_without_a_lookup() -> None:
    """It hits what `attach` hits; statistics, node hits and the ghosts' gaps stay as they are."""
    cache = PrefixCache(8, 2)
    serve(cache, "abcdef")
    before, hits_before = cache.stats(), hits(cache)

    lease = cache.attach(key("abcdefgh"), again=True)
    hits_during = hits(cache)
    cache.cancel(lease)
    cache.release(cache.attach(key("abcdefgh"), again=True))

    assert lease.num_tokens == 6
    assert hits_during == hits(cache) == hits_before
    assert cache.stats() == before
    cache.check()
