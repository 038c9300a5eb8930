"""The engine without tensors: requests in, steps planned, carried out, committed and told."""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections.abc import Callable, Container, Iterable, Sequence

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.context import EngineContext, EngineStats
from ramify.engine.failure_recovery import FailureRecovery
from ramify.engine.lifecycle import RequestLifecycle, StepOutput
from ramify.engine.logits.logits_processors import GrammarMatcher
from ramify.engine.output_processor import append_sampled_tokens
from ramify.engine.prefix_namespaces import PrefixNamespaces
from ramify.engine.request import IncrementalDetokenizer, Request
from ramify.engine.scheduling.scheduler import ScheduledStep, Scheduler
from ramify.engine.scheduling.step_plan import build_step_plan
from ramify.engine.scheduling.validation import (
    resolve_max_len,
    validate_request_options,
    validate_token_ids,
    validate_token_options,
)
from ramify.engine.speculation.drafter import Drafter, create_drafter, propose_drafts
from ramify.engine.step import Executor, StepPlan, StepResult
from ramify.engine.watchdog import Watchdog
from ramify.errors import (
    CacheError,
    InvalidParamsError,
    OutOfPagesError,
    UnknownRequestError,
)
from ramify.kv.block_table import PagedBlockTable
from ramify.params import FinishReason, RequestOutput, SamplingParams, StructuredOutput

__all__ = ["EngineCore", "StepOutput"]

logger = logging.getLogger(__name__)


class EngineCore:
    """Single-threaded by contract: whoever owns it calls `step` until nothing is unfinished.

    Args:
        config: sizes; `config.requested` says whether prefixes are shared.
        executor: carries out the steps.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own ends of sequence.
        namespace: what the K/V depends on beside the tokens: model, weights, dtype.
        detokenizer_factory: makes a decoder per request; None when the model has no tokenizer.
        drafter: guesses tokens; None for the one that `config` asks for, if any.
        grammar_compiler: makes a matcher for one answer; None when there is no structured output.
        clock: seconds; another one can be passed in tests.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        namespace: bytes = b"",
        detokenizer_factory: Callable[[], IncrementalDetokenizer] | None = None,
        drafter: Drafter | None = None,
        grammar_compiler: Callable[[StructuredOutput], GrammarMatcher] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.namespaces = PrefixNamespaces(namespace, config.page_size)
        self.context = EngineContext(config, executor, clock)
        self.lifecycle = RequestLifecycle(
            self.context,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            detokenizer_factory=detokenizer_factory,
            grammar_compiler=grammar_compiler,
            clock=clock,
        )
        rng = random.Random()  # noqa: S311  # which requests are checked is no secret
        # Not a method: a reference back to the core would delay the freeing of a dropped engine.
        self._chance: Callable[[float], bool] = lambda share: rng.random() < share
        self.recovery = FailureRecovery(self.context, self.lifecycle, self._chance)
        self.watchdog = Watchdog(config.requested.self_check.step_timeout_s)
        self.hit_verifier = self.lifecycle.hit_verifier
        self.max_waiting = config.requested.scheduler.max_waiting
        self.drafter = drafter or create_drafter(config, self.cache)
        self._clock = clock

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self.lifecycle.vocab_size

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache."""
        return self.context.cache

    @property
    def table(self) -> PagedBlockTable:
        """Block table of the running requests; a rebuild replaces it."""
        return self.context.table

    @property
    def planner(self) -> RadixAttentionPlanner:
        """The planner; a rebuild replaces it."""
        return self.context.planner

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler; a rebuild replaces it."""
        return self.context.scheduler

    @property
    def executor(self) -> Executor:
        """What runs the steps; another one can be set between two steps."""
        return self.context.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self.context.executor = executor

    @property
    def num_steps(self) -> int:
        """Steps committed so far."""
        return self.context.num_steps

    @property
    def num_computed_tokens(self) -> int:
        """Query rows of all steps so far."""
        return self.context.num_computed_tokens

    def stats(self) -> EngineStats:
        """A snapshot, for the thread that runs the engine."""
        return self.context.stats()

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        max_shared: int | None = None,
    ) -> int:
        """Queue a request; returns its id.

        Args:
            priority: requests with a larger one come first.
            tenant: whose it is: tenants share the steps fairly, and no prefixes but public ones
                (`namespaces`).
            salt: only requests with the same one share prefixes, but for public ones.
            max_shared: only so many of its first tokens are kept for others; by default all,
                those of the answer included.

        Raises:
            OverloadedError: `max_waiting` requests wait already.
            RequestError: it can never be served. Nothing is queued, others are untouched.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams")
        validate_request_options(priority, tenant, salt, max_shared)
        ids = validate_token_ids(token_ids, self.vocab_size)
        longest = resolve_max_len(len(ids), params, self.config)
        validate_token_options(params, self.vocab_size)
        if params.stop and self.lifecycle.detokenizer_factory is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        self.scheduler.check_queue_len(self.max_waiting, self._clock())
        self.scheduler.check_queued_tokens(len(ids), self._clock())
        request = self.lifecycle.create_group(
            ids,
            params,
            self.namespaces.scope_of(ids, tenant, salt),
            longest,
            prompt=prompt,
            priority=priority,
            tenant=tenant,
            max_shared=max_shared,
        )
        request.verify_cold = self._chance(self.hit_verifier.share)
        try:
            self.lifecycle.register(request)
            self.scheduler.add(request)
        except BaseException:  # an interrupt: as if it had not come
            self.scheduler.waiting.undo_add(request)
            self.lifecycle.unregister(request)
            raise
        return request.id

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the format that params ask for, so that `add_request` finds it compiled.

        Any thread may call it: it takes long, and nobody's answer should wait for it.

        Raises:
            RequestError: the format cannot be followed.
        """
        compiler = self.lifecycle.grammar_compiler
        if params.structured is not None and compiler is not None:
            compiler(params.structured)

    def verify_next_hit(self) -> bool:
        """Queue a sampled hit to be computed again, cold; whether there was one. When idle.

        For whoever drives `step`, when there is nothing else to do and free pages suffice: nothing
        is evicted for it. Nobody hears of it but `hit_verifier`.
        """
        if not self.hit_verifier.pending or self.has_unfinished:
            return False
        needed = -(-len(self.hit_verifier.pending[0].token_ids) // self.config.page_size)
        if self.cache.stats().free_pages < needed:
            return False  # it would evict what others may want
        hit = self.hit_verifier.pending.popleft()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        ids = array("i", hit.token_ids[: self.config.max_model_len - 1])
        request = self.lifecycle.create(ids, params, (hit.namespace, ()), len(ids) + 1)
        request.sequence.max_shared = 0  # what the first one did not share is not shared by this
        self.lifecycle.register(request)
        self.hit_verifier.running[request.id] = hit
        self.scheduler.add(request)
        return True

    def abort(self, request_id: int) -> RequestOutput:
        """End a live request now; what it computed stays warm.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self.lifecycle.requests.get(request_id) if isinstance(request_id, int) else None
        if request is None or request.parent is not None or request.has_output:
            raise UnknownRequestError(request_id)
        self.recovery.active_requests = ()
        while not request.has_ended:
            try:
                for one in (request, *request.children):
                    if not one.is_finished:
                        self.lifecycle.finish(one, FinishReason.ABORT)
            except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
                self.recovery.recover(error)
        dropped = self.lifecycle.discard_outputs({request_id})
        outputs = [one.output for one in dropped if one.output is not None]  # made by a rebuild
        return outputs[0] if outputs else self.lifecycle.make_output(request)

    def group_of(self, request_id: int) -> tuple[Request, ...]:
        """A live request and its branches, by index; none if it is not live."""
        request = self.lifecycle.requests.get(request_id)
        return () if request is None else (request, *request.children)

    @property
    def live(self) -> list[Request]:
        """Requests and branches whose caller was not told all yet, oldest first."""
        return self.lifecycle.live

    def discard_outputs(self, request_ids: Container[int]) -> None:
        """Tell nobody what is not told yet of these requests: their caller has given up."""
        self.lifecycle.discard_outputs(request_ids)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_unfinished or self.lifecycle.has_outputs

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """schedule → plan → execute → commit → update; what it did, request by request.

        Raises:
            OutOfPagesError: leases outside the engine hold the pages that a single request needs;
                nothing changed. Release some, or ask `recovery.fail_blocked_request`.
        """
        self.watchdog.begin(self.recovery.describe_step)
        try:
            self._step()
            self.recovery.maybe_audit()
        except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
            self.recovery.recover(error)
        finally:
            self.watchdog.end()
        return self.lifecycle.take_outputs()

    def step_or_fail_blocked(self) -> list[StepOutput]:
        """`step`; if leases outside the engine block a request, that one ends with the error."""
        try:
            return self.step()
        except OutOfPagesError as error:
            self.recovery.fail_blocked_request(error)
            return []

    def _step(self) -> None:
        self.recovery.active_requests = ()
        planned = self._plan_step()
        if planned is None:
            return
        scheduled, plan = planned
        try:
            result = self.executor.execute(plan)
        except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
            self.recovery.step_failed(scheduled, error)
            return
        self._process_result(scheduled, result)
        self.recovery.step_succeeded()

    def _plan_step(self) -> tuple[ScheduledStep, StepPlan] | None:
        """The next step, if there is anything to do."""
        if self.drafter is not None:
            propose_drafts(self.drafter, self.scheduler.running)
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        self.recovery.active_requests = scheduled.requests
        now = self._clock()
        for request in scheduled.requests:
            if request.first_step_s is None:
                request.first_step_s = now
        return scheduled, build_step_plan(scheduled)

    def _process_result(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Commit what was computed and hand out what was drawn."""
        if result.failed:
            self.recovery.requests_failed(scheduled, result.failed)
        served = [one for one in scheduled.requests if one.sequence.num_planned]
        starts, kept = [], []
        for request in served:
            num_planned = request.sequence.num_planned
            starts.append(request.sequence.num_computed)
            if request.id in result.sampled:
                num_drawn = len(result.sampled[request.id].token_ids)
                num_planned -= len(request.draft) + 1 - num_drawn
            kept.append(num_planned)
        self.planner.commit([request.sequence for request in served], kept)
        self.context.num_steps += 1
        self.context.num_computed_tokens += scheduled.batch.num_tokens
        for request, start in zip(served, starts, strict=True):
            self.recovery.active_requests = (request,)
            request.count_computed(start)
            request.prompt_logprobs.extend(result.prompt_logprobs.get(request.id, ()))
            if request.id in result.sampled:
                self._process_sampled(request, result)

    def _process_sampled(self, request: Request, result: StepResult) -> None:
        """A request has new tokens, whose K/V but the last one's is committed."""
        sequence, num_known = request.sequence, len(request.output_ids)
        branches = [one for one in request.pending_children if one.id in result.sampled]
        self._append_sampled(request, result)
        if request.draft:
            del sequence.tokens[sequence.num_computed :]
            num_right = len(result.sampled[request.id].token_ids) - 1
            num_accepted = min(num_right, len(request.output_ids) - num_known)
            request.num_draft_tokens += len(request.draft)
            request.num_accepted_tokens += num_accepted
            if self.drafter is not None:
                self.drafter.verified(request, num_accepted)
            request.draft = ()
        for one in branches:
            self._start_child(one, request)
        self._continue_or_finish(request)
        for one in branches:
            self._append_sampled(one, result)
            self._continue_or_finish(one)

    def _append_sampled(self, request: Request, result: StepResult) -> None:
        """Add what was drawn; from now on a request stands for its answer's end, if that is it."""
        try:
            append_sampled_tokens(request, result.sampled[request.id])
        except Exception as error:  # noqa: BLE001 - a decoder's; only its own text is lost
            self.lifecycle.detokenize_failed(request, error)

    def _continue_or_finish(self, request: Request) -> None:
        """Tell the new tokens of a request, which ends if it must, or is computed further."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        self.recovery.on_progress(request)
        if request.pending_finish_reason is None:
            request.sequence.tokens.append(request.output_ids[-1])
        else:
            self.lifecycle.finish(request, request.pending_finish_reason)
        self.lifecycle.emit(request)

    def _start_child(self, child: Request, parent: Request) -> None:
        """Let a branch go on from its leader's prompt: with the same pages, or back in the queue."""
        child.first_step_s = parent.first_step_s
        child.max_computed = parent.max_computed
        child.cache_counts = parent.cache_counts
        try:
            twin, pairs = self.planner.fork(parent.sequence)
        except CacheError:  # no row or no page: it is admitted like any other, its prompt is warm
            self.scheduler.add(child)
            return
        try:
            if pairs:
                self.executor.copy_pages(pairs)
        except Exception as error:  # noqa: BLE001 - out of memory, say: it can do without
            logger.warning("pages of request %d were not copied: %s", parent.id, error)
            self.planner.release([twin])
            self.scheduler.add(child)
            return
        child.sequence = twin
        self.scheduler.add_running(child)
