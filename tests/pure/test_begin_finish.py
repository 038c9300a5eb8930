"""The engine begins a step and finishes it: what fails in between fails the step."""

from collections.abc import Sequence
from typing import Any

import pytest

from ramify.engine.step import StepPlan, StepResult
from ramify.errors import StepMemoryError
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, expected

PROMPTS = [[i, 2, 3, 4, 5, 6, 7 + i] for i in range(1, 5)]


class Late:
    """An executor that computes in `finish`, and raises there in some steps."""

    def __init__(self, inner: FakeExecutor, errors: dict[int, BaseException]) -> None:
        self.inner, self.errors, self.num_begun = inner, errors, 0
        self.calls: list[str] = []
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        self.calls.append("begin")
        self._plan, self.num_begun = plan, self.num_begun + 1

    def finish(self) -> StepResult:
        self.calls.append("finish")
        plan, self._plan = self._plan, None
        assert plan is not None
        result = self.inner.execute(plan)
        error = self.errors.pop(self.num_begun, None)
        if error is not None:
            raise error
        return result

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize(
    "error", [RuntimeError("late"), StepMemoryError(4, "late"), KeyboardInterrupt()]
)
def test_a_step_that_fails_when_it_is_finished_is_rolled_back(error: BaseException) -> None:
    """What a device tells late has the effect of what it tells at once: every answer is right."""
    bench = Bench()
    bench.core.executor = device = Late(bench.device, {3: error})
    keys = [bench.add(prompt, max_tokens=9, ignore_eos=True) for prompt in PROMPTS]

    interrupts = 0
    while bench.core.has_unfinished:
        try:
            bench.step()
        except KeyboardInterrupt:
            interrupts += 1

    assert interrupts == isinstance(error, KeyboardInterrupt)
    assert not device.errors
    assert device.calls == ["begin", "finish"] * device.num_begun
    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert list(bench.outputs[key].token_ids) == expected(prompt, 9, ends=())
    bench.assert_nothing_leaked()


def test_a_step_that_was_interrupted_leaves_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between `begin` and `finish` rolls back; the next step has its own result."""
    bench = Bench()
    begin, num_begun = bench.device.begin, 0

    def interrupted(plan: Any) -> None:
        nonlocal num_begun
        begin(plan)
        num_begun += 1
        if num_begun == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench.device, "begin", interrupted)
    keys = [bench.add(prompt, max_tokens=5, ignore_eos=True) for prompt in PROMPTS]
    bench.step()
    with pytest.raises(KeyboardInterrupt):
        bench.step()

    outputs = bench.run()

    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 5, ends=())
