"""A device that works by itself, as late as it may, and fails where a test tells it to."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.engine.step import StepPlan, StepResult
from ramify.engine.threaded_executor import with_late_tokens
from ramify.testing import FakeExecutor

POISONED = -2  # as a slot of `FakeExecutor` that a failed step has written


class LateDevice:
    """An `OverlappingExecutor` that computes a step when it is finished, not before.

    Calls take effect in their order: what follows a step in flight waits for it.

    Args:
        inner: computes; it raises in some steps if it is so made.
        not_begun: numbers of the calls of `begin_ahead` that raise.
        not_finite: numbers of the steps whose first request gets a failure and damaged K/V.
    """

    def __init__(
        self,
        inner: FakeExecutor,
        *,
        not_begun: Container[int] = (),
        not_finite: Container[int] = (),
    ) -> None:
        self.inner, self.not_begun, self.not_finite = inner, not_begun, not_finite
        self.num_ahead = self.num_computed = self.num_dropped = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._begun: deque[list[StepResult]] = (
            deque()
        )  # of each step in flight: empty, or its result

    def begin(self, plan: StepPlan) -> None:
        assert not plan.late_tokens
        self.num_dropped += len(self._begun)
        self._begun.clear()
        self._append(plan, [])

    def begin_ahead(self, plan: StepPlan) -> None:
        assert len(self._begun) == 1, "one step is in flight"
        self.num_ahead += 1
        if self.num_ahead - 1 in self.not_begun:
            raise RuntimeError("not begun")
        self._append(plan, self._begun[0])

    def finish(self) -> StepResult:
        box = self._begun[0]
        try:
            while not box:
                self._calls.popleft()()
        except BaseException:
            self._begun.clear()
            raise
        self._begun.popleft()
        return box[0]

    def zero_pages(self, pages: Sequence[int]) -> None:
        self._calls.append(partial(self.inner.zero_pages, list(pages)))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._calls.append(partial(self.inner.copy_pages, list(pairs)))

    def _append(self, plan: StepPlan, before: list[StepResult]) -> None:
        box: list[StepResult] = []
        self._begun.append(box)
        self._calls.append(lambda: self._compute(plan, before, box))

    def _compute(self, plan: StepPlan, before: list[StepResult], box: list[StepResult]) -> None:
        if plan.late_tokens:
            if not before:
                return  # the step before failed: nobody waits for this one
            plan = self._without_failed(with_late_tokens(plan, before[0]), before[0])
        self.num_computed += 1
        is_dropped = not any(box is waiting for waiting in self._begun)
        try:
            result = self.inner.execute(plan)
        except Exception:
            if is_dropped:
                return
            raise
        if self.num_computed - 1 in self.not_finite and plan.request_ids:
            key, end = plan.request_ids[0], int(plan.batch.cu_seqlens_q[1])
            self._damage(plan.batch.slot_mapping[:end])
            result.sampled.pop(key, None)
            result = replace(result, failed={key: "not finite"})
        box.append(result)

    def _without_failed(self, plan: StepPlan, before: StepResult) -> StepPlan:
        """The plan without the requests that failed in the step before; their K/V is damaged."""
        failed = [row for row, key in enumerate(plan.request_ids) if key in before.failed]
        if not failed:
            return plan
        self._damage(plan.batch.slot_mapping[query_rows(plan.batch, failed)])
        rows = [row for row in range(len(plan.request_ids)) if row not in failed]
        kept = query_rows(plan.batch, rows)
        place = {row: index for index, row in enumerate(kept.tolist())}
        samples = [spec._replace(row=place[spec.row]) for spec in plan.samples if spec.row in place]
        return replace(
            plan,
            batch=plan.batch.select(rows),
            token_ids=plan.token_ids[kept],
            samples=tuple(samples),
            request_ids=tuple(plan.request_ids[row] for row in rows),
        )

    def _damage(self, slots: NDArray[np.int64]) -> None:
        self.inner._positions[slots] = POISONED


def query_rows(batch: AttentionBatch, seqs: Sequence[int]) -> NDArray[np.int64]:
    """The query rows of some requests of a batch."""
    spans = [range(batch.cu_seqlens_q[seq], batch.cu_seqlens_q[seq + 1]) for seq in seqs]
    return np.array([row for span in spans for row in span], np.int64)
