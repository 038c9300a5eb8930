"""Repairs in a row, with no step in between that succeeds, end as an error."""

from typing import Any

import pytest

from ramify.engine.failure_recovery import MAX_REPAIRS
from ramify.engine.llm import LLM
from ramify.errors import InvariantError, StepFailedError
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench, expected
from tests.pure.test_engine_repair import leak_a_page


def break_scheduling(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException, times: int = 10**9
) -> None:
    """Make the next `times` steps raise `error` before anything is planned."""
    left = times

    def broken(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            monkeypatch.undo()
            return bench.core.scheduler.schedule()
        raise error

    monkeypatch.setattr("ramify.engine.scheduling.scheduler.Scheduler.schedule", broken)


def test_an_engine_that_no_repair_helps_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 8 repairs in a row every live request ends with an error that says so; not before."""
    bench = Bench()
    keys = [bench.add([at] * 5, max_tokens=3, n=1 + at % 2) for at in range(1, 21)]
    error = RuntimeError("broken")
    break_scheduling(bench, monkeypatch, error)

    for _ in range(MAX_REPAIRS - 1):
        bench.step()
    assert len(bench.outputs) < MAX_REPAIRS  # each failed alone
    bench.step()

    assert bench.outputs.keys() == set(keys)
    last = bench.outputs[keys[-1]].error
    assert isinstance(last, StepFailedError)
    assert "repaired 8 times in a row and no step succeeded" in str(last)
    assert "make another LLM" in str(last)
    assert str(last).endswith("RuntimeError: broken")
    assert last.__cause__ is error
    bench.assert_nothing_leaked()


def test_later_requests_fail_at_once_until_a_step_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken engine fails each new request at its first repair; one that recovers goes on."""
    bench = Bench()
    llm, params = LLM.from_core(bench.core), SamplingParams(max_tokens=4, ignore_eos=True)
    break_scheduling(bench, monkeypatch, RuntimeError("broken"), times=MAX_REPAIRS + 3)
    counts = bench.core.recovery.counts

    while counts.rebuilds < MAX_REPAIRS:
        llm.generate([1] * 5, params)
    for number in range(3):
        [output] = llm.generate([2] * 5, params)
        assert f"repaired {MAX_REPAIRS + 1 + number} times in a row" in str(output.error)
    [output] = llm.generate([3] * 5, params)

    assert output.error is None
    assert list(output.token_ids) == expected([3] * 5, 4, ends=())
    assert counts.rebuilds == MAX_REPAIRS + 3
    break_scheduling(bench, monkeypatch, RuntimeError("broken"), times=1)
    [output] = llm.generate([3] * 5, params)
    assert output.error is None  # the count began anew


def test_a_step_that_an_audit_finds_wrong_has_not_succeeded() -> None:
    """Damage after every step ends a request that gets a token in each of them."""
    bench = Bench(check_sample=1.0)
    key = bench.add([1] * 9, max_tokens=100, ignore_eos=True)

    for _ in range(MAX_REPAIRS):
        assert key not in bench.outputs
        leak_a_page(bench)
        bench.step()

    error = bench.outputs[key].error
    assert isinstance(error, StepFailedError)
    assert "repaired 8 times in a row" in str(error)
    assert isinstance(error.__cause__, InvariantError)
    bench.assert_nothing_leaked()


def test_repairs_with_good_steps_in_between_are_not_in_a_row() -> None:
    """A request outlives any number of repairs if a step succeeds after each."""
    bench = Bench()
    key = bench.add([1] * 9, max_tokens=100, ignore_eos=True)

    for _ in range(3 * MAX_REPAIRS):
        bench.step()
        leak_a_page(bench)
        assert not bench.core.recovery.audit()
    outputs = bench.run()

    assert outputs[key].error is None
    assert list(outputs[key].token_ids) == expected([1] * 9, 100, ends=())


def test_interrupts_are_no_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request outlives any number of interrupts, and an error after them."""
    bench = Bench()
    key = bench.add([1] * 9, max_tokens=5, ignore_eos=True)
    break_scheduling(bench, monkeypatch, KeyboardInterrupt(), times=2 * MAX_REPAIRS)

    for _ in range(2 * MAX_REPAIRS):
        with pytest.raises(KeyboardInterrupt):
            bench.step()
    monkeypatch.undo()
    break_scheduling(bench, monkeypatch, RuntimeError("broken"), times=1)

    assert list(bench.run()[key].token_ids) == expected([1] * 9, 5, ends=())
