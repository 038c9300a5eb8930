"""The engine without tensors: requests in, steps planned, carried out, committed and told."""

from __future__ import annotations

import logging
import random
import secrets
import time
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import count

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache import Salt
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.failure_recovery import FailureRecovery
from ramify.engine.hit_verifier import HitVerifier
from ramify.engine.logits.logits_processors import GrammarMatcher, LogitsProcessor
from ramify.engine.output_processor import (
    IncrementalDetokenizer,
    append_sampled_tokens,
    flush_held_text,
    take_stable_text,
)
from ramify.engine.prefix_namespaces import PrefixNamespaces
from ramify.engine.request import Request
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
from ramify.errors import CacheError, InvalidParamsError, UnknownRequestError
from ramify.kv.block_table import PagedBlockTable
from ramify.outputs import FinishReason, RequestOutput, StepOutput
from ramify.params import SamplingParams, StructuredOutput

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
        self.config, self.executor, self.vocab_size = config, executor, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.namespaces = PrefixNamespaces(namespace, config.page_size)
        self.cache = PrefixCache(
            config.num_pages, config.page_size, policy=config.requested.cache.policy, clock=clock
        )
        self.start_over()
        self.recovery = FailureRecovery(self, config.requested.self_check)
        self.watchdog = Watchdog(config.requested.self_check.step_timeout_s)
        self.hit_verifier = HitVerifier(config.requested.attention.verify_sample)
        self._rng = random.Random()  # noqa: S311  # which requests are checked is no secret
        self.max_waiting = config.requested.scheduler.max_waiting
        self.num_steps = 0
        self.num_computed_tokens = 0  # query rows of all steps so far
        self.drafter = drafter or create_drafter(config, self.cache)
        self._detokenizer_factory, self._clock, self._grammar_compiler = (
            detokenizer_factory,
            clock,
            grammar_compiler,
        )
        self._requests: dict[int, Request] = {}
        self._outputs: list[
            StepOutput
        ] = []  # not told yet: more than one step's after an interrupt
        self._ids = count()

    def start_over(self) -> None:
        """Empty table, planner and queues over the cache as it is; nobody's requests are told."""
        config = self.config
        width = min(config.max_pages_per_seq, config.num_pages)
        self.table = PagedBlockTable(config.max_num_seqs, width, config.page_size)
        self.planner = RadixAttentionPlanner(
            self.cache, self.table, share=config.requested.cache.prefix_cache
        )
        self.scheduler = Scheduler(
            self.planner,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            coalesce_steps=config.requested.scheduler.coalesce_steps,
        )

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
        if params.stop and self._detokenizer_factory is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        self.scheduler.check_queue_len(self.max_waiting, self._clock())
        self.scheduler.check_queued_tokens(len(ids), self._clock())
        place = self.namespaces.scope_of(ids, tenant, salt)
        request = self._new_request(ids, params, place, longest)
        request.prompt, request.priority, request.tenant = prompt, priority, tenant
        request.verify_cold = self.chance(self.hit_verifier.share)
        for index in range(1, params.n):
            branch = self._new_request(ids, replace(params, prompt_logprobs=None), place, longest)
            branch.seed = request.seed + index
            branch.priority, branch.tenant = priority, tenant
            branch.index, branch.parent = index, request
            request.children.append(branch)
        answers = (request, *request.children)
        for one in answers:
            one.sequence.max_shared = max_shared
            self.rebuild_text_state(one)
        try:
            self._requests.update((one.id, one) for one in answers)
            self.scheduler.add(request)
        except BaseException:  # an interrupt: as if it had not come
            self.scheduler.waiting.undo_add(request)
            for one in answers:
                self._requests.pop(one.id, None)
            raise
        return request.id

    def rebuild_text_state(self, request: Request) -> None:
        """Give a request a shaper, and a decoder that knows its tokens so far.

        At its beginning, and in place of those that broke off in the middle of a call.
        """
        request.logits_processor = self._create_logits_processor(request)
        if self._detokenizer_factory is not None:
            request.detokenizer = self._detokenizer_factory()
            ends = isinstance(request.stop_reason, int)  # in a token that is no text
            for token in request.output_ids[: -1 if ends else None]:
                request.detokenizer.step(token)

    def chance(self, share: float) -> bool:
        """Whether something that is done to a share of all cases is done to this one."""
        return self._rng.random() < share

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the format that params ask for, so that `add_request` finds it compiled.

        Any thread may call it: it takes long, and nobody's answer should wait for it.

        Raises:
            RequestError: the format cannot be followed.
        """
        if params.structured is not None and self._grammar_compiler is not None:
            self._grammar_compiler(params.structured)

    def _new_request(
        self,
        ids: array[int],
        params: SamplingParams,
        scope: tuple[bytes, tuple[Salt, ...]],
        max_len: int,
    ) -> Request:
        stop_ids = frozenset(params.stop_token_ids)
        return Request(
            id=next(self._ids),
            prompt=None,
            prompt_ids=ids,
            params=params,
            max_len=max_len,
            stop_token_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            namespace=scope[0],
            salts=scope[1],
            arrival_s=self._clock(),
            sequence=Request.new_sequence(ids[:], *scope, params),
        )

    def _create_logits_processor(self, request: Request) -> LogitsProcessor | None:
        params, matcher = request.params, None
        if params.structured is not None:
            if self._grammar_compiler is None:
                allowed = "None: the model has no tokenizer"
                raise InvalidParamsError("structured", "given", allowed)
            matcher = self._grammar_compiler(params.structured)
        return LogitsProcessor.create_if_needed(
            request.prompt_ids,
            params,
            stop_token_ids=request.stop_token_ids,
            vocab_size=self.vocab_size,
            matcher=matcher,
        )

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
        request = self._new_request(ids, params, (hit.namespace, ()), len(ids) + 1)
        request.sequence.max_shared = 0  # what the first one did not share is not shared by this
        self._requests[request.id] = request
        self.hit_verifier.running[request.id] = hit
        self.scheduler.add(request)
        return True

    def abort(self, request_id: int) -> RequestOutput:
        """End a live request now; what it computed stays warm.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self._requests.get(request_id) if isinstance(request_id, int) else None
        if request is None or request.parent is not None or request.has_output:
            raise UnknownRequestError(request_id)
        self.recovery.active_requests = ()
        while not request.has_ended:
            try:
                for one in (request, *request.children):
                    if not one.is_finished:
                        self.finish(one, FinishReason.ABORT)
            except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
                self.recovery.recover(error)
        told = [one for one in self._outputs if one.request_id == request_id]
        self._outputs = [one for one in self._outputs if one.request_id != request_id]
        settled = [one.output for one in told if one.output is not None]  # by a repair
        return settled[0] if settled else self._make_output(request)

    def group_of(self, request_id: int) -> tuple[Request, ...]:
        """A live request and its branches, by index; none if it is not live."""
        request = self._requests.get(request_id)
        return () if request is None else (request, *request.children)

    @property
    def live(self) -> list[Request]:
        """Requests and branches whose caller was not told all yet, oldest first."""
        return list(self._requests.values())

    def discard_outputs(self, request_ids: Container[int]) -> None:
        """Tell nobody what is not told yet of these requests: their caller has given up."""
        self._outputs = [one for one in self._outputs if one.request_id not in request_ids]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_unfinished or bool(self._outputs)

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
        outputs, self._outputs = self._outputs, []
        return outputs

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
        self.num_steps += 1
        self.num_computed_tokens += scheduled.batch.num_tokens
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
            if self.drafter is not None:
                num_right = len(result.sampled[request.id].token_ids) - 1
                self.drafter.verified(request, min(num_right, len(request.output_ids) - num_known))
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
            self.recovery.detokenize_failed(request, error)

    def _continue_or_finish(self, request: Request) -> None:
        """Tell the new tokens of a request, which ends if it must, or is computed further."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        self.recovery.on_progress(request)
        if request.pending_finish_reason is None:
            request.sequence.tokens.append(request.output_ids[-1])
        else:
            self.finish(request, request.pending_finish_reason)
        self.emit(request)

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

    def emit(self, request: Request) -> None:
        """Put what is new of a request into the outbox, its end included."""
        leader, asked = request.parent_or_self, request.params.logprobs is not None
        output = self._make_output(leader) if leader.has_ended and not leader.has_output else None
        start, request.num_tokens_emitted = request.num_tokens_emitted, len(request.output_ids)
        request.end_emitted = request.is_finished
        if leader.id not in self.hit_verifier.running:
            self._outputs.append(
                StepOutput(
                    leader.id,
                    tuple(request.output_ids[start:]),
                    output,
                    request.index,
                    take_stable_text(request),
                    tuple(request.logprobs[start:]) if asked else (),
                    request.finish_reason,
                    leader.cache_report(cache_on=self.planner.share)
                    if request is leader and start == 0 < request.num_tokens_emitted
                    else None,
                )
            )
        elif output is not None:
            self.hit_verifier.compare(leader.id, leader.prompt_logprobs)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request or branch, once: nothing of it stays but published pages."""
        request.pending_finish_reason = reason
        self.scheduler.remove(request)
        self.finalize(request)

    def finalize(self, request: Request) -> None:
        """Settle text and reason of a request that ends and holds nothing any more."""
        assert request.pending_finish_reason is not None
        try:
            reason = flush_held_text(request, request.pending_finish_reason)
        except Exception as error:  # noqa: BLE001 - a decoder's; only its own text is lost
            reason = self.recovery.detokenize_failed(request, error)
        request.end_s = self._clock()
        request.finish_reason = reason
        if request.verify_cold:
            self.hit_verifier.record(request)

    def _make_output(self, parent: Request) -> RequestOutput:
        """The output of a request that has ended, branches included; made once."""
        output = parent.output(cache_on=self.planner.share)
        parent.has_output = True
        for one in (parent, *parent.children):
            del self._requests[one.id]
        return output

    def fail(self, request: Request, error: Exception) -> None:
        """End a request or branch with an error, and tell."""
        request.error = error
        self.finish(request, FinishReason.ERROR)
        self.emit(request)
