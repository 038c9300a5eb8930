"""Several threads on one `LLM`: whole calls wait for each other, loops of two threads are refused."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.cache_admin.warmup import WarmPrompt
from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import ConcurrentCallError, RamifyError, UnknownRequestError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.pure.engine_bench import Bench, expected
from tests.pure.threads import Pause, joined

PROMPT, OTHER = [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 7, 7, 7]
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
ANSWER, OTHER_ANSWER = (expected(prompt, 4, ends=()) for prompt in (PROMPT, OTHER))


class Held(FakeExecutor):
    """An executor that a test may hold up in its next step."""

    pause: Pause | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        pause, self.pause = self.pause, None
        if pause is not None:
            pause.reach()
        return super().execute(plan)


def made(**options: Any) -> tuple[LLM, Bench, Held]:
    """An `LLM` over a bench, and the device under it."""
    bench = Bench(**options)
    bench.device.__class__ = Held
    assert isinstance(bench.device, Held)
    return LLM.from_core(bench.core), bench, bench.device


def answer(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    [output] = llm.generate(prompt, FOUR)
    assert output.error is None
    return list(output.token_ids)


def loop(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    """Answer a prompt by `add_request`, `step` and `take_output`."""
    request = llm.add_request(prompt, FOUR)
    while llm.has_unfinished():
        llm.step()
    return list(llm.take_output(request).token_ids)


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: answer(llm, OTHER),
    "stats": lambda llm: llm.stats(),
    "run": lambda llm: llm.run(lambda core: core.cache.check()),
    "verify_hits": lambda llm: llm.verify_hits(),
    "cache.stats": lambda llm: llm.cache.stats(),
    "cache.check": lambda llm: llm.cache.check(),
    "cache.explain": lambda llm: llm.cache.explain(PROMPT),
    "cache.pin": lambda llm: llm.cache.unpin(llm.cache.pin(PROMPT)),
    "cache.pins": lambda llm: llm.cache.pins(),
    "cache.tree": lambda llm: llm.cache.tree(),
    "cache.clear": lambda llm: llm.cache.clear(),
    "cache.warm": lambda llm: llm.cache.warm([WarmPrompt(OTHER)]),
    "cache.share": lambda llm: llm.cache.share([WarmPrompt(OTHER)]),
    "session": lambda llm: llm.session(OTHER, pin=True).generate(FOUR),
    "loop": lambda llm: loop(llm, OTHER),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_until_the_running_one_has_ended(name: str) -> None:
    """A call that comes while another thread generates begins after its answer; both are right."""
    llm, bench, device = made()
    answer(llm)  # something is cached
    device.pause = pause = Pause()
    ends: list[str] = []

    def first() -> None:
        assert answer(llm) == ANSWER
        ends.append("first")

    def second() -> None:
        CALLS[name](llm)
        ends.append("second")

    with joined("A", first):
        pause.wait_until_reached()
        with joined("B", second):
            pause.end()

    assert ends == ["first", "second"]
    assert bench.core.recovery.counts.rebuilds == 0
    assert answer(llm, OTHER) == OTHER_ANSWER
    bench.core.cache.check()
    assert bench.core.guard.thread == 0


@pytest.mark.parametrize("_", range(20))
def test_calls_are_served_in_the_order_in_which_they_came(_: int) -> None:
    """A thread that calls again and again does not overtake those that wait."""
    llm, _bench, device = made()
    device.pause = pause = Pause()
    served: list[str] = []

    def work(name: str, count: int) -> None:
        for _ in range(count):
            llm.generate(PROMPT, FOUR, on_finished=lambda output: served.append(name))

    def until_one_more_waits(before: Any) -> Any:
        while llm.turns._last is before:
            pass
        return llm.turns._last

    with joined("A", lambda: work("A", 5)):
        pause.wait_until_reached()
        last = llm.turns._last
        with joined("B", lambda: work("B", 1)):
            last = until_one_more_waits(last)
            with joined("C", lambda: work("C", 1)):
                until_one_more_waits(last)
                pause.end()

    assert "".join(served) == "ABCAAAA"


@pytest.mark.parametrize("call", ["add_request", "step", "take_output", "abort"])
def test_a_second_loop_is_refused(call: str) -> None:
    """While a thread steps, another's call of a loop is refused, and the first loop goes on."""
    llm, _, device = made()
    device.pause = pause = Pause()
    arguments: dict[str, tuple[Any, ...]] = {
        "add_request": (OTHER, FOUR),
        "take_output": (0,),
        "abort": (0,),
    }
    answers: list[list[int]] = []

    with joined("A", lambda: answers.append(loop(llm))):
        pause.wait_until_reached()
        with pytest.raises(ConcurrentCallError) as caught:
            getattr(llm, call)(*arguments.get(call, ()))
        pause.end()

    assert answers == [ANSWER]
    error = caught.value
    assert (error.call, error.running_call) == (f"LLM.{call}", "LLM.step()")
    assert error.running_thread == "A"
    assert "AsyncLLM" in str(error)
    assert loop(llm, OTHER) == OTHER_ANSWER


def test_a_step_waits_for_a_whole_call_and_the_call_for_a_step() -> None:
    """A loop of one thread and `generate` of another go on side by side; both get their answers."""
    llm, bench, device = made()
    device.pause = pause = Pause()
    answers: dict[str, list[int]] = {}

    with joined("A", lambda: answers.update(loop=loop(llm))):
        pause.wait_until_reached()
        with joined("B", lambda: answers.update(whole=answer(llm, OTHER))):
            pause.end()

    assert answers == {"loop": ANSWER, "whole": OTHER_ANSWER}
    bench.core.cache.check()


def test_a_callback_may_call_the_llm_that_calls_it() -> None:
    """`on_finished` may read the cache, generate, queue and step, while another thread waits."""
    llm, _, device = made()
    device.pause = pause = Pause()
    results: list[object] = []

    def on_finished(output: RequestOutput) -> None:
        results.append(llm.cache.stats().num_leases)
        results.append(answer(llm, OTHER))
        results.append(loop(llm, OTHER))
        session = llm.session(OTHER)
        results.append(list(session.generate(FOUR).token_ids))
        llm.cache.clear()

    def first() -> None:
        [output] = llm.generate(PROMPT, FOUR, on_finished=on_finished)
        results.append(list(output.token_ids))

    with joined("A", first):
        pause.wait_until_reached()
        with joined("B", lambda: results.append(loop(llm))):
            pause.end()

    assert results == [0, OTHER_ANSWER, OTHER_ANSWER, OTHER_ANSWER, ANSWER, ANSWER]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["callback", "device", "run"])
def test_a_call_that_raises_lets_the_next_one_in(error: BaseException, where: str) -> None:
    """After an error or interrupt in any part of a call, the thread that waits is served."""
    llm, bench, _ = made(**({"fail_at": {0}, "error": error} if where == "device" else {}))
    pause, answers, returned = Pause(), list[list[int]](), list[str]()

    def broken(eviction: object) -> None:
        raise error

    def held(core: object) -> None:
        pause.reach()
        if where == "run":
            raise error
        if where == "callback":
            llm.generate(PROMPT, FOUR, on_finished=broken)
        else:
            llm.generate(PROMPT, FOUR)

    def first() -> None:
        with suppress(type(error)):
            llm.run(held)
            returned.append(where)

    with joined("A", first):
        pause.wait_until_reached()
        with joined("B", lambda: answers.append(answer(llm, OTHER))):
            pause.end()

    assert answers == [OTHER_ANSWER]
    # A step that fails is run again.
    assert bool(returned) == (where == "device" and isinstance(error, RuntimeError))
    assert not bench.core.live
    assert bench.core.guard.thread == 0


def test_an_interrupted_wait_neither_blocks_nor_lets_two_calls_in() -> None:
    """Ctrl-C ends a call that waits; the running call and the next one are whole."""
    llm, bench, device = made()
    device.pause = pause = Pause()
    answers: list[list[int]] = []
    before, main = llm.turns._last, threading.get_ident()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def third() -> None:
        while llm.turns._last is before:
            pass
        time.sleep(0.2)  # the main thread waits: a lock overlooks a signal just before it blocks
        signal.pthread_kill(main, signal.SIGINT)
        answers.append(answer(llm, OTHER))

    try:
        with joined("A", lambda: answers.append(answer(llm))):
            pause.wait_until_reached()
            before = llm.turns._last
            with joined("C", third):
                with pytest.raises(KeyboardInterrupt):
                    answer(llm)
                assert bench.core.guard.thread != 0
                pause.end()
    finally:
        signal.signal(signal.SIGINT, handler)

    # Each thread appends after its call, so that the order says nothing.
    assert sorted(answers) == sorted([ANSWER, OTHER_ANSWER])
    assert answer(llm) == ANSWER


def test_who_bypasses_the_llm_is_refused_and_the_call_goes_on() -> None:
    """While a thread generates, core and cache refuse others, also between two steps."""
    llm, bench, device = made()
    device.pause = pause = Pause()
    core, answers = bench.core, list[list[int]]()

    with joined("A", lambda: answers.append(answer(llm))):
        pause.wait_until_reached()
        for call in (core.step, core.cache.clear, llm.cache.core.stats, core.stats):
            with pytest.raises(ConcurrentCallError, match=r"'A' was in LLM\.generate\(\)"):
                call()
        pause.end()

    assert answers == [ANSWER]


def test_turns_of_one_session_are_whole() -> None:
    """Threads that generate on one session each continue what the others have added."""
    llm, _, _ = made()
    session, outputs = llm.session(PROMPT, pin=True), list[RequestOutput]()

    def work() -> None:
        for _ in range(4):
            session.append([7])
            outputs.append(session.generate(FOUR))
            with session.fork()[0] as branch:
                branch.generate(FOUR)

    with joined("A", work), joined("B", work):
        work()
    session.close()

    tokens = list(session.token_ids)
    assert len(tokens) == len(PROMPT) + 12 * 5
    for output in outputs:
        prompt, length = list(output.prompt_token_ids), len(output.prompt_token_ids)
        assert list(output.token_ids) == expected(prompt, 4, ends=())
        assert tokens[: length + 4] == [*prompt, *output.token_ids]
    assert not llm.cache.pins()
    llm.cache.check()


def test_weights_are_installed_between_two_calls() -> None:
    """`reload_weights` loads while others generate, and installs when they have ended."""
    llm, bench, device = made()
    device.pause = pause = Pause()
    loaded, unfinished = threading.Event(), list[bool]()

    class Engine:
        def load_weights(self, model: str, *, progress: bool) -> Callable[[], bytes]:
            loaded.set()

            def install() -> bytes:
                unfinished.append(llm.core.has_unfinished)
                return b"new"

            return install

    llm._engine = Engine()  # type: ignore[assignment]

    def first() -> None:
        assert answer(llm) == ANSWER

    with joined("A", first):
        pause.wait_until_reached()
        with joined("B", lambda: llm.reload_weights("new")):
            assert loaded.wait(60)
            pause.end()

    assert unfinished == [False]
    assert bench.core.namespaces.base == b"new"
    assert answer(llm) == ANSWER


# -- any interleaving ----------------------------------------------------------------------

OPERATIONS = {
    **CALLS,
    "core.step": lambda llm: llm.core.step_or_fail_blocked(),
    "core.cache.match": lambda llm: llm.core.cache.match(llm.core.namespaces.key([1] * 9)),
    "core.cache.evict": lambda llm: llm.core.cache.evict(1),
}
PROGRAMS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6)


@settings(max_examples=examples(40))
@given(programs=st.lists(PROGRAMS, min_size=2, max_size=3))
def test_whatever_threads_do_together_is_right_or_refused(programs: list[list[str]]) -> None:
    """Calls of several threads give right answers or are refused; the engine is never repaired."""
    llm, bench, _ = made()

    def work(program: list[str]) -> None:
        for name in program:
            try:
                OPERATIONS[name](llm)
                assert answer(llm) == ANSWER
            except ConcurrentCallError:
                pass
            except UnknownRequestError:
                assert name == "loop"  # `core.step` of another thread took its output
            except RamifyError:
                assert name in ("cache.pin", "cache.share")  # nothing cached, or no room

    first, *others = programs
    with joined("A", lambda: work(others[0])), joined("B", lambda: work(others[-1])):
        work(first)

    assert bench.core.recovery.counts.rebuilds == 0
    while llm.has_unfinished():
        llm.step()
    assert answer(llm, OTHER) == OTHER_ANSWER
    for pin in llm.cache.pins():
        llm.cache.unpin(pin)
    bench.core.cache.check()
    assert (bench.core.guard.thread, bench.core.cache.stats().num_leases) == (0, 0)
