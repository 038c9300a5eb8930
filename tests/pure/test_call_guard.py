"""A cache, planner or engine refuses a second thread while another is inside, and nothing changes."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import pytest

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache import CacheKey, PrefixCache
from ramify.cache.inspection import count_pages, nodes_under, pages_by_use, top_nodes
from ramify.cache.maintenance import evict_suffix, evict_suspect_prefix, reset
from ramify.engine.core import EngineCore
from ramify.errors import ConcurrentCallError, LeaseError, OutOfPagesError, PinError
from ramify.params import SamplingParams
from tests.pure import planner_bench
from tests.pure.async_bench import AsyncBench, run
from tests.pure.engine_bench import Bench, expected
from tests.pure.threads import Pause, joined

KEY = CacheKey([1, 2, 3, 4, 5])
LONGER = CacheKey([1, 2, 3, 4, 5, 6, 7])


@contextmanager
def inside(call: Callable[[Pause], object]) -> Iterator[None]:
    """Another thread, "A", stands at the `Pause` of a call while the block runs."""
    pause = Pause()
    with joined("A", lambda: call(pause)):
        pause.wait_until_reached()
        try:
            yield
        finally:
            pause.end()


class State:
    """A cache of 8 pages of 2 tokens with a cached prefix, a pin, a lease and private pages."""

    def __init__(self) -> None:
        self.pause: Pause | None = None
        self.cache = PrefixCache(8, 2, clock=self._clock)
        lease = self.cache.acquire(KEY)
        self.cache.release(self.cache.publish(lease, KEY, self.cache.reserve(2)))
        self.pin = self.cache.pin(KEY, "me")
        self.lease = self.cache.acquire(LONGER)
        self.private = self.cache.reserve(1)

    def _clock(self) -> float:
        if self.pause is not None and threading.current_thread().name == "A":
            self.pause.reach()
        return 0.0

    def in_a_hot_call(self, pause: Pause) -> None:
        """`acquire` asks the clock, when it counts the lookup."""
        self.pause = pause
        self.cache.cancel(self.cache.acquire(LONGER))

    def in_a_cold_call(self, pause: Pause) -> None:
        count_pages(self.cache, lambda node: pause.reach())

    def release_all(self) -> None:
        self.cache.unpin(self.pin)
        self.cache.release(self.lease, self.private)


CALLS: dict[str, Callable[[State], object]] = {
    "num_available": lambda s: s.cache.num_available,
    "is_free": lambda s: s.cache.is_free(0),
    "match": lambda s: s.cache.match(KEY),
    "explain": lambda s: s.cache.explain(KEY),
    "continuation": lambda s: s.cache.continuation(s.lease, [], 1),
    "can_reserve": lambda s: s.cache.can_reserve(1),
    "can_allocate": lambda s: s.cache.can_allocate(KEY),
    "stats": lambda s: s.cache.stats(),
    "acquire": lambda s: s.cache.acquire(KEY),
    "attach": lambda s: s.cache.attach(KEY),
    "fork": lambda s: s.cache.fork(s.lease),
    "cancel": lambda s: s.cache.cancel(s.lease),
    "release": lambda s: s.cache.release(s.lease),
    "pin": lambda s: s.cache.pin(KEY, "you"),
    "unpin": lambda s: s.cache.unpin(s.pin),
    "pins": lambda s: s.cache.pins(),
    "reserve": lambda s: s.cache.reserve(1),
    "give_back": lambda s: s.cache.give_back(s.private),
    "evict": lambda s: s.cache.evict(1),
    "evict_if": lambda s: s.cache.evict_if(lambda node: True),
    "set_priority": lambda s: s.cache.set_priority(KEY, 1),
    "clear": lambda s: s.cache.clear(),
    "announce": lambda s: s.cache.announce(s.lease, LONGER, s.private),
    "publish": lambda s: s.cache.publish(s.lease, LONGER, s.private),
    "withdraw": lambda s: s.cache.withdraw(s.lease),
    "can_retract": lambda s: s.cache.can_retract(s.lease, 4),
    "retract": lambda s: s.cache.retract(s.lease, 4),
    "is_blocked": lambda s: s.cache.is_blocked(s.lease),
    "is_withdrawn": lambda s: s.cache.is_withdrawn(s.lease),
    "sharing": lambda s: s.cache.sharing([s.lease]),
    "subscribe": lambda s: s.cache.subscribe(),
    "snapshot": lambda s: s.cache.snapshot(),
    "observe_evictions": lambda s: s.cache.observe_evictions(lambda evicted: None),
    "check": lambda s: s.cache.check(),
}
FUNCTIONS: dict[str, Callable[[State], object]] = {
    "top_nodes": lambda s: top_nodes(s.cache, 1),
    "nodes_under": lambda s: nodes_under(s.cache, KEY),
    "count_pages": lambda s: count_pages(s.cache, lambda node: True),
    "pages_by_use": lambda s: pages_by_use(s.cache),
    "evict_suffix": lambda s: evict_suffix(s.cache, KEY, 2),
    "evict_suspect_prefix": lambda s: evict_suspect_prefix(s.cache, KEY),
    "reset": lambda s: reset(s.cache),
}


def test_the_table_has_every_call_of_the_cache() -> None:
    """`CALLS` names every public method and property of `PrefixCache` but `num_pages`."""
    public = {name for name in vars(PrefixCache) if not name.startswith("_")}

    assert public - {"num_pages"} == CALLS.keys()


@pytest.mark.parametrize("call", [*CALLS, *FUNCTIONS])
@pytest.mark.parametrize("where", [State.in_a_hot_call, State.in_a_cold_call])
def test_a_cache_refuses_every_call_of_a_second_thread(
    call: str, where: Callable[[State, Pause], None]
) -> None:
    """A refused call names both threads and changes nothing; afterwards it works."""
    state = State()
    before = state.cache.stats()
    attempt = {**CALLS, **FUNCTIONS}[call]

    with inside(lambda pause: where(state, pause)), pytest.raises(ConcurrentCallError) as caught:
        attempt(state)

    error = caught.value
    assert error.call.rpartition(".")[2] in (call, "continuation")
    assert error.thread == threading.current_thread().name
    if where is State.in_a_hot_call:
        assert (error.running_thread, error.running_call) == ("?", "a call of PrefixCache")
    else:
        assert (error.running_thread, error.running_call) == ("A", "count_pages()")
    assert "hold a lock" in str(error)
    assert state.cache.guard.thread == 0
    assert state.cache.stats() == before
    attempt(state)
    state.cache.check()


def test_an_object_may_go_from_thread_to_thread() -> None:
    """Calls of several threads that do not overlap are not refused."""
    cache, leases = PrefixCache(8, 2), []

    for name in ("A", "B", "A"):
        with joined(name, lambda: leases.append(cache.acquire(KEY))):
            pass
    for lease in leases:
        cache.release(lease)

    assert cache.stats().lookups == 3


def test_a_callback_may_call_back() -> None:
    """An eviction observer and a predicate may look at the cache that calls them."""
    state = State()
    cache, lookups = state.cache, list[int]()
    state.release_all()
    cache.observe_evictions(lambda evicted: lookups.append(cache.stats().lookups))

    cache.evict_if(lambda node: cache.match(KEY).num_tokens > 0, 1)
    cache.give_back(cache.reserve(8))  # evicts, in a hot method

    assert lookups == [2, 2]
    assert cache.guard.thread == 0


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_call_that_raises_lets_others_in(error: BaseException) -> None:
    """Errors and interrupts leave the guard free, from hot and cold methods and from callbacks."""
    state = State()
    cache = state.cache

    def broken(argument: object) -> NoReturn:
        raise error

    with pytest.raises(OutOfPagesError):
        cache.reserve(99)
    state.release_all()
    with pytest.raises(LeaseError):
        cache.release(state.lease)
    with pytest.raises(PinError):
        cache.unpin(state.pin)
    with pytest.raises(type(error)):
        cache.evict_if(broken)
    cache.observe_evictions(broken)
    with pytest.raises(type(error)):
        cache.reserve(8)

    with joined("B", cache.check):
        pass
    assert cache.guard.thread == 0


# -- planner and engine --------------------------------------------------------------------


def test_a_planner_refuses_every_call_of_a_second_thread() -> None:
    """While another thread is in the cache, no call of the planner changes anything."""
    bench = planner_bench.Bench()
    planner = bench.planner
    sequence = planner_bench.sequence_of(range(6))
    planner.plan([sequence])
    planner.commit([sequence])
    sequence.tokens.append(7)
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: planner.plan([sequence]),
        "commit": lambda: planner.commit([]),
        "can_append": lambda: planner.can_append(sequence),
        "can_allocate": lambda: planner.can_allocate([planner_bench.sequence_of([1])]),
        "fork": lambda: planner.fork(sequence),
        "rollback": lambda: planner.rollback(sequence, 2),
        "abandon": lambda: planner.abandon([sequence]),
        "release": lambda: planner.release([sequence]),
    }
    methods = {
        name
        for name, value in vars(RadixAttentionPlanner).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert methods == calls.keys()
    held = planner_bench.pages_of(bench, sequence)

    with inside(lambda pause: count_pages(planner.cache, lambda node: pause.reach())):
        for call in calls.values():
            with pytest.raises(ConcurrentCallError):
                call()

    assert planner_bench.pages_of(bench, sequence) == held
    planner.plan([sequence])
    planner.commit([sequence])
    planner.release([sequence])


def test_a_step_keeps_other_threads_out_of_engine_planner_and_cache() -> None:
    """While a step computes, each call of another thread is refused, and the answer is right."""
    bench, pause = Bench(), Pause()
    core, execute = bench.core, bench.device.execute

    def held(plan: Any) -> Any:
        pause.reach()
        return execute(plan)

    key = bench.add([1] * 9, max_tokens=5, ignore_eos=True)
    calls: list[Callable[[], object]] = [
        lambda: core.add_request([1], SamplingParams()),
        lambda: core.abort(key),
        lambda: core.discard_outputs([key]),
        core.step,
        core.step_or_fail_blocked,
        core.stats,
        core.cache.clear,
        lambda: core.cache.match(KEY),
        lambda: core.planner.release([]),
    ]
    bench.device.execute = held  # type: ignore[method-assign]

    with joined("A", bench.step):
        pause.wait_until_reached()
        for call in calls:
            with pytest.raises(ConcurrentCallError, match=r"'A' was in EngineCore\.step\(\)"):
                call()
        assert core.has_unfinished
        assert len(core.live) == 1
        assert not core.verify_next_hit()
        pause.end()

    bench.run()
    assert list(bench.outputs[key].token_ids) == expected([1] * 9, 5, ends=())
    assert core.recovery.counts.rebuilds == 0
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_step_that_raises_lets_others_in(error: BaseException) -> None:
    """A failed or interrupted step leaves the engine free for another thread."""
    bench = Bench(fail_at={0}, error=error)
    key = bench.add([1] * 9, max_tokens=5, ignore_eos=True)
    try:
        bench.step()
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)

    with joined("B", bench.run):
        pass

    assert list(bench.outputs[key].token_ids) == expected([1] * 9, 5, ends=())


def test_a_core_may_be_built_in_one_thread_and_run_in_another() -> None:
    """The thread that makes an engine, the ones that add requests and step may differ."""
    bench = Bench()
    assert isinstance(bench.core, EngineCore)
    with joined("A", lambda: bench.add([1] * 9, max_tokens=5, ignore_eos=True)):
        pass
    with joined("B", bench.run):
        pass

    [output] = bench.outputs.values()
    assert list(output.token_ids) == expected([1] * 9, 5, ends=())


class Ending(logging.Handler):
    """Ends a pause at the first message."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.pause, self.messages = pause, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.pause.end()


def test_an_engine_thread_outlives_a_thread_that_bypasses_it() -> None:
    """`AsyncLLM` answers although another thread is inside its core when it wants to step."""
    pause, intruder = Pause(), ExitStack()
    handler, logger = Ending(pause), logging.getLogger("ramify.engine.serving.engine_thread")

    async def main() -> None:
        bench = AsyncBench(closed=True)

        def let_in(core: EngineCore) -> None:
            inside = joined("B", lambda: count_pages(core.cache, lambda node: pause.reach()))
            intruder.enter_context(inside)
            pause.wait_until_reached()

        async with bench.llm as llm:
            stream = llm.stream([1] * 9, SamplingParams(max_tokens=5, ignore_eos=True))
            await stream.accepted()
            await bench.gate.arrive()
            entered = asyncio.ensure_future(llm.run(let_in))
            await asyncio.sleep(0)  # it is posted, for after the step
            bench.gate.open()
            await entered
            output = await stream.whole()
        assert list(output.token_ids) == expected([1] * 9, 5, ends=())
        bench.assert_nothing_left()

    logger.addHandler(handler)
    try:
        with intruder:
            run(main())
    finally:
        logger.removeHandler(handler)

    assert "EngineCore.step_or_fail_blocked() was called by thread 'ramify'" in handler.messages[0]
