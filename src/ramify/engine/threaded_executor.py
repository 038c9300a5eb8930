"""`ThreadedExecutor`: runs the steps of another executor in a thread, so that the next can be planned meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ramify.engine.step import Executor, StepPlan, StepResult


class ThreadedExecutor:
    """An `OverlappingExecutor` over one that computes in `begin`.

    Args:
        inner: is called from one thread of this object alone.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ramify-steps")
        self._begun: deque[Future[StepResult]] = deque()  # oldest first

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`; returns at once."""
        self._drop()
        self._begun.append(self._thread.submit(_compute, self.inner, plan))

    def begin_ahead(self, plan: StepPlan) -> None:
        """See `OverlappingExecutor.begin_ahead`."""
        before = self._begun[-1]
        self._begun.append(self._thread.submit(_compute_behind, self.inner, plan, before))

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        assert self._begun, "finish without begin"
        try:
            result = self._begun[0].result()
        except BaseException:
            self._drop()
            raise
        self._begun.popleft()
        return result

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`; waits for the steps begun before."""
        self._thread.submit(self.inner.zero_pages, pages).result()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`; waits for the steps begun before."""
        self._thread.submit(self.inner.copy_pages, pairs).result()

    def _drop(self) -> None:
        """Forget the steps in flight; one that has not started never does."""
        for step in self._begun:
            step.cancel()
        self._begun.clear()


def _compute(inner: Executor, plan: StepPlan) -> StepResult:
    inner.begin(plan)
    return inner.finish()


def _compute_behind(inner: Executor, plan: StepPlan, before: Future[StepResult]) -> StepResult:
    """Compute a step with the tokens that the one before has sampled; that has ended."""
    return _compute(inner, with_late_tokens(plan, before.result()))


def with_late_tokens(plan: StepPlan, before: StepResult) -> StepPlan:
    """The plan with the tokens that the step before has sampled, and with no late ones."""
    token_ids = plan.token_ids.copy()
    for row, request_id in plan.late_tokens:
        sampled = before.sampled.get(request_id)  # None: failed, nobody reads what follows
        if sampled is not None:
            token_ids[row] = sampled.token_ids[-1]
    return replace(plan, token_ids=token_ids, late_tokens=())
