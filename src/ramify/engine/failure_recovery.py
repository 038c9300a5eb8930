"""What becomes of an engine and its requests when a step fails, or the engine itself does.

Three ways back, from the cheapest on. A step that failed is put back: its requests wait again, what
it wrote is erased, the rest stays warm. A request whose numbers are not finite goes on alone and
apart, in a namespace of its own, since a page that it had read may be damaged. And when the
bookkeeping itself cannot be trusted, it is all built anew and every live request begins again with
the tokens that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from ramify.cache.key import CacheKey, namespace_of, namespace_parts
from ramify.cache.maintenance import evict_suspect_prefix, reset
from ramify.engine.context import EngineContext
from ramify.engine.lifecycle import RequestLifecycle
from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.errors import OutOfPagesError, StepFailedError, StepMemoryError
from ramify.params import FinishReason

logger = logging.getLogger(__name__)

MAX_FAILURES = 2  # of steps in a row: one with batch mates, who may be at fault, and one alone
MAX_REBUILDS = 8  # during one token of a request: whoever needs more may be what they are for
MAX_INTERRUPTS = 100  # of one repair
# Good steps, before one may be twice as large again; each time that was too much, twice as many,
# so that whoever loses his work with a failed step gets through in between.
RECOVERY_STEPS = 16


class FailureRecovery:
    """Puts an engine back together, and tells the requests that cannot go on."""

    def __init__(
        self,
        context: EngineContext,
        lifecycle: RequestLifecycle,
        chance: Callable[[float], bool],
    ) -> None:
        self._context, self._lifecycle, self._chance = context, lifecycle, chance
        self._share = context.config.requested.self_check.check_sample
        self.counts = context.failures
        self.active_requests: Sequence[
            Request
        ] = ()  # in what the engine does now; none: in scheduling
        self._contained: BaseException | None = None  # is on its way to the caller
        self._broken_at = -1  # the count of steps at the last repair that nobody was blamed for
        self._good_steps = 0  # since a step was too large, or the limit was raised
        self._wanted_steps = 0  # good ones, to raise the limit; none once it is forgotten
        self._has_grown = False  # since a step was too large
        self._num_isolated = 0

    def describe_step(self) -> str:
        """What the engine is at, for whoever looks from another thread."""
        context, involved = self._context, self.active_requests
        named = ", ".join(
            f"{one.parent_or_self.id} ({one.sequence.num_computed}+{one.sequence.num_planned} tokens)"
            for one in involved[:8]
        )
        more = f" and {len(involved) - 8} more" if len(involved) > 8 else ""
        return (
            f"step {context.num_steps} with {len(involved)} requests: {named}{more}"
            if involved
            else f"scheduling step {context.num_steps}"
        )

    # -- a step fails --------------------------------------------------------------------------

    def step_failed(self, scheduled: ScheduledStep, error: BaseException) -> None:
        """A forward pass raised: nothing of the step counts. Raises what is no Exception."""
        self.roll_back(scheduled.requests)
        if not isinstance(error, Exception):
            self._contained = error
            raise error
        self.counts.failed_steps += 1
        logger.warning("a step of %d requests failed: %s", len(scheduled.requests), error)
        if isinstance(error, StepMemoryError) and self._halve_token_budget(scheduled):
            return
        for request in scheduled.requests:
            self._count_failure(request, error)

    def requests_failed(self, scheduled: ScheduledStep, errors: dict[int, Exception]) -> None:
        """Some requests of a step failed: they and those that read their pages do not count."""
        failed: dict[Request, Exception] = {}
        for request in scheduled.requests:
            names = [one.id for one in (request, *request.pending_children) if one.id in errors]
            if names:
                failed[request] = errors[names[0]]
        total = len(scheduled.requests)
        first = next(iter(failed.values()))
        logger.warning("%d of %d requests of a step failed: %s", len(failed), total, first)
        self.counts.failed_requests += len(failed)
        excused = {request for request in failed if self._isolate_namespace(request)}
        self.roll_back(list(failed))
        for request, error in failed.items():
            self._count_failure(request, error, excused=request in excused)

    def step_succeeded(self) -> None:
        """Steps may slowly get larger again after one was too large."""
        self.active_requests = ()
        scheduler, most = self._context.scheduler, self._context.config.max_batch_tokens
        self._good_steps += 1
        if self._wanted_steps and self._good_steps >= self._wanted_steps:
            self._good_steps = 0
            if scheduler.max_batch_tokens < most:
                scheduler.max_batch_tokens = min(2 * scheduler.max_batch_tokens, most)
                self._has_grown = True
            else:  # as many good steps as the last doubling took
                self._wanted_steps = 0

    def roll_back(self, requests: Sequence[Request]) -> None:
        """Nothing of a step counts for these: its pages are erased, they wait again."""
        try:
            self._roll_back(requests)
        except BaseException as error:
            self.rebuild(error)
            if not isinstance(error, Exception):
                self._contained = error
                raise

    def _roll_back(self, requests: Sequence[Request]) -> None:
        context = self._context
        page_size, running = context.config.page_size, context.scheduler.running
        held = {}
        for one in running:
            if one.sequence.row is not None:
                pages = context.table.pages(one.sequence.row)
                held[id(one.sequence)] = pages[one.sequence.num_computed // page_size :]
        planned = [one.sequence for one in requests if one.sequence.row is not None]
        back = set(map(id, context.planner.abandon(planned)))
        context.executor.zero_pages(sorted({page for key in back for page in held[key]}))
        context.scheduler.requeue([one for one in running if id(one.sequence) in back])

    def _halve_token_budget(self, scheduled: ScheduledStep) -> bool:
        """Allow half as many tokens in a step; False when it cannot get smaller."""
        num_tokens = scheduled.batch.num_tokens
        if num_tokens == 1:
            return False
        self.counts.out_of_memory += 1
        if self._has_grown or not self._wanted_steps:
            self._wanted_steps = max(RECOVERY_STEPS, 2 * self._wanted_steps)
        self._good_steps, self._has_grown = 0, False
        scheduler = self._context.scheduler
        scheduler.max_batch_tokens = min(scheduler.max_batch_tokens, num_tokens // 2)
        logger.warning("steps have at most %d tokens for now", scheduler.max_batch_tokens)
        return True

    def _count_failure(self, request: Request, error: Exception, *, excused: bool = False) -> None:
        """Count a failure; a request that failed too often ends, its waiting branches too."""
        request.num_failed_steps += 1
        self._context.scheduler.mark_isolated(request)
        if request.num_failed_steps >= MAX_FAILURES and not excused:
            self._fail(
                request,
                f"was in {request.num_failed_steps} failed steps, the limit is {MAX_FAILURES}; the last "
                f"one failed with {type(error).__name__}: {error}",
                error,
            )

    def _fail(self, request: Request, told: str, error: Exception) -> None:
        for one in (request, *request.pending_children):
            if not one.is_finished:
                self.counts.errors += 1
                failure = StepFailedError(f"request {one.parent_or_self.id} {told}")
                failure.__cause__ = error
                self._lifecycle.fail(one, failure)

    def fail_blocked_request(self, error: OutOfPagesError) -> None:
        """After a `step` that raised this: end the request that it found no pages for, and tell.

        For whoever cannot wait until leases outside the engine are released.
        """
        first = self._context.scheduler.blocked_request()
        assert first is not None, "nobody asked for pages"
        for one in (first.parent_or_self, *first.parent_or_self.children):
            if not one.is_finished:
                self._lifecycle.fail(one, error)

    # -- a page is damaged ---------------------------------------------------------------------

    def _isolate_namespace(self, request: Request) -> bool:
        """Let a request whose numbers are not finite go on without what it has read.

        Whatever it read from the cache may be damaged, and so it neither reads that again nor
        publishes to where the damaged pages would take the place of its own.

        Returns:
            False if it had read nothing, or failed without it: the cache is not at fault.
        """
        sequence = request.sequence
        if request.suspect_prefix is not None or sequence.lease is None:
            return False
        size = self._context.config.page_size
        read = min(sequence.num_computed // size * size, sequence.lease.num_tokens)
        if not read:
            return False
        request.suspect_prefix = sequence.key(read)
        self._num_isolated += 1  # what it reads there may be damaged, too
        known = namespace_parts(request.namespace)
        parts = known if "base" in known else {"base": request.namespace}
        parts = {**parts, "apart": self._num_isolated}
        request.namespace = namespace_of(**parts)  # still its tenant's
        return True

    def on_progress(self, request: Request) -> None:
        """A request has a new token: if it went on without what it had read, that was damaged."""
        request.num_failed_steps = request.num_rebuilds = 0
        if request.suspect_prefix is not None:
            suspect, request.suspect_prefix = request.suspect_prefix, None
            self._evict_suspect_prefix(suspect)

    def _evict_suspect_prefix(self, key: CacheKey) -> None:
        pages = evict_suspect_prefix(self._context.cache, key)
        self._context.executor.zero_pages(pages)
        self.counts.evicted_suspect_pages += len(pages)
        logger.error(
            "a request failed with %d cached tokens and succeeded without: %d pages are dropped",
            len(key),
            len(pages),
        )

    # -- the engine itself fails ---------------------------------------------------------------

    def recover(self, error: BaseException) -> None:
        """Something else than a forward pass raised: repair, and blame whom it was about.

        Raises:
            BaseException: what is no Exception, once the engine is whole again; an
                OutOfPagesError that leases outside the engine explain, and that changed nothing.
        """
        if error is self._contained:
            self._contained = None
            raise error
        involved, self.active_requests = self.active_requests, ()
        if isinstance(error, OutOfPagesError) and not involved and self._is_consistent():
            raise error
        context = self._context
        running, tried = list(context.scheduler.running), None
        with suppress(Exception):  # what is damaged may raise anything
            tried = context.scheduler.next_isolated()
        self.rebuild(error)
        if not isinstance(error, Exception):
            raise error
        if not involved:
            for one in running:
                one.num_rebuilds += 1
            if tried is not None:
                involved = [tried]
            elif self._broken_at == context.num_steps:
                involved = [
                    one
                    for one in self._lifecycle.live
                    if not one.is_finished and one not in one.parent_or_self.pending_children
                ]
            else:  # a step went well in between, as it may again and again
                involved = [one for one in running if one.num_rebuilds >= MAX_REBUILDS]
            self._broken_at = context.num_steps
        for request in involved:
            if not request.is_finished:
                self._count_failure(request, error)

    def maybe_audit(self) -> None:
        """`audit` after a sample of the steps."""
        if self._share and self._chance(self._share):
            self.audit()

    def audit(self) -> bool:
        """Recount everything; a contradiction is counted, reported and repaired.

        Returns:
            whether all was well. O(nodes + pages).
        """
        self.counts.audits += 1
        try:
            self._context.check(self._lifecycle.live)
        except Exception as error:  # noqa: BLE001 - a damaged structure may raise anything
            self.counts.mismatches += 1
            running = list(self._context.scheduler.running)
            self.rebuild(error)
            for request in running:
                request.num_rebuilds += 1
                if request.num_rebuilds >= MAX_REBUILDS:
                    self._fail(
                        request,
                        f"saw {request.num_rebuilds} repairs of the engine without a new token, the "
                        f"limit is {MAX_REBUILDS}; the last was for {type(error).__name__}: {error}",
                        error,
                    )
            return False
        return True

    def _is_consistent(self) -> bool:
        try:
            self._context.check(self._lifecycle.live)
        except Exception:  # noqa: BLE001 - a damaged structure may raise anything
            return False
        return True

    def rebuild(self, error: BaseException) -> None:
        """Build the bookkeeping anew, empty; all live requests wait with the tokens they have.

        Nothing is asked of the old one, so that it may be in any state. What was cached is lost,
        leases and pins of others too.
        """
        context = self._context
        self.counts.rebuilds += 1
        num_pins = reset(context.cache)
        logger.error(
            "the engine is repaired, its cache is empty, %d pins are lost: %s: %s",
            num_pins,
            type(error).__name__,
            error,
        )
        old = context.scheduler
        context.reset()
        context.scheduler.max_batch_tokens = old.max_batch_tokens
        context.scheduler.num_preemptions = old.num_preemptions
        context.scheduler.num_tokens = old.num_tokens  # the clock: a branch keeps its leader's time
        with suppress(Exception):  # nobody reads what is there before it is written anyway
            context.executor.zero_pages(range(context.cache.num_pages))
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
                    else:  # it cannot even be queued
                        told = f"cannot go on: {type(interrupt).__name__}: {interrupt}"
                        request.error = StepFailedError(
                            f"request {request.parent_or_self.id} {told}"
                        )
                        request.error.__cause__ = interrupt
                        request.pending_finish_reason = FinishReason.ERROR
                        self.counts.errors += 1
        if interrupts:
            raise interrupts[0]

    def _resume(self, request: Request) -> None:
        """Queue a live request again, or end it if that is what was interrupted."""
        context = self._context
        if not request.is_finished:
            try:
                self._lifecycle.rebuild_text_state(request)
            except Exception as error:  # noqa: BLE001 - a decoder's
                self._lifecycle.detokenize_failed(request, error)
        if request.pending_finish_reason is None and not request.is_finished:
            request.reset_for_recompute()
            leader = request.parent
            if leader is None or leader.output_ids or leader.is_finished:
                context.scheduler.add(request)
            return
        if not request.is_finished:
            self._lifecycle.finalize(request)
        if not request.end_emitted:
            self._lifecycle.emit(request)
