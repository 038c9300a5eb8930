"""A plan that breaks off at any of its steps leaves everything as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixSequence
from ramify.errors import InvalidKeyError, OutOfPagesError
from tests.pure.planner_bench import Bench, pages_of, sequence_of

STEPS = {  # everything that `plan` changes, and what it reads last
    "cache": ("attach", "cancel", "reserve", "announce", "sharing"),
    "table": ("allocate", "append", "rewrite", "array"),
}


class Broken:
    """Passes everything on to `real`, and breaks off before the n-th of `steps`."""

    def __init__(self, real: Any, steps: Sequence[str], fuse: "Fuse") -> None:
        self.__dict__.update(real=real, steps=steps, fuse=fuse)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if name not in self.steps:
            return found
        if callable(found):
            return self.fuse.before(found)
        self.fuse.burn()
        return found


class Fuse:
    """Counts calls down; raises `error` once, instead of the call at which it reaches zero."""

    def __init__(self, left: int, error: type[BaseException]) -> None:
        self.left, self.error = left, error

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any) -> Any:
            self.burn()
            return call(*arguments)

        return broken


class Lot:
    """A batch of everything: readers, followers, later chunks, decode, drafts, waiting ones."""

    def __init__(self, share: bool = True) -> None:
        self.bench = bench = Bench(num_pages=64, page_size=2, share=share, num_rows=12)
        bench.warm(range(100, 109))
        chunk, decode = sequence_of(range(20)), sequence_of(range(30, 37))
        draft = sequence_of(range(40, 45))
        leader, waiting = sequence_of(range(50, 59)), sequence_of(range(50, 60))
        bench.run(chunk, decode, draft, num_new=[5, 7, 5])
        bench.execute(bench.plan(leader, waiting), leader, waiting)
        bench.planner.commit([waiting])  # before its leader: what it publishes is deferred
        for token in (1, 2, 3):  # a whole page of its own, which was never announced
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
        """Everything but the numbers of leases."""
        held = [
            (
                None if one.lease is None else (one.lease.num_tokens, list(one.lease.pages)),
                one.row,
                list(one.private),
                (one.num_computed, one.num_planned, one.num_read, one.num_shared),
                self.bench.cache.match(one.key(len(one.tokens))),
            )
            for one in [self.apart, *self.batch]
        ]
        return self.bench.state(), held, len(self.bench.planner._by_lease)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("share", [True, False])
def test_whatever_breaks_off_a_plan_changes_nothing(
    error: type[BaseException], share: bool
) -> None:
    """At each call that it makes, in turn: pages, pins, rows, statistics and sequences are kept.

    Afterwards the same batch is planned, computes the right answers and leaks nothing.
    """
    num_calls = 0
    for left in range(1, 1000):
        lot = Lot(share)
        bench, before = lot.bench, lot.state()
        fuse = Fuse(left, error)
        planner = bench.planner
        planner.cache = Broken(bench.cache, STEPS["cache"], fuse)  # type: ignore[assignment]
        planner.table = Broken(bench.table, STEPS["table"], fuse)  # type: ignore[assignment]

        try:
            batch = lot.plan()
        except error:
            assert lot.state() == before, f"broken off at call {left}"
            bench.cache.check()
            batch = lot.plan()
        num_calls = left
        planner.cache, planner.table = bench.cache, bench.table

        bench.execute(batch, *lot.batch)
        planner.commit([*lot.batch, lot.apart])
        bench.execute(bench.plan(lot.batch[0]), lot.batch[0])
        bench.planner.release([*lot.batch, lot.apart])
        bench.assert_nothing_leaked()
        if fuse.left > 0:
            break

    assert num_calls > (40 if share else 20), "the batch made too few calls to mean anything"


@pytest.mark.parametrize("where", ["fresh", "chunk", "decode", "unread"])
def test_a_token_that_is_none_is_told_before_anything_happens(where: str) -> None:
    """A negative id, as placeholders are in some tokenizers: the others keep what they have."""
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
    """What cannot fit as a whole evicts nothing for its first sequence, which alone would fit."""
    bench = Bench(num_pages=8, page_size=2)
    for start in (10, 20, 30):
        bench.warm(range(start, start + 4))
    first, second = sequence_of(range(50, 58)), sequence_of(range(60, 70))
    kept = [sequence_of(range(start, start + 5)) for start in (10, 20, 30)]
    before = bench.state()

    with pytest.raises(OutOfPagesError, match="9 pages asked for"):
        bench.plan(first, second)

    assert bench.state() == before
    assert [bench.cache.match(one.key(5)).num_tokens for one in kept] == [4, 4, 4]
    bench.run(first)
    assert bench.cache.stats().evicted_pages == 2


def test_a_sequence_that_was_put_back_is_as_new() -> None:
    """After a plan that broke off, a sequence holds no row, no lease and no page."""
    lot = Lot()
    fuse = Fuse(25, KeyboardInterrupt)
    lot.bench.planner.cache = Broken(  # type: ignore[assignment]
        lot.bench.cache, STEPS["cache"], fuse
    )

    with pytest.raises(KeyboardInterrupt):
        lot.plan()

    fresh = [one for one in lot.batch if one.num_computed == 0]
    new = RadixSequence(fresh[0].tokens)
    for one in fresh:
        assert (one.row, one.lease, one.private) == (new.row, new.lease, new.private)
    chunk = lot.batch[0]
    assert (chunk.num_computed, len(pages_of(lot.bench, chunk))) == (5, 3)
