"""`StepPipeline`: the steps in flight; begins them, at most one ahead, and applies their results in order.

Without an executor that overlaps, one call of `run` plans a step, runs it and applies its result.
With one, a second step is planned and begun behind the first before the result of that is awaited:

    host     plan n | plan n+1 | wait      | apply n | plan n+2 | wait      | apply n+1 ...
    device          | step n               | step n+1           | step n+2             ...

The second step has a token of each request that goes on whatever the first one samples, or a chunk
of its prompt, see `scheduling.run_ahead`. A request that ends with the first has computed a token too
many, which is dropped with its pages and was never published. All other decisions, admissions and
preemptions among them, are taken with no step in flight, by the code that knows of one step only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ramify.attention.sequence import RadixSequence
from ramify.engine.context import EngineContext
from ramify.engine.failure_recovery import FailureRecovery
from ramify.engine.result_processor import ResultProcessor
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.engine.scheduling.step_plan import build_ahead_plan, build_step_plan
from ramify.engine.speculation.drafter import Drafter, propose_drafts
from ramify.engine.step import StepResult

logger = logging.getLogger(__name__)

# Steps without one ahead after `begin_ahead` has failed: the failing step is then one that can be
# rolled back, or its requests isolated.
PAUSE_STEPS = 16


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step that the executor has begun, and the sequences that it was planned for."""

    scheduled: ScheduledStep
    sequences: tuple[RadixSequence, ...]

    @classmethod
    def of(cls, scheduled: ScheduledStep) -> BegunStep:
        """A step whose requests have the sequences that it was planned for."""
        return cls(scheduled, tuple([request.sequence for request in scheduled.requests]))

    def still_planned(self) -> ScheduledStep:
        """The step with those requests only that have not ended and were not requeued since."""
        requests = self.scheduled.requests
        planned = [
            request
            for request, sequence in zip(requests, self.sequences, strict=True)
            if request.sequence is sequence and (sequence.num_planned or sequence.num_ahead)
        ]
        return (
            self.scheduled
            if len(planned) == len(requests)
            else replace(self.scheduled, requests=tuple(planned))
        )


class StepPipeline:
    """Runs the steps of one engine.

    Args:
        drafter: proposes draft tokens; no step runs ahead of their verification. None without
            speculation.
        clock: seconds.
    """

    def __init__(
        self,
        context: EngineContext,
        recovery: FailureRecovery,
        results: ResultProcessor,
        drafter: Drafter | None,
        clock: Callable[[], float],
    ) -> None:
        self._context, self._recovery, self._results = context, recovery, results
        self._drafter, self._clock = drafter, clock
        self._in_flight: BegunStep | None = None  # between two calls
        self._num_paused = 0  # steps that still run without one ahead
        self.num_ahead = 0  # steps that were begun ahead

    def run(self) -> None:
        """Run the step in flight, or the next one, to its end; may leave another in flight."""
        step = self._take_in_flight()
        if step is None:
            step = self._begin()
        if step is not None:
            self._end(step, self._begin_ahead(step))

    def drop(self) -> None:
        """Wait for the step in flight and forget what it has computed: it is planned again."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        # Also where all its requests have ended: until it is finished it computes.
        planned = step.still_planned().requests
        self._context.planner.ahead.undo([request.sequence for request in planned])
        ended = [request for request in step.scheduled.requests if request not in planned]
        self._context.scheduler.refund_ahead(step.scheduled, ended)
        try:
            self._context.executor.finish()
        except Exception as error:  # noqa: BLE001 - what it had computed is not wanted
            logger.warning("a step that was begun ahead failed, and is planned again: %s", error)

    def _take_in_flight(self) -> BegunStep | None:
        """The step in flight; None if there is none, or all its requests have ended or were requeued."""
        step, self._in_flight = self._in_flight, None
        return step if step is not None and step.still_planned().requests else None

    def _begin(self) -> BegunStep | None:
        """Plan and begin a step; None if there is nothing to do, or it failed and was rolled back."""
        context, recovery = self._context, self._recovery
        tiering = context.tiering
        if self._drafter is not None:
            propose_drafts(self._drafter, context.scheduler.running)
        scheduled = context.scheduler.schedule()
        if scheduled is None:
            if tiering is not None:
                tiering.wait()
            return None
        self._enter(scheduled)
        plan = build_step_plan(scheduled)
        if tiering is not None:
            tiering.planned(scheduled.requests)
        try:
            if copies := scheduled.batch.page_copies:
                context.executor.copy_pages([(copy.source, copy.target) for copy in copies])
            context.executor.begin(plan)
        except BaseException as error:  # noqa: BLE001 - re-raises KeyboardInterrupt, SystemExit
            recovery.step_failed(scheduled, error)
            return None
        return BegunStep.of(scheduled)

    def _enter(self, scheduled: ScheduledStep) -> None:
        self._recovery.active_requests = scheduled.requests
        now = self._clock()
        for request in scheduled.requests:
            if request.first_step_s is None:
                request.first_step_s = now

    def _begin_ahead(self, before: BegunStep) -> BegunStep | None:
        """Plan and begin a step behind another; None if that has to end first."""
        context, recovery, executor = self._context, self._recovery, self._context.overlapping
        if executor is None or self._drafter is not None:
            return None
        if self._num_paused:
            self._num_paused -= 1
            return None
        recovery.active_requests = ()
        scheduled = context.scheduler.schedule_ahead()
        if scheduled is None:
            return None
        step = BegunStep.of(scheduled)
        recovery.active_requests = scheduled.requests
        plan = build_ahead_plan(scheduled)
        try:
            executor.begin_ahead(plan)
        except Exception as error:  # noqa: BLE001 - the step before is not affected
            context.planner.ahead.cancel(step.sequences)
            context.scheduler.refund_ahead(scheduled, ())
            recovery.ahead_failed(scheduled, error)
            self._num_paused = PAUSE_STEPS
            return None
        except BaseException as error:  # an interrupt: nobody knows what the executor has begun
            context.planner.ahead.cancel(step.sequences)
            recovery.step_failed(before.still_planned(), error)
            raise
        self.num_ahead += 1
        return step

    def _end(self, step: BegunStep, ahead: BegunStep | None) -> None:
        """Wait for a step and apply its result; then `ahead` is the step in flight."""
        context, recovery = self._context, self._recovery
        scheduled = step.still_planned()
        recovery.active_requests = scheduled.requests
        try:
            result = context.executor.finish()
        except BaseException as error:  # noqa: BLE001 - re-raises KeyboardInterrupt, SystemExit
            if ahead is not None:
                context.planner.ahead.cancel(ahead.sequences)
            recovery.step_failed(scheduled, error)
            return
        if scheduled is not step.scheduled:
            result = _without_ended(result, scheduled)
        self._results.process(scheduled, result)
        if ahead is not None:
            going_on = ahead.still_planned().requests
            context.planner.ahead.promote([request.sequence for request in going_on])
            if len(going_on) < len(ahead.scheduled.requests):
                context.scheduler.refund_ahead(ahead.scheduled, going_on)
            self._in_flight = ahead
        recovery.step_succeeded()
        if context.tiering is not None:
            is_idle = not context.scheduler.has_unfinished
            context.tiering.computed(scheduled.batch, is_idle=is_idle)


def _without_ended(result: StepResult, scheduled: ScheduledStep) -> StepResult:
    """The result for the requests of a step alone: it was begun for more."""
    ids = {request.id for request in scheduled.requests}
    failed = {key: reason for key, reason in result.failed.items() if key in ids}
    return replace(result, failed=failed)
