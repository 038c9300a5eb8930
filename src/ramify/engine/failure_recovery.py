"""Failure recovery: what happens to engine and requests when a step or the bookkeeping fails.

- A forward pass raises → roll back: zero the pages of the step, requeue its requests. Out of memory:
  also halve the token budget for a while, and count no failure.
- A request's logits are not finite → roll it back and isolate its namespace, since a page that it
  read may be damaged. If it then succeeds, evict the prefix that it had read.
- Anything else raises, or an audit does → rebuild: empty cache, table and queues. Every live
  request is recomputed with the tokens it has.

A request that fails `MAX_FAILURES` steps in a row ends with a StepFailedError. After its first
failure it runs alone, so that it takes no other request with it. After `MAX_REPAIRS` rebuilds in a
row all live requests end with a StepFailedError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from ramify.cache.key import namespace_of, namespace_parts
from ramify.cache.maintenance import evict_suspect_prefix, reset
from ramify.cache.partial_page import key_of_partial_page
from ramify.counts import counted
from ramify.engine.context import EngineContext
from ramify.engine.lifecycle import RequestLifecycle
from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.errors import EngineStoppedError, OutOfPagesError, StepMemoryError
from ramify.outputs import FinishReason

logger = logging.getLogger(__name__)

MAX_FAILURES = 2  # failed steps in a row: one in a batch, whose others may be at fault, one alone
MAX_REBUILDS = 8  # rebuilds between two tokens of a request, which may be their cause
# Rebuilds in a row, with no step in between that succeeded. The first blames nobody, the second all
# requests, each later one the request that runs alone: six in a row that all break the engine by
# themselves are less likely than an engine, or a caller, that is broken.
MAX_REPAIRS = 8
MAX_INTERRUPTS = 100  # KeyboardInterrupts during one rebuild
# Successful steps after which the token budget, halved when memory ran out, doubles again. Doubled
# each time that was too early, so that requests progress between two failures.
RECOVERY_STEPS = 16


class FailureRecovery:
    """Restores a consistent engine after a failure, and ends requests that keep failing.

    Args:
        chance: true with the given probability; samples the steps to audit.
    """

    def __init__(
        self,
        context: EngineContext,
        lifecycle: RequestLifecycle,
        chance: Callable[[float], bool],
    ) -> None:
        self._context, self._lifecycle, self._chance = context, lifecycle, chance
        self._audit_share = context.config.requested.self_check.check_sample
        self.counts = context.failures
        # The requests that the engine works on now, to blame if that raises; none in scheduling.
        self.active_requests: Sequence[Request] = ()
        self._handled_error: BaseException | None = None  # recovered; passes through `recover`
        self._num_repairs = 0  # rebuilds for errors since the last good step
        self._last_error: Exception | None = None  # that the last of them was for
        self._last_step_was_good = False  # it succeeded, and nothing was rebuilt since
        self._unexplained_at_step = -1  # `num_steps` at the last rebuild that blamed no request
        self._num_good_steps = 0  # since the token budget changed
        self._steps_to_double = 0  # good steps before the budget doubles; 0: it was never halved
        self._has_doubled = False  # since it was halved
        self._num_isolated = 0

    def describe_step(self) -> str:
        """The running step and its first requests, for a log line; for any thread."""
        requests, num_steps = self.active_requests, self._context.num_steps
        if not requests:
            return f"scheduling step {num_steps}"
        named = ", ".join(
            f"{request.parent_or_self.id} "
            f"({request.sequence.num_computed}+{request.sequence.num_planned} tokens)"
            for request in requests[:8]
        )
        more = f" and {len(requests) - 8} more" if len(requests) > 8 else ""
        return f"step {num_steps} with {counted(len(requests), 'request')}: {named}{more}"

    # -- a forward pass fails ------------------------------------------------------------------

    def step_failed(self, scheduled: ScheduledStep, error: BaseException) -> None:
        """Roll back a step whose forward pass raised; re-raise KeyboardInterrupt and the like.

        Raises:
            EngineStoppedError: the executor has ended; the requests are queued, nothing was erased.
        """
        if isinstance(error, EngineStoppedError):
            with suppress(EngineStoppedError):
                self._roll_back(scheduled.requests)
            raise error
        self.roll_back(scheduled.requests)
        if not isinstance(error, Exception):
            self._handled_error = error
            raise error
        self.counts.failed_steps += 1
        logger.warning(
            "a step of %s failed: %s", counted(len(scheduled.requests), "request"), error
        )
        if isinstance(error, StepMemoryError) and self._halve_token_budget(scheduled):
            return
        for request in scheduled.requests:
            self._count_failure(request, error)

    def ahead_failed(self, scheduled: ScheduledStep, error: Exception) -> None:
        """Count a step that could not be begun ahead: it is planned again, and counts for no request."""
        self.counts.failed_steps += 1
        logger.warning(
            "a step of %s could not be begun ahead: %s",
            counted(len(scheduled.requests), "request"),
            error,
        )

    def requests_failed(self, scheduled: ScheduledStep, reasons: dict[int, str]) -> None:
        """Roll back the requests of a step that failed, and those that read their pages.

        Args:
            reasons: see `StepResult.failed`.
        """
        failed: dict[Request, Exception] = {}
        for request in scheduled.requests:
            group = (request, *request.pending_children)
            failed_ids = [member.id for member in group if member.id in reasons]
            if failed_ids:
                failed[request] = FloatingPointError(reasons[failed_ids[0]])
        total = len(scheduled.requests)
        first = next(iter(failed.values()))
        logger.warning("%d of %d requests of a step failed: %s", len(failed), total, first)
        self.counts.failed_requests += len(failed)
        isolated = {request for request in failed if self._isolate_namespace(request)}
        self.roll_back(list(failed))
        for request, error in failed.items():
            self._count_failure(request, error, excused=request in isolated)

    def step_succeeded(self) -> None:
        """Count a good step; double a halved token budget when there were enough."""
        self.active_requests = ()
        self._last_step_was_good = True
        scheduler, max_tokens = self._context.scheduler, self._context.config.max_batch_tokens
        self._num_good_steps += 1
        if self._steps_to_double and self._num_good_steps >= self._steps_to_double:
            self._num_good_steps = 0
            if scheduler.max_batch_tokens < max_tokens:
                scheduler.max_batch_tokens = min(2 * scheduler.max_batch_tokens, max_tokens)
                self._has_doubled = True
            else:  # the full budget has held for as many steps as the last doubling took
                self._steps_to_double = 0

    def roll_back(self, requests: Sequence[Request]) -> None:
        """Zero the pages that a step wrote for these requests, and requeue them.

        Includes requests that read those pages. Rebuilds everything if that raises.
        """
        try:
            self._roll_back(requests)
        except EngineStoppedError:
            raise
        except BaseException as error:
            self.rebuild(error)
            if not isinstance(error, Exception):
                self._handled_error = error
                raise

    def _roll_back(self, requests: Sequence[Request]) -> None:
        context = self._context
        page_size, running = context.config.page_size, context.scheduler.running
        written = {}  # by id of the sequence; looked up before `abandon` gives the rows back
        for request in running:
            sequence = request.sequence
            if sequence.row is not None:
                pages = context.table.pages(sequence.row)
                written[id(sequence)] = pages[sequence.num_computed // page_size :]
        planned = [request.sequence for request in requests if request.sequence.row is not None]
        abandoned = set(map(id, context.planner.abandon(planned)))
        context.scheduler.requeue(
            [request for request in running if id(request.sequence) in abandoned]
        )
        context.executor.zero_pages(sorted({page for key in abandoned for page in written[key]}))

    def _halve_token_budget(self, scheduled: ScheduledStep) -> bool:
        """Allow half the step's tokens from now on; False if it had one."""
        num_tokens = scheduled.batch.num_tokens
        if num_tokens == 1:
            return False
        self.counts.out_of_memory += 1
        if self._has_doubled or not self._steps_to_double:
            self._steps_to_double = max(RECOVERY_STEPS, 2 * self._steps_to_double)
        self._num_good_steps, self._has_doubled = 0, False
        scheduler = self._context.scheduler
        scheduler.max_batch_tokens = min(scheduler.max_batch_tokens, num_tokens // 2)
        logger.warning(
            "out of memory: steps have at most %d tokens for now", scheduler.max_batch_tokens
        )
        return True

    def _count_failure(self, request: Request, error: Exception, *, excused: bool = False) -> None:
        """Count a failed step; end the request and its pending children if they were too many."""
        request.num_failed_steps += 1
        self._context.scheduler.mark_isolated(request)
        if request.num_failed_steps >= MAX_FAILURES and not excused:
            self._fail(
                request,
                f"was in {counted(request.num_failed_steps, 'failed step')}, the limit is {MAX_FAILURES}; the "
                "last one failed with",
                error,
            )

    def _fail(self, request: Request, problem: str, cause: Exception) -> None:
        for member in (request, *request.pending_children):
            if not member.is_finished:
                self._lifecycle.fail(member, self._lifecycle.step_failure(member, problem, cause))

    def fail_blocked_request(self, error: OutOfPagesError) -> None:
        """After `step` raised this error: fail the group of the request that found no pages.

        For callers that cannot wait until leases outside the engine are released.
        """
        blocked = self._context.scheduler.blocked_request()
        assert blocked is not None, "no request needs pages"
        for member in (blocked.parent_or_self, *blocked.parent_or_self.children):
            if not member.is_finished:
                self._lifecycle.fail(member, error)

    # -- a cached page may be damaged ----------------------------------------------------------

    def _isolate_namespace(self, request: Request) -> bool:
        """Move a request whose logits are not finite to a namespace of its own.

        A page that it read may be damaged. In the new namespace it does not read that page again,
        and does not publish its own pages where `publish` would keep the damaged ones instead.

        Returns:
            False if it had read nothing, or failed in isolation: the cache is not at fault.
        """
        sequence = request.sequence
        if request.suspect_prefix is not None or sequence.lease is None:
            return False
        page_size = self._context.config.page_size
        num_read = min(sequence.num_computed // page_size * page_size, sequence.lease.num_tokens)
        if sequence.source is not None:
            request.suspect_prefix = key_of_partial_page(self._context.cache, sequence.source)
        elif num_read:
            request.suspect_prefix = sequence.key(num_read)
        else:
            return False
        # A new namespace each time: pages that it published in the last one may be damaged too.
        self._num_isolated += 1
        parts = namespace_parts(request.namespace)
        if "base" not in parts:
            parts = {"base": request.namespace}
        request.namespace = namespace_of(**{**parts, "apart": self._num_isolated})
        if self._context.tiering is not None:
            self._context.tiering.refuse_namespace(request.namespace)
        return True

    def on_progress(self, request: Request) -> None:
        """Reset a request's failure counts: it has a new token.

        If it was isolated, the prefix that it had read was at fault, and is evicted.
        """
        request.num_failed_steps = request.num_rebuilds = 0
        if request.suspect_prefix is not None:
            suspect, request.suspect_prefix = request.suspect_prefix, None
            pages = evict_suspect_prefix(self._context.cache, suspect)
            if self._context.tiering is not None:  # which pages hang below it there, nobody knows
                self._context.tiering.distrust()
            self._context.executor.zero_pages(pages)
            self.counts.evicted_suspect_pages += len(pages)
            logger.error(
                "a request failed with %d cached tokens and succeeded without: %d pages are evicted",
                len(suspect),
                len(pages),
            )

    # -- the bookkeeping fails -----------------------------------------------------------------

    def recover(self, error: BaseException) -> None:
        """Rebuild after an error outside a forward pass; count a failure for the requests at fault.

        At fault are the active requests. If it raised in scheduling: the request that ran alone;
        else all that live, if no step has succeeded since the last such error; else those that were
        running in `MAX_REBUILDS` of them.

        Raises:
            BaseException: KeyboardInterrupt and the like, after the rebuild.
            OutOfPagesError: leases outside the engine hold the pages; nothing was rebuilt.
            EngineStoppedError: the executor has ended; nothing was rebuilt.
        """
        if isinstance(error, EngineStoppedError):
            raise error
        if error is self._handled_error:
            self._handled_error = None
            raise error
        at_fault, self.active_requests = self.active_requests, ()
        if isinstance(error, OutOfPagesError) and not at_fault and self._inconsistency() is None:
            raise error
        context = self._context
        running, isolated = list(context.scheduler.running), None
        with suppress(Exception):  # a damaged structure may raise anything
            isolated = context.scheduler.next_isolated()
        self.rebuild(error)
        if not isinstance(error, Exception):
            raise error
        if not at_fault:
            for request in running:
                request.num_rebuilds += 1
            if isolated is not None:
                at_fault = [isolated]
            elif self._unexplained_at_step == context.num_steps:
                at_fault = [
                    request
                    for request in self._lifecycle.live
                    if not request.is_finished
                    and request not in request.parent_or_self.pending_children
                ]
            else:
                at_fault = [request for request in running if request.num_rebuilds >= MAX_REBUILDS]
            self._unexplained_at_step = context.num_steps
        for request in at_fault:
            if not request.is_finished:
                self._count_failure(request, error)
        self._fail_if_beyond_repair()

    def _fail_if_beyond_repair(self) -> None:
        """Fail every live request after `MAX_REPAIRS` rebuilds without a step that succeeded.

        Later requests fail in the same way, until a step succeeds.
        """
        error = self._last_error
        if self._num_repairs < MAX_REPAIRS or error is None:
            return
        for request in self._lifecycle.live:
            if not request.is_finished:
                self._fail(
                    request,
                    f"ended because the engine was repaired {counted(self._num_repairs, 'time')} in a row and no "
                    "step succeeded; make another LLM, or restart the server, and report the log; "
                    "the last repair was for",
                    error,
                )

    def maybe_audit(self) -> None:
        """Audit a random share, `check_sample`, of the steps."""
        if self._audit_share and self._chance(self._audit_share):
            self.audit()
        if self._last_step_was_good:
            self._num_repairs = 0
        else:
            self._fail_if_beyond_repair()

    def audit(self) -> bool:
        """Check all bookkeeping; rebuild if it is inconsistent. O(nodes + pages).

        Returns:
            Whether it was consistent.
        """
        self.counts.audits += 1
        error = self._inconsistency()
        if error is None:
            return True
        self.counts.mismatches += 1
        running = list(self._context.scheduler.running)
        self.rebuild(error)
        for request in running:
            request.num_rebuilds += 1
            if request.num_rebuilds >= MAX_REBUILDS:
                self._fail(
                    request,
                    f"saw {counted(request.num_rebuilds, 'repair')} of the engine without a new token, the "
                    f"limit is {MAX_REBUILDS}; the last was for",
                    error,
                )
        return False

    def _inconsistency(self) -> Exception | None:
        """What is wrong with the bookkeeping; None if it is consistent."""
        try:
            self._context.check(self._lifecycle.live)
        except Exception as error:  # noqa: BLE001 - a damaged structure may raise anything
            return error
        return None

    def rebuild(self, error: BaseException) -> None:
        """Replace cache contents, table, planner and queues by empty ones; requeue live requests.

        Requests keep their tokens. Pins, and leases of other callers, are lost. Of the old
        bookkeeping it reads only the scheduler's counters, so the rest may be in any state.
        """
        context = self._context
        self.counts.rebuilds += 1
        self._last_step_was_good = False
        if isinstance(error, Exception):  # an interrupt is nobody's fault
            self._num_repairs += 1
            self._last_error = error
        num_pins = reset(context.cache)
        logger.error(
            "the engine was rebuilt, its cache is empty, lost pins: %d: %s: %s",
            num_pins,
            type(error).__name__,
            error,
        )
        old = context.scheduler
        context.reset()
        context.scheduler.max_batch_tokens = old.max_batch_tokens
        context.scheduler.num_preemptions = old.num_preemptions
        context.scheduler.num_fair_preemptions = old.num_fair_preemptions
        context.scheduler.num_tokens = old.num_tokens  # the clock that `virtual_arrival` is read on
        with suppress(Exception):  # no page is read before it is written anyway
            context.executor.zero_pages(range(context.cache.num_pages))
        self._lifecycle.recount_live()
        interrupts = list[BaseException]()
        for request in self._lifecycle.live:
            while True:
                try:
                    self._resume(request)
                    break
                except BaseException as interrupt:
                    if len(interrupts) > MAX_INTERRUPTS:
                        raise
                    if not isinstance(interrupt, Exception):
                        interrupts.append(interrupt)
                    elif request.pending_finish_reason is not None:
                        raise
                    else:  # it cannot be queued: `_resume` ends it in the next turn
                        request.error = self._lifecycle.step_failure(
                            request, "cannot go on:", interrupt
                        )
                        request.pending_finish_reason = FinishReason.ERROR
        if interrupts:
            raise interrupts[0]

    def _resume(self, request: Request) -> None:
        """Queue a live request again, or complete its end if that was interrupted."""
        if not request.is_finished:
            try:
                self._lifecycle.rebuild_text_state(request)
            except Exception as error:  # noqa: BLE001 - a detokenizer's
                self._lifecycle.detokenize_failed(request, error)
        if request.pending_finish_reason is None and not request.is_finished:
            request.reset_for_recompute()
            parent = request.parent
            if parent is None or parent.output_ids or parent.is_finished:
                self._context.scheduler.add(request)
            return
        if not request.is_finished:
            self._lifecycle.finalize(request)
        if not request.end_emitted:
            self._lifecycle.emit(request)
