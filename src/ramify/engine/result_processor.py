"""Applies the result of a step: commits its K/V, appends sampled tokens, forks, ends and emits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ramify.engine.context import EngineContext
from ramify.engine.failure_recovery import FailureRecovery
from ramify.engine.lifecycle import RequestLifecycle
from ramify.engine.output_processor import append_sampled_tokens
from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.engine.speculation.drafter import Drafter
from ramify.engine.step import StepResult
from ramify.errors import CacheError

logger = logging.getLogger(__name__)


class ResultProcessor:
    """Updates requests with what a step has computed.

    Args:
        drafter: learns which drafts were right; None without speculation.
        clock: seconds.
    """

    def __init__(
        self,
        context: EngineContext,
        lifecycle: RequestLifecycle,
        recovery: FailureRecovery,
        drafter: Drafter | None,
        clock: Callable[[], float],
    ) -> None:
        self._context, self._lifecycle, self._recovery = context, lifecycle, recovery
        self._drafter, self._clock = drafter, clock

    def process(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Commit the computed K/V; update requests with sampled tokens and prompt logprobs."""
        if result.failed:
            self._recovery.requests_failed(scheduled, result.failed)
        # A failed request was rolled back: none of its tokens are planned any more.
        computed = [request for request in scheduled.requests if request.sequence.num_planned]
        starts, num_committed = [], []
        for request in computed:
            sequence = request.sequence
            num_tokens = sequence.num_planned
            starts.append(sequence.num_computed)
            if request.draft and request.id in result.sampled:
                num_sampled = len(result.sampled[request.id].token_ids)
                num_tokens -= len(request.draft) + 1 - num_sampled  # rejected drafts
            num_committed.append(num_tokens)
        self._context.planner.commit([request.sequence for request in computed], num_committed)
        self._context.num_steps += 1
        self._context.num_computed_tokens += scheduled.batch.num_tokens
        for request, start in zip(computed, starts, strict=True):
            self._recovery.active_requests = (request,)
            request.count_computed(start)
            if request.id in result.prompt_logprobs:
                request.prompt_logprobs.extend(result.prompt_logprobs[request.id])
            if request.id in result.embeddings:
                request.pooling.add(result.embeddings[request.id])
            if request.id in result.sampled:
                self._process_sampled(request, result)

    def _process_sampled(self, request: Request, result: StepResult) -> None:
        """Handle a request's newly sampled tokens, and those of its children after a prompt.

        Their K/V is committed, except that of the last one, which the next step computes.
        """
        num_output, children = len(request.output_ids), list[Request]()
        if request.children:
            children = [child for child in request.pending_children if child.id in result.sampled]
        self._append_sampled(request, result)
        if request.draft:
            sequence = request.sequence
            del sequence.tokens[sequence.num_computed :]
            num_correct = len(result.sampled[request.id].token_ids) - 1
            num_accepted = min(num_correct, len(request.output_ids) - num_output)
            request.num_draft_tokens += len(request.draft)
            request.num_accepted_tokens += num_accepted
            self._context.num_draft_tokens += len(request.draft)
            self._context.num_accepted_draft_tokens += num_accepted
            if self._drafter is not None:
                self._drafter.verified(request, num_accepted)
            request.draft = ()
        for child in children:
            self._start_child(child, request)
        self._continue_or_finish(request)
        for child in children:
            self._append_sampled(child, result)
            self._continue_or_finish(child)

    def _append_sampled(self, request: Request, result: StepResult) -> None:
        """Append the sampled tokens; sets `pending_finish_reason` if they end the answer."""
        try:
            append_sampled_tokens(request, result.sampled[request.id])
        except Exception as error:  # noqa: BLE001 - a detokenizer's; ends this request only
            self._lifecycle.detokenize_failed(request, error)

    def _continue_or_finish(self, request: Request) -> None:
        """Finish a request whose end is pending, else extend its sequence; emit its new tokens."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        self._recovery.on_progress(request)
        if request.pending_finish_reason is None:
            request.sequence.tokens.append(request.output_ids[-1])
        else:
            self._lifecycle.finish(request, request.pending_finish_reason)
        self._lifecycle.emit(request)

    def _start_child(self, child: Request, parent: Request) -> None:
        """Fork a child from its parent's computed prompt; queue it if no row or page is free."""
        child.first_step_s = parent.first_step_s
        child.max_computed = parent.max_computed
        child.cache_counts = parent.cache_counts
        child.sequence.has_looked_up = True
        try:
            twin, pairs = self._context.planner.fork(parent.sequence)
        except CacheError:  # no row or page; the scheduler admits it later, with a cached prompt
            self._context.scheduler.add(child)
            return
        try:
            if pairs:
                self._context.executor.copy_pages(pairs)
        except Exception as error:  # noqa: BLE001 - out of memory, say; queueing needs no copy
            logger.warning("pages of request %d were not copied: %s", parent.id, error)
            self._context.planner.release([twin])
            self._context.scheduler.add(child)
            return
        child.sequence = twin
        self._context.scheduler.add_running(child)
