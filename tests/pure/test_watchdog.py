"""The watchdog reports a step that exceeds its time limit, once, with its requests and stack."""

import logging
import threading

import pytest

from ramify.engine.serving.engine_thread import EngineThread
from ramify.engine.step import StepPlan, StepResult
from ramify.engine.watchdog import Watchdog
from tests.pure.engine_bench import Bench
from tests.pure.whole_steps import WholeSteps


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stuck_step_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """One report per stuck step, with its requests, duration and thread stack."""
    clock = Clock()
    watchdog = Watchdog(10.0, clock=clock)
    watchdog.begin(lambda: "step 3 with 2 requests")
    clock.now_s = 9.0
    assert not watchdog.report_if_stuck()
    assert watchdog.stuck_s == 0.0

    clock.now_s = 11.0
    with caplog.at_level(logging.ERROR):
        assert watchdog.report_if_stuck()
        assert not watchdog.report_if_stuck()

    assert (watchdog.stuck_s, watchdog.num_stuck) == (11.0, 1)
    [record] = caplog.records
    assert "11.0 s, the limit is step_timeout_s=10" in record.getMessage()
    assert "step 3 with 2 requests" in record.getMessage()
    assert "test_a_stuck_step_is_reported_once" in record.getMessage()
    watchdog.end()
    assert watchdog.stuck_s == 0.0
    watchdog.begin(lambda: "the next")
    clock.now_s = 30.0
    assert watchdog.report_if_stuck()
    assert watchdog.num_stuck == 2


def test_an_engine_that_hangs_in_its_device_is_seen_from_another_thread() -> None:
    """Another thread sees that `execute` hangs; the request finishes once it returns."""
    bench = Bench()
    clock, entered, leave = Clock(), threading.Event(), threading.Event()
    bench.core.watchdog = Watchdog(5.0, clock=clock)
    execute = bench.device.execute

    class Hanging(WholeSteps):
        zero_pages, copy_pages = bench.device.zero_pages, bench.device.copy_pages

        def execute(self, plan: StepPlan) -> StepResult:
            entered.set()
            assert leave.wait(60)
            return execute(plan)

    bench.core.executor = Hanging()
    key = bench.add([1, 2, 3], max_tokens=1)
    thread = threading.Thread(target=bench.step)
    thread.start()
    assert entered.wait(60)

    clock.now_s = 6.0
    assert bench.core.watchdog.stuck_s == 6.0
    assert f"with 1 request: {key} (0+3 tokens)" in bench.core.recovery.describe_step()
    assert bench.core.watchdog.report_if_stuck()
    leave.set()
    thread.join()

    assert bench.core.watchdog.stuck_s == 0.0
    assert bench.run()[key].error is None


def test_health_of_a_stuck_step_that_ends_meanwhile() -> None:
    """`Health.stuck_s` is the age of a stuck step or None, also if the step ends as it is read."""
    bench = Bench()
    times = [0.0, 7201.0]

    def clock() -> float:
        if len(times) == 1:
            watchdog.end()
        return times.pop(0)

    watchdog = bench.core.watchdog = Watchdog(3600.0, clock=clock)
    watchdog.begin(lambda: "")
    engine_thread = EngineThread(bench.core)

    assert engine_thread.health().stuck_s == 7201.0
    assert engine_thread.health().stuck_s is None


def test_the_thread_begins_with_the_first_step_and_ends_with_its_watchdog() -> None:
    """The first `begin` starts a thread unless the timeout is 0; it ends with its watchdog."""

    def names() -> int:
        return sum(thread.name == "ramify-watchdog" for thread in threading.enumerate())

    before = names()
    never, watchdog = Watchdog(0), Watchdog(3600.0)
    never.begin(lambda: "")
    assert names() == before
    assert never.stuck_s == 0.0

    watchdog.begin(lambda: "")
    watchdog.begin(lambda: "")
    assert names() == before + 1
    [thread] = [
        live_thread
        for live_thread in threading.enumerate()
        if live_thread.name == "ramify-watchdog"
    ][before:]
    del watchdog
    thread.join(60)

    assert not thread.is_alive()
