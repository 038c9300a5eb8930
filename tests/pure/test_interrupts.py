"""KeyboardInterrupt at any call of planner, cache and tiers: one call makes everything consistent again."""

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ramify
from ramify.attention.repair import repair_planner
from ramify.cache import PrefixCache
from ramify.cache.maintenance import repair
from ramify.engine.tier_copies import CopiesOut
from ramify.engine.tier_parts import STAGING_BYTES, StagingArea, TierCounts, TierParts
from ramify.kv.mover_jobs import PageWrite, Probe, Removal, Result, Written
from ramify.kv.mover_lanes import MoverLanes
from ramify.kv.offload import MoverThreads
from ramify.params import SamplingParams
from ramify.step_cost import CostModel
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench
from tests.pure.test_planner_rollback import MixedBatch
from tests.pure.test_prefix_cache import begin, drained, key, publish, serve
from tests.pure.tier_bench import memory_tier

ROOT = str(Path(ramify.__file__).parent)
ENTERED = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)
# Of the points that are tried: of calls of our functions; of built-in calls and of returns.
STRIDES = {("call",): 5, ("c_call", "return", "c_return"): 61}


class Interrupt:
    """Raises KeyboardInterrupt once, at the n-th call, or return, of code of the package.

    Not in generator expressions: Python drops what is raised while one is closed.
    """

    def __init__(self, at: int, events: tuple[str, ...]) -> None:
        self.left, self.events = at, events

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<genexpr>" or not code.co_filename.startswith(ROOT):
            return
        if event in self.events:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, call: Callable[[], object]) -> bool:
        """Call it; returns whether it was interrupted."""
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def each_point(state_of: Callable[[], Any], call: Callable[[Any], object]) -> Any:
    """Yield the state after each interrupt of `call(state)`, at one point after the other."""
    for events, stride in STRIDES.items():
        at = 1
        while True:
            state, interrupt = state_of(), Interrupt(at, events)
            interrupt.during(lambda state=state: call(state))  # type: ignore[misc]
            if interrupt.left > 0:
                break
            yield state
            at += stride


# -- the planner ---------------------------------------------------------------------------


def planned() -> MixedBatch:
    """A batch that is planned and computed, but not committed."""
    mixed = MixedBatch()
    mixed.bench.execute(mixed.plan(), *mixed.batch)
    return mixed


def committed() -> MixedBatch:
    mixed = planned()
    mixed.bench.planner.commit([*mixed.batch, mixed.apart])
    return mixed


def commit(mixed: MixedBatch) -> None:
    mixed.bench.planner.commit([*mixed.batch, mixed.apart])


CALLS: dict[str, tuple[Callable[[], MixedBatch], Callable[[MixedBatch], object]]] = {
    "plan": (MixedBatch, MixedBatch.plan),
    "commit": (planned, commit),
    "abandon": (planned, lambda mixed: mixed.bench.planner.abandon(mixed.batch)),
    "release": (committed, lambda mixed: mixed.bench.planner.release(mixed.batch[:5])),
    "fork": (committed, lambda mixed: mixed.bench.planner.fork(mixed.batch[1])),
    "rollback": (committed, lambda mixed: mixed.bench.planner.rollback(mixed.batch[1], 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_repairs_a_planner(name: str) -> None:
    """After it all pages are free or cached, and the batch gets the right answers from the start."""
    state_of, call = CALLS[name]
    num_cached = []
    for mixed in each_point(state_of, call):
        bench, sequences = mixed.bench, [mixed.apart, *mixed.batch]

        repair_planner(bench.planner, sequences)

        bench.cache.check()
        stats = bench.cache.stats()
        assert (stats.private_pages, stats.num_leases) == (0, 0)
        assert bench.table.num_free_rows == 12
        num_cached.append(stats.cached_pages)
        left = [sequence for sequence in sequences if not sequence.released]
        bench.run(*left)
        bench.planner.release(sequences)
        bench.assert_nothing_leaked()
    assert len(num_cached) > 8
    assert max(num_cached) > 0


@pytest.mark.parametrize("share", [True, False])
def test_an_interrupted_plan_raises_the_interrupt(share: bool) -> None:
    """Whatever undoing it meets: no error of the bookkeeping hides the KeyboardInterrupt."""
    at = 1
    while True:
        mixed, interrupt = MixedBatch(share), Interrupt(at, ("call", "return"))
        if not interrupt.during(mixed.plan):
            break
        at += 11
    assert interrupt.left > 0
    assert at > 500


@pytest.mark.parametrize("at", [300, 700])
def test_a_repair_can_be_interrupted_and_called_again(at: int) -> None:
    """At any of its calls, after a plan that was interrupted somewhere."""

    def broken() -> MixedBatch:
        mixed = MixedBatch()
        assert Interrupt(at, ("call",)).during(mixed.plan)
        return mixed

    def repair_all(mixed: MixedBatch) -> None:
        repair_planner(mixed.bench.planner, [mixed.apart, *mixed.batch])

    for number, mixed in enumerate(each_point(broken, repair_all)):
        if number % 3:
            continue
        repair_all(mixed)
        mixed.bench.assert_nothing_leaked()


# -- the cache ------------------------------------------------------------------------------


def full_cache() -> PrefixCache:
    """Three prompts, one of them evicted in part, a pin, and a leader with a follower."""
    cache = PrefixCache(16, 2)
    serve(cache, "abcdefgh")
    serve(cache, "abcdxyzw")
    serve(cache, "mnopqr")
    cache.evict(1)
    cache.pin(key("abcd"), "operator")
    return cache


def announce_and_withdraw(cache: PrefixCache) -> None:
    lease, private = begin(cache, "abcdefXYZW")
    leader = cache.announce(lease, key("abcdefXYZW"), private)
    cache.attach(key("abcdefXYZWa"))
    cache.retract(cache.fork(cache.acquire(key("abcdx"))), 2)
    cache.withdraw(leader)


CACHE_CALLS: dict[str, Callable[[PrefixCache], object]] = {
    "serve": lambda cache: serve(cache, "abcdefXYZW"),
    "evict": lambda cache: cache.evict(5),
    "reserve": lambda cache: cache.reserve(12),
    "publish": lambda cache: publish(cache, "abXYZWab", *begin(cache, "abXYZWab")),
    "announce": announce_and_withdraw,
    "pin": lambda cache: cache.unpin(cache.pin(key("mn"), "other")),
    "clear": lambda cache: cache.clear(),
}


@pytest.mark.parametrize("name", CACHE_CALLS)
def test_one_call_repairs_a_cache(name: str) -> None:
    """No lease but the pin's, no private page; a cache that is whole keeps what was published."""
    kept = 0
    for cache in each_point(full_cache, CACHE_CALLS[name]):
        num_lost = repair(cache)

        cache.check()
        stats = cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        assert len(cache.pins("operator")) == 1 - num_lost
        kept += cache.match(key("abcde")).num_tokens == 4
        serve(cache, "abcdefgh")
        assert cache.match(key("abcdefghi")).num_tokens == 8
        for pin in cache.pins():
            cache.unpin(pin)
        assert drained(cache)
    assert kept > 0


def test_a_repair_of_a_whole_cache_changes_nothing_that_is_cached() -> None:
    """It ends a lease that was lost, its private pages and what it announced."""
    cache = full_cache()
    num_cached, pins = cache.stats().cached_pages, cache.pins()
    lease, private = begin(cache, "abcdefXYZW")
    cache.announce(lease, key("abcdefXYZW"), private)

    assert repair(cache) == 0

    assert (cache.stats().cached_pages, cache.pins()) == (num_cached, pins)
    assert cache.stats().private_pages == 0


# -- copies to the tiers ---------------------------------------------------------------------


@dataclass
class Copies:
    """Evicted pages that a disk and a store beyond a network lack, with the threads of both."""

    out: CopiesOut
    parts: TierParts
    area: StagingArea
    mover: MoverLanes
    counts: TierCounts

    @classmethod
    def of_evicted_pages(cls) -> "Copies":
        device, cache = FakeExecutor(16, 2), PrefixCache(16, 2)
        stores = [memory_tier(name, 64, device.page_bytes) for name in ("disk", "remote")]
        mover, counts = MoverLanes(stores, ["remote"]), TierCounts()
        parts = TierParts(
            device=device,
            stores=tuple(stores),
            mover=mover,
            step_model=CostModel(step_s=0.0, token_s=1.0, read_s=0.0),
            distant="remote",
        )
        area = StagingArea(device.page_bytes, STAGING_BYTES)
        copies = cls(CopiesOut(cache, counts), parts, area, mover, counts)
        copies.out.begin(parts, area)
        serve(cache, "abcdefgh")
        serve(cache, "mnopqr")
        with copies.out.queue.demoting():
            cache.evict(5)
        return copies

    def settle(self) -> None:
        """Take the results of all writes; fails if a buffer stays in use."""
        self.out.take_lazy(0)  # what an idle engine does as well
        while self.area.ledger.num_in_use:
            assert self.mover.wait(5.0), "a buffer is lost"
            for result in self.mover.take_results():
                assert isinstance(result, Written)
                self.out.ended(result)
        self.area.ledger.check([])
        assert self.mover.close(5.0)


def test_no_staging_buffer_is_lost_to_an_interrupt() -> None:
    """Wherever the hand-over to the writers stops; a copy that was made is written all the same."""
    num_written = []
    for copies in each_point(Copies.of_evicted_pages, lambda copies: copies.out.take_evicted()):
        copies.settle()

        num_written.append(sum(copies.counts.written.values()))
        assert num_written[-1] <= copies.counts.queued

    assert len(num_written) > 20
    assert min(num_written) == 0
    assert max(num_written) == 10


def test_a_removal_comes_after_copies_that_interrupts_have_kept_back() -> None:
    """Both hand-overs of a call are interrupted: pages that are then removed are in no store."""
    copies = Copies.of_evicted_pages()
    mover, num_calls = copies.mover, 0

    class Interrupted:
        """The mover, whose first two writes are interrupted before they take a page."""

        def write(self, waiting: deque[PageWrite]) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls <= 2:
                raise KeyboardInterrupt
            mover.write(waiting)

    copies.out.begin(replace(copies.parts, mover=Interrupted()), copies.area)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        copies.out.take_evicted()
    assert copies.counts.queued == 10

    copies.out.removed(None)
    mover.remove(Removal(None))
    copies.out.take_lazy(0)

    results: list[Result] = []
    while len(results) < 11:  # ten writes, and the removal
        assert mover.wait(5.0)
        results += mover.take_results()
    assert [store.counts().num_pages for store in copies.parts.stores] == [0, 0]
    assert mover.close(5.0)


LOCKED_CALLS: dict[str, Callable[[MoverThreads], object]] = {
    "write": lambda mover: mover.write(deque()),
    "remove": lambda mover: mover.remove(Removal(None)),
    "read": lambda mover: mover.read(Probe("disk", 0.0)),
    "take a result": lambda mover: mover.wait(0.0),
    "close": lambda mover: mover.begin_close(),
}


@pytest.mark.parametrize("name", LOCKED_CALLS)
def test_an_interrupt_leaves_no_lock_of_the_mover_held(name: str) -> None:
    """Also one between the lock and the code under it: threads would wait for ever, and so would `close`."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" and frame.f_code in ENTERED:
            sys.setprofile(None)
            raise KeyboardInterrupt

    mover = MoverThreads([memory_tier("disk", 4, 64)])
    sys.setprofile(interrupt)
    with suppress(KeyboardInterrupt):
        LOCKED_CALLS[name](mover)
    sys.setprofile(None)
    closing = threading.Thread(target=mover.close, args=(5.0,), daemon=True)
    closing.start()
    closing.join(5.0)

    assert not closing.is_alive(), "the lock is held"


# -- the outputs of a request ----------------------------------------------------------------


def test_an_interrupted_emission_loses_no_token_and_no_end() -> None:
    """Wherever a request's last step is interrupted, its tokens are emitted once, and so is its end."""
    at = 1
    while True:
        bench = Bench()
        request_id = bench.core.add_request([1, 2, 3], SamplingParams(max_tokens=2, stop=["never"]))
        outputs, interrupt = list(bench.core.step()), Interrupt(at, ("call",))
        interrupt.during(lambda bench=bench, outputs=outputs: outputs.extend(bench.core.step()))  # type: ignore[misc]
        while bench.core.has_unfinished:
            outputs += bench.core.step()

        [end] = [output.output for output in outputs if output.output is not None]
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert end.request_id == request_id and tuple(tokens) == end.completions[0].token_ids
        assert "".join(output.text for output in outputs) == end.completions[0].text
        if interrupt.left > 0:
            break
        at += 1
