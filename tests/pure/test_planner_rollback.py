"""A plan that fails at any of its calls leaves everything as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixSequence
from ramify.errors import InvalidKeyError, OutOfPagesError
from tests.pure.planner_bench import Bench, pages_of, sequence_of

STEPS = {  # the calls of `plan` that change state, and its last reads
    "cache": ("attach", "cancel", "reserve", "announce", "sharing"),
    "table": ("allocate", "append", "rewrite", "array"),
}


class Broken:
    """Forwards to `real`; raises instead of the n-th call of `steps`."""

    def __init__(self, real: Any, steps: Sequence[str], fuse: "Fuse") -> None:
        self.__dict__.update(real=real, steps=steps, fuse=fuse)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name not in self.steps:
            return value
        if callable(value):
            return self.fuse.before(value)
        self.fuse.burn()
        return value


class Fuse:
    """Counts calls down; raises `error` once, when the count reaches zero."""

    def __init__(self, left: int, error: type[BaseException]) -> None:
        self.left, self.error = left, error

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any, **options: Any) -> Any:
            self.burn()
            return call(*arguments, **options)

        return broken


class MixedBatch:
    """Cache hits, followers, a later chunk, a decode, drafts, a sequence that awaits its leader."""

    def __init__(self, share: bool = True) -> None:
        self.bench = bench = Bench(num_pages=64, page_size=2, share=share, num_rows=12)
        bench.warm(range(100, 109))
        chunk, decode = sequence_of(range(20)), sequence_of(range(30, 37))
        draft = sequence_of(range(40, 45))
        leader, waiting = sequence_of(range(50, 59)), sequence_of(range(50, 60))
        bench.run(chunk, decode, draft, num_new=[5, 7, 5])
        bench.execute(bench.plan(leader, waiting), leader, waiting)
        bench.planner.commit([waiting])  # before its leader: publishing is deferred
        for token in (1, 2, 3):  # a full page of its own, never announced
            waiting.tokens.append(token)
            bench.execute(bench.plan(waiting), waiting)
            bench.planner.commit([waiting])
        decode.tokens.append(1)
        draft.tokens.extend([1, 2, 3, 4])
        waiting.tokens.extend([1, 2, 3])
        self.apart = leader
        self.batch = [
            chunk,
            sequence_of([*range(100, 109), 7, 8, 9]),  # reads a prefix, and leads
            sequence_of([*range(100, 109), 7, 8, 9, 10, 11]),  # nested: follows
            decode,
            sequence_of([*range(100, 109), 7, 8, 9]),  # identical: follows
            draft,
            waiting,
            sequence_of(range(50, 62)),  # attaches to what the leader outside the batch computes
            sequence_of([1, 2], reuse=False),
        ]
        self.num_new = [6, 99, 99, 1, 99, 5, 3, 99, 2]

    def plan(self) -> AttentionBatch:
        return self.bench.planner.plan(self.batch, self.num_new)

    def state(self) -> tuple[object, ...]:
        """All state but the lease ids."""
        sequences = [
            (
                None
                if sequence.lease is None
                else (sequence.lease.num_tokens, list(sequence.lease.pages)),
                sequence.row,
                list(sequence.private),
                (
                    sequence.num_computed,
                    sequence.num_planned,
                    sequence.num_read,
                    sequence.num_shared,
                ),
                sequence.has_looked_up,
                self.bench.cache.match(sequence.key(len(sequence.tokens))),
            )
            for sequence in [self.apart, *self.batch]
        ]
        return self.bench.state(), sequences, len(self.bench.planner._by_lease)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("share", [True, False])
def test_a_plan_that_fails_at_any_call_changes_nothing(
    error: type[BaseException], share: bool
) -> None:
    """At each of its calls in turn: pages, pins, rows, statistics and sequences are unchanged.

    Afterwards the same batch is planned, computes the right answers and leaks nothing.
    """
    num_calls = 0
    for left in range(1, 1000):
        mixed = MixedBatch(share)
        bench, before = mixed.bench, mixed.state()
        fuse = Fuse(left, error)
        planner = bench.planner
        planner.cache = Broken(bench.cache, STEPS["cache"], fuse)  # type: ignore[assignment]
        planner.table = Broken(bench.table, STEPS["table"], fuse)  # type: ignore[assignment]

        try:
            batch = mixed.plan()
        except error:
            assert mixed.state() == before, f"failed at call {left}"
            bench.cache.check()
            batch = mixed.plan()
        num_calls = left
        planner.cache, planner.table = bench.cache, bench.table

        bench.execute(batch, *mixed.batch)
        planner.commit([*mixed.batch, mixed.apart])
        bench.execute(bench.plan(mixed.batch[0]), mixed.batch[0])
        bench.planner.release([*mixed.batch, mixed.apart])
        bench.assert_nothing_leaked()
        if fuse.left > 0:
            break

    assert num_calls > (40 if share else 20), "the batch made too few calls to mean anything"


@pytest.mark.parametrize("where", ["fresh", "chunk", "decode", "unread"])
def test_a_negative_token_is_reported_before_anything_happens(where: str) -> None:
    """Some tokenizers have negative placeholder ids: the other sequences are unchanged."""
    bench = Bench(num_pages=32, page_size=2)
    live, reader = sequence_of(range(8)), sequence_of(range(9))
    bench.run(live)
    bad = {
        "fresh": sequence_of([1, -200, 3]),
        "chunk": sequence_of([5, 6, 7, 8]),
        "decode": sequence_of([5, 6, 7, 8]),
        "unread": sequence_of([-200], reuse=False),
    }[where]
    if where in ("chunk", "decode"):
        bench.run(bad)
        bad.tokens.extend([-200, 1][: 2 if where == "chunk" else 1])
    live.tokens.append(9)
    before = bench.state()

    with pytest.raises(InvalidKeyError, match="token id -200 is negative"):
        bench.plan(live, reader, bad)

    assert bench.state() == before
    assert (live.num_computed, reader.lease) == (8, None)
    bench.run(live, reader)


def test_capacity_for_all_comes_before_eviction_for_any() -> None:
    """A batch that does not fit evicts nothing for its first sequence, which alone would fit."""
    bench = Bench(num_pages=8, page_size=2)
    for start in (10, 20, 30):
        bench.warm(range(start, start + 4))
    first, second = sequence_of(range(50, 58)), sequence_of(range(60, 70))
    cached = [sequence_of(range(start, start + 5)) for start in (10, 20, 30)]
    before = bench.state()

    with pytest.raises(OutOfPagesError, match="9 pages asked for"):
        bench.plan(first, second)

    assert bench.state() == before
    assert [bench.cache.match(sequence.key(5)).num_tokens for sequence in cached] == [4, 4, 4]
    bench.run(first)
    assert bench.cache.stats().evicted_pages == 2


def test_a_sequence_that_was_rolled_back_is_as_new() -> None:
    """After a failed plan, a fresh sequence holds no row, no lease and no page."""
    mixed = MixedBatch()
    fuse = Fuse(25, KeyboardInterrupt)
    mixed.bench.planner.cache = Broken(  # type: ignore[assignment]
        mixed.bench.cache, STEPS["cache"], fuse
    )

    with pytest.raises(KeyboardInterrupt):
        mixed.plan()

    fresh = [sequence for sequence in mixed.batch if sequence.num_computed == 0]
    new = RadixSequence(fresh[0].tokens)
    for sequence in fresh:
        assert (sequence.row, sequence.lease, sequence.private) == (new.row, new.lease, new.private)
    chunk = mixed.batch[0]
    assert (chunk.num_computed, len(pages_of(mixed.bench, chunk))) == (5, 3)
