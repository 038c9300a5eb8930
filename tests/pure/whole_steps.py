"""Executors of tests that compute a step in one call."""

from ramify.engine.step import Executor, StepPlan, StepResult


class WholeSteps:
    """`begin` and `finish` of an executor that has `execute` alone."""

    _result: StepResult | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step; returns its result."""
        raise NotImplementedError

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`."""
        self._result = None
        self._result = self.execute(plan)

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        result, self._result = self._result, None
        assert result is not None, "finish without begin"
        return result


def run_step(executor: Executor, plan: StepPlan) -> StepResult:
    """Begin a step and wait for its result."""
    executor.begin(plan)
    return executor.finish()
