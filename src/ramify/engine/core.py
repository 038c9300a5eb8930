"""The step loop: schedule → plan → execute → commit → update. Knows no tensors.

`EngineCore` has the calls of the engine's owner. Its state is in `context`, the beginning and end of
requests in `lifecycle`, the steps in flight in `step_pipeline`, commit and update in
`result_processor`, and what happens when a call raises in `failure_recovery`.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.call_guard import guarded
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.cache_options import enforce_cache_share
from ramify.engine.call_turns import CallTurns
from ramify.engine.context import EngineContext, EngineStats
from ramify.engine.failure_recovery import FailureRecovery
from ramify.engine.lifecycle import RequestLifecycle
from ramify.engine.logits.logits_processors import GrammarMatcher
from ramify.engine.prefix_namespaces import PrefixNamespaces
from ramify.engine.request import DetokenizerFactory, Request
from ramify.engine.request_options import RequestOptions
from ramify.engine.result_processor import ResultProcessor
from ramify.engine.scheduling.queue_limits import QueueLimits
from ramify.engine.scheduling.scheduler import Scheduler
from ramify.engine.scheduling.validation import (
    resolve_max_len,
    validate_generated,
    validate_token_ids,
    validate_token_options,
)
from ramify.engine.speculation.drafter import Drafter, create_drafter
from ramify.engine.step import Executor
from ramify.engine.step_pipeline import StepPipeline
from ramify.engine.tier_events import TierEvents
from ramify.engine.tier_parts import TierParts
from ramify.engine.tiering import EngineTiering
from ramify.engine.watchdog import Watchdog
from ramify.errors import (
    ConcurrentCallError,
    InvalidParamsError,
    OutOfPagesError,
    UnknownRequestError,
)
from ramify.kv.block_table import PagedBlockTable
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams, StructuredOutput

_DEFAULTS = RequestOptions()
CLOSE_LIMIT_S = 10.0  # for the pages that are to be written when an engine ends

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests to completion: `add_request`, then `step` until `has_unfinished` is false.

    For one thread at a time: `guard` refuses a call while another thread is inside. Callers that can
    wait take `turns` (`LLM` does), or have a thread for all calls (`AsyncLLM` does).

    Args:
        config: sizes; `config.requested` has the options as the user gave them.
        executor: runs the forward passes.
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: the model's end-of-sequence tokens.
        namespace: what K/V depends on besides the tokens: model, weights, dtype.
        detokenizer_factory: creates a request's detokenizer; None if the model has no tokenizer.
        drafter: proposes draft tokens; None for the drafter that `config` selects, if any.
        grammar_compiler: creates the grammar matcher of a format and a tenant; None without structured
            output.
        clock: seconds.
        tiers: for pages that the pool has no room for; None: they are forgotten.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        namespace: bytes = b"",
        detokenizer_factory: DetokenizerFactory | None = None,
        drafter: Drafter | None = None,
        grammar_compiler: Callable[[StructuredOutput, str], GrammarMatcher] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierParts | None = None,
    ) -> None:
        self.config = config
        self.incarnation = secrets.randbits(64)
        self.namespaces = PrefixNamespaces(namespace, config.page_size)
        self.context = EngineContext(config, executor, clock, tiers)
        self.tiering = self.context.tiering
        self.guard = self.cache.guard
        self.turns = CallTurns(self.guard)
        self.lifecycle = RequestLifecycle(
            self.context,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            detokenizer_factory=detokenizer_factory,
            grammar_compiler=grammar_compiler,
            clock=clock,
        )
        rng = random.Random()  # noqa: S311  # only samples requests and audits
        # Not a method: `recovery` would refer back to the core, and a dropped engine would live on
        # until the garbage collector runs.
        self._chance: Callable[[float], bool] = lambda share: rng.random() < share
        self.recovery = FailureRecovery(self.context, self.lifecycle, self._chance)
        self.watchdog = Watchdog(config.requested.self_check.step_timeout_s)
        self.hit_verifier = self.lifecycle.hit_verifier
        self.max_waiting = config.requested.scheduler.max_waiting
        self.drafter = drafter or create_drafter(config, self.cache)
        self.results = ResultProcessor(
            self.context, self.lifecycle, self.recovery, self.drafter, clock
        )
        self.pipeline = StepPipeline(self.context, self.recovery, self.results, self.drafter, clock)
        self._clock = clock

    def now_s(self) -> float:
        """Seconds on the clock of requests' metrics. For any thread."""
        return self._clock()

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
        """Runs the forward passes; may be replaced between two steps."""
        return self.context.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self.drop_step()
        self.context.set_executor(executor)

    @property
    def num_steps(self) -> int:
        """Steps committed so far."""
        return self.context.num_steps

    @property
    def num_computed_tokens(self) -> int:
        """Query rows of all steps so far."""
        return self.context.num_computed_tokens

    @guarded
    def stats(self) -> EngineStats:
        """A snapshot, for the thread that runs the engine."""
        return self.context.stats(
            num_hit_checks=self.hit_verifier.num_checked,
            num_hit_mismatches=self.hit_verifier.num_mismatches,
            num_stuck_steps=self.watchdog.num_stuck,
        )

    # -- requests ----------------------------------------------------------------------------

    @guarded
    def add_request(
        self,
        /,
        token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = _DEFAULTS,
        *,
        prompt: str | None = None,
        arrival_s: float | None = None,
        **named: Any,
    ) -> int:
        """Queue a request; returns its id.

        Args:
            options: see `AsyncLLM.stream`. Steps are shared fairly between tenants; `explain` and
                `retention` are answered in `StepOutput.prefix`.
            prompt: the prompt's text, for `RequestOutput.prompt`.
            arrival_s: when the caller sent it, by `now_s`; None: now. Metrics count from there.
            named: fields of `RequestOptions` by name, in place of those of `options`.

        Raises:
            OverloadedError: `max_waiting` requests or `max_waiting_tokens` tokens wait.
            RequestError: the request can never be served. Nothing is queued.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams")
        options = (replace(options, **named) if named else options).checked()
        ids = validate_token_ids(token_ids, self.vocab_size)
        max_len = resolve_max_len(len(ids), params, self.config)
        generated = validate_generated(
            options.generated, params, max_len - len(ids), self.vocab_size
        )
        validate_token_options(params, self.vocab_size)
        if params.stop and self.lifecycle.detokenizer_factory is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        self._check_queue(options.tenant, len(ids))
        request = self.lifecycle.create_group(
            ids,
            params,
            self.namespaces.scope_of(ids, options.tenant, options.salt),
            max_len,
            options,
            prompt=prompt,
            arrival_s=self.now_s() if arrival_s is None else arrival_s,
        )
        for member, tokens in zip((request, *request.children), generated, strict=False):
            self.lifecycle.replay(member, tokens)
        request.verify_cold = self._chance(self.hit_verifier.share) and not generated
        # Children begin when the prompt is computed, unless their parent has begun elsewhere.
        members = (request, *request.children) if generated else (request,)
        try:
            self.lifecycle.register(request)
            for member in members:
                self.scheduler.add(member)
            for member in members:
                if member.pending_finish_reason is not None:
                    self.lifecycle.end_replayed(member)
            if options.cache_share is not None and self.planner.share and not request.is_finished:
                num_uncached = request.rank - request.virtual_arrival
                num_cached = len(ids) - num_uncached if request.sequence.reuse else 0
                with nullcontext() if self.tiering is None else self.tiering.demoting():
                    enforce_cache_share(
                        self.cache,
                        request.sequence.key(len(ids)),
                        options.tenant,
                        share=options.cache_share,
                        num_cached=num_cached,
                    )
            if self.tiering is not None and self.planner.share and not request.is_finished:
                self.tiering.prefetch(request)
        except BaseException:  # Ctrl-C: leave no half-queued request behind
            for member in members:
                self.scheduler.waiting.undo_add(member)
                if self.tiering is not None:
                    self.tiering.forget(member)
            self.lifecycle.discard_outputs({request.id})
            self.lifecycle.unregister(request)
            raise
        return request.id

    def _check_queue(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue takes no further request of a tenant."""
        limits = QueueLimits(self.max_waiting, self.config.max_waiting_tokens)
        queue, running = self.scheduler.waiting, self.scheduler.running
        if limits.max_waiting is not None:
            num_rows = sum(request.tenant == tenant for request in running)
            limits.check_answers(
                queue,
                tenant,
                num_own=self.lifecycle.num_live[tenant] - num_rows,
                num_all=self.lifecycle.num_live.total() - len(running),
                now_s=self._clock(),
            )
        limits.check_tokens(queue, tenant, num_tokens=num_tokens, now_s=self._clock())

    def compile_grammar(self, params: SamplingParams, tenant: str = "") -> None:
        """Compile the grammar of `params.structured` into the tenant's part of the cache.

        For any thread: compiling takes long, and `add_request` would do it in the engine's thread.

        Raises:
            RequestError: the grammar is invalid or not supported.
        """
        if params.structured is not None:
            self.lifecycle.compile_grammar(params.structured, tenant)

    def verify_next_hit(self) -> bool:
        """Queue a cold recomputation of the next sampled cache hit; returns whether it did.

        Call it when idle: it does nothing while requests are live, or if it had to evict pages. The
        result goes to `hit_verifier` and to no caller.
        """
        # An idle engine thread must not refuse, here, a thread that looks at the core.
        if not self.hit_verifier.pending or self.has_unfinished:
            return False
        return self._queue_next_hit()

    @guarded
    def _queue_next_hit(self) -> bool:
        needed = self.config.num_live_pages(len(self.hit_verifier.pending[0].token_ids))
        if self.cache.stats().free_pages < needed:
            return False
        hit = self.hit_verifier.pending.popleft()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        ids = array("i", hit.token_ids[: self.config.max_model_len - 1])
        request = self.lifecycle.create(
            ids, params, (hit.namespace, ()), len(ids) + 1, self.now_s()
        )
        request.sequence.max_shared = 0  # the recorded request may have kept its tokens private
        self.lifecycle.register(request)
        self.hit_verifier.running[request.id] = hit
        self.scheduler.add(request)
        return True

    @guarded
    def abort(self, request_id: int) -> RequestOutput:
        """End a live request now; its published pages stay cached.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self.lifecycle.requests.get(request_id) if isinstance(request_id, int) else None
        if request is None or request.parent is not None or request.has_output:
            raise UnknownRequestError(request_id)
        self.recovery.active_requests = ()
        while not request.has_ended:
            try:
                for member in (request, *request.children):
                    if not member.is_finished:
                        self.lifecycle.finish(member, FinishReason.ABORT)
            except BaseException as error:  # noqa: BLE001 - re-raises KeyboardInterrupt, SystemExit
                self.recovery.recover(error)
        dropped = self.lifecycle.discard_outputs({request_id})
        # `recover` may have emitted the final output already.
        outputs = [event.output for event in dropped if event.output is not None]
        return outputs[0] if outputs else self.lifecycle.make_output(request)

    def group_of(self, request_id: int) -> tuple[Request, ...]:
        """A live request and its children, by index; empty if the id is not live."""
        request = self.lifecycle.requests.get(request_id)
        return () if request is None else (request, *request.children)

    @property
    def live(self) -> list[Request]:
        """See `RequestLifecycle.live`."""
        return self.lifecycle.live

    @guarded
    def discard_outputs(self, request_ids: Container[int]) -> None:
        """Drop outputs of these requests that `step` has not returned yet."""
        self.lifecycle.discard_outputs(request_ids)

    @guarded
    def clear_tiers(self) -> None:
        """Remove every page from the cache tiers, for good; does nothing without tiers."""
        if self.tiering is not None:
            self.tiering.clear()

    @guarded
    def flush_tiers(self) -> None:
        """Write every cached page to the tiers that outlive the engine; returns when that is done.

        Steps wait for it; without tiers it does nothing.
        """
        if self.tiering is not None and not self.tiering.flush():
            logger.warning("the cache tiers do not answer: not every cached page was written")

    @property
    def tier_events(self) -> TierEvents | None:
        """What the tiers got and lost; None without tiers. For the engine's thread."""
        return None if self.tiering is None else self.tiering.events

    def tend_tiers(self) -> bool:
        """Copy pages to the cache tiers while the engine is idle; returns whether there are more."""
        tiering = self.tiering
        # An idle engine thread must not refuse, here, a thread that looks at the core.
        if tiering is None or self.has_unfinished or not tiering.has_copies_left:
            return False
        try:
            self._tend_tiers(tiering)
        except ConcurrentCallError:  # another thread is inside: after the next step, then
            return False
        if tiering.has_copies_left:
            tiering.wait_for_buffers()
        return tiering.has_copies_left

    @guarded
    def _tend_tiers(self, tiering: EngineTiering) -> None:
        tiering.tend()

    @guarded
    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Write the cached pages to the tiers that outlive the engine, and close these.

        Without tiers it does nothing. May be called twice; no step may follow.
        """
        if self.tiering is not None and not self.tiering.close(limit_s):
            logger.warning("the cache tiers were not closed within %g s", limit_s)

    @guarded
    def abandon(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Close the tiers and write nothing: the engine has ended by a bug. No step may follow."""
        if self.tiering is not None and not self.tiering.abandon(limit_s):
            logger.warning("the cache tiers were not closed within %g s", limit_s)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or an output is still to be returned."""
        return self.scheduler.has_unfinished or self.lifecycle.has_outputs

    # -- a step ------------------------------------------------------------------------------

    @guarded
    def step(self) -> list[StepOutput]:
        """Run one step; returns the new tokens and ends of requests, also those of recovery.

        Raises:
            OutOfPagesError: leases outside the engine hold the pages that a single request needs.
                Nothing changed: release some and step again, or use `step_or_fail_blocked`.
        """
        self.watchdog.begin(self.recovery.describe_step)
        try:
            self._step()
            self.recovery.maybe_audit()
        except BaseException as error:  # noqa: BLE001 - re-raises KeyboardInterrupt, SystemExit
            self.recovery.recover(error)
        finally:
            self.watchdog.end()
        return self.lifecycle.take_outputs()

    @guarded
    def step_or_fail_blocked(self) -> list[StepOutput]:
        """`step`; on OutOfPagesError, fail the request that found no pages and return nothing."""
        try:
            return self.step()
        except OutOfPagesError as error:
            self.recovery.fail_blocked_request(error)
            return []

    def _step(self) -> None:
        self.recovery.active_requests = ()
        tiering = self.tiering
        if tiering is not None:
            tiering.poll()
            self.scheduler.wake(tiering.take_awake())
        self.pipeline.run()

    @guarded
    def drop_step(self) -> None:
        """Wait for the step that `step` has begun ahead, and drop it; the next `step` computes it again.

        Before weights or executor are replaced. Without overlap no step is in flight between two calls.
        """
        try:
            self.pipeline.drop()
        except BaseException as error:  # noqa: BLE001 - re-raises KeyboardInterrupt, SystemExit
            self.recovery.recover(error)
