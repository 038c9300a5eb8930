"""The engine without tensors: requests in, steps planned, carried out, committed and told."""

from __future__ import annotations

import logging
import random
import secrets
import time
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache import Salt
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.advance import TextDecoder, advance, finish_text, take_text
from ramify.engine.faults import Faults
from ramify.engine.intake import check_options, check_vocabulary, checked_ids, max_len
from ramify.engine.places import Places
from ramify.engine.plan import step_plan
from ramify.engine.recheck import Rechecks
from ramify.engine.request import Request
from ramify.engine.scheduler import Scheduled, Scheduler
from ramify.engine.shaping import Matcher, Shaper
from ramify.engine.speculative import Drafter, drafter_of, guess
from ramify.engine.step import Executor, StepPlan, StepResult
from ramify.engine.watchdog import Watchdog
from ramify.errors import CacheError, InvalidParamsError, UnknownRequestError
from ramify.kv.block_table import PagedBlockTable
from ramify.params import (
    CacheReport,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one answer of a request.

    `text` and `logprobs` are what may be shown at once: text that may still turn out to begin a
    stop text comes later. `output` is there when all answers of the request have ended. Unpacks to
    (request_id, list of new token ids, whether the request has ended).
    """

    request_id: int
    new_token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    index: int = 0  # of the answer
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None  # of this answer, when it has ended
    cache: CacheReport | None = None  # with the first tokens of the first answer

    def __iter__(self) -> Iterator[Any]:
        return iter((self.request_id, list(self.new_token_ids), self.output is not None))


class EngineCore:
    """Single-threaded by contract: whoever owns it calls `step` until nothing is unfinished.

    Args:
        config: sizes; `config.asked` says whether prefixes are shared.
        executor: carries out the steps.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own ends of sequence.
        namespace: what the K/V depends on beside the tokens: model, weights, dtype.
        text_decoder: makes a decoder per request; None when the model has no tokenizer.
        drafter: guesses tokens; None for the one that `config` asks for, if any.
        formats: makes a matcher for one answer; None when there is no structured output.
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
        text_decoder: Callable[[], TextDecoder] | None = None,
        drafter: Drafter | None = None,
        formats: Callable[[StructuredOutput], Matcher] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.executor, self.vocab_size = config, executor, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.places = Places(namespace, config.page_size)
        self.cache = PrefixCache(
            config.num_pages, config.page_size, policy=config.asked.cache.policy, clock=clock
        )
        self.start_over()
        self.faults = Faults(self, config.asked.faults)
        self.watchdog = Watchdog(config.asked.faults.step_timeout_s)
        self.rechecks = Rechecks(config.asked.attention.verify_sample)
        self._draw = random.Random()  # noqa: S311  # which requests are checked is no secret
        self.max_waiting = config.asked.scheduler.max_waiting
        self.num_steps = 0
        self.num_computed_tokens = 0  # query rows of all steps so far
        self.drafter = drafter or drafter_of(config, self.cache)
        self._text_decoder, self._clock, self._formats = text_decoder, clock, formats
        self._requests: dict[int, Request] = {}
        self._outbox: list[StepOutput] = []  # not told yet: more than one step's after an interrupt
        self._ids = count()

    def start_over(self) -> None:
        """Empty table, planner and queues over the cache as it is; nobody's requests are told."""
        config = self.config
        width = min(config.max_pages_per_seq, config.num_pages)
        self.table = PagedBlockTable(config.max_num_seqs, width, config.page_size)
        self.planner = RadixAttentionPlanner(
            self.cache, self.table, share=config.asked.cache.prefix_cache
        )
        self.scheduler = Scheduler(
            self.planner,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            coalesce_steps=config.asked.scheduler.coalesce_steps,
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
                (`places`).
            salt: only requests with the same one share prefixes, but for public ones.
            max_shared: only so many of its first tokens are kept for others; by default all,
                those of the answer included.

        Raises:
            OverloadedError: `max_waiting` requests wait already.
            RequestError: it can never be served. Nothing is queued, others are untouched.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams")
        check_options(priority, tenant, salt, max_shared)
        ids = checked_ids(token_ids, self.vocab_size)
        longest = max_len(len(ids), params, self.config)
        check_vocabulary(params, self.vocab_size)
        if params.stop and self._text_decoder is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        self.scheduler.require_place(self.max_waiting, self._clock())
        self.scheduler.require_tokens(len(ids), self._clock())
        place = self.places.of(ids, tenant, salt)
        request = self._new_request(ids, params, place, longest)
        request.prompt, request.priority, request.tenant = prompt, priority, tenant
        request.recheck = self.sampled(self.rechecks.share)
        for index in range(1, params.n):
            branch = self._new_request(ids, replace(params, prompt_logprobs=None), place, longest)
            branch.seed = request.seed + index
            branch.priority, branch.tenant = priority, tenant
            branch.index, branch.leader = index, request
            request.branches.append(branch)
        answers = (request, *request.branches)
        for one in answers:
            one.sequence.max_shared = max_shared
            self.renew(one)
        try:
            self._requests.update((one.id, one) for one in answers)
            self.scheduler.add(request)
        except BaseException:  # an interrupt: as if it had not come
            self.scheduler.waiting.take_back(request)
            for one in answers:
                self._requests.pop(one.id, None)
            raise
        return request.id

    def renew(self, request: Request) -> None:
        """Give a request a shaper, and a decoder that knows its tokens so far.

        At its beginning, and in place of those that broke off in the middle of a call.
        """
        request.shaper = self._shaper(request)
        if self._text_decoder is not None:
            request.decoder = self._text_decoder()
            ends = isinstance(request.stop_reason, int)  # in a token that is no text
            for token in request.output_ids[: -1 if ends else None]:
                request.decoder.step(token)

    def sampled(self, share: float) -> bool:
        """Whether something that is done to a share of all cases is done to this one."""
        return self._draw.random() < share

    def prepare(self, params: SamplingParams) -> None:
        """Compile the format that params ask for, so that `add_request` finds it compiled.

        Any thread may call it: it takes long, and nobody's answer should wait for it.

        Raises:
            RequestError: the format cannot be followed.
        """
        if params.structured is not None and self._formats is not None:
            self._formats(params.structured)

    def _new_request(
        self,
        ids: array[int],
        params: SamplingParams,
        place: tuple[bytes, tuple[Salt, ...]],
        longest: int,
    ) -> Request:
        stop_ids = frozenset(params.stop_token_ids)
        return Request(
            id=next(self._ids),
            prompt=None,
            prompt_ids=ids,
            params=params,
            max_len=longest,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            namespace=place[0],
            salts=place[1],
            arrival_s=self._clock(),
            sequence=Request.new_sequence(ids[:], *place, params),
        )

    def _shaper(self, request: Request) -> Shaper | None:
        params, matcher = request.params, None
        if params.structured is not None:
            if self._formats is None:
                allowed = "None: the model has no tokenizer"
                raise InvalidParamsError("structured", "given", allowed)
            matcher = self._formats(params.structured)
        return Shaper.if_needed(
            request.prompt_ids,
            params,
            stop_ids=request.stop_ids,
            vocab_size=self.vocab_size,
            matcher=matcher,
        )

    def recheck(self) -> bool:
        """Queue a sampled hit to be computed again, cold; whether there was one. When idle.

        For whoever drives `step`, when there is nothing else to do and free pages suffice: nothing
        is evicted for it. Nobody hears of it but `rechecks`.
        """
        if not self.rechecks.pending or self.has_unfinished:
            return False
        needed = -(-len(self.rechecks.pending[0].token_ids) // self.config.page_size)
        if self.cache.stats().free_pages < needed:
            return False  # it would evict what others may want
        hit = self.rechecks.pending.popleft()
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        ids = array("i", hit.token_ids[: self.config.max_model_len - 1])
        request = self._new_request(ids, params, (hit.namespace, ()), len(ids) + 1)
        request.sequence.max_shared = 0  # what the first one did not share is not shared by this
        self._requests[request.id] = request
        self.rechecks.running[request.id] = hit
        self.scheduler.add(request)
        return True

    def abort(self, request_id: int) -> RequestOutput:
        """End a live request now; what it computed stays warm.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self._requests.get(request_id) if isinstance(request_id, int) else None
        if request is None or request.leader is not None or request.is_settled:
            raise UnknownRequestError(request_id)
        self.faults.involved = ()
        while not request.has_ended:
            try:
                for one in (request, *request.branches):
                    if not one.is_finished:
                        self._end(one, FinishReason.ABORT)
            except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
                self.faults.contain(error)
        told = [one for one in self._outbox if one.request_id == request_id]
        self._outbox = [one for one in self._outbox if one.request_id != request_id]
        settled = [one.output for one in told if one.output is not None]  # by a repair
        return settled[0] if settled else self._settle(request)

    def answers_of(self, request_id: int) -> tuple[Request, ...]:
        """A live request and its branches, by index; none if it is not live."""
        request = self._requests.get(request_id)
        return () if request is None else (request, *request.branches)

    @property
    def live(self) -> list[Request]:
        """Requests and branches whose caller was not told all yet, oldest first."""
        return list(self._requests.values())

    def forget(self, request_ids: Container[int]) -> None:
        """Tell nobody what is not told yet of these requests: their caller has given up."""
        self._outbox = [one for one in self._outbox if one.request_id not in request_ids]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_unfinished or bool(self._outbox)

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """schedule → plan → execute → commit → update; what it did, request by request.

        Raises:
            OutOfPagesError: leases outside the engine hold the pages that a single request needs;
                nothing changed. Release some, or ask `faults.end_blocked`.
        """
        self.watchdog.begin(self.faults.describe)
        try:
            self._step()
            self.faults.maybe_check()
        except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
            self.faults.contain(error)
        finally:
            self.watchdog.end()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _step(self) -> None:
        self.faults.involved = ()
        planned = self._planned()
        if planned is None:
            return
        scheduled, plan = planned
        try:
            result = self.executor.execute(plan)
        except BaseException as error:  # noqa: BLE001 - raises again what is no Exception
            self.faults.step_failed(scheduled, error)
            return
        self._step_done(scheduled, result)
        self.faults.step_succeeded()

    def _planned(self) -> tuple[Scheduled, StepPlan] | None:
        """The next step, if there is anything to do."""
        if self.drafter is not None:
            guess(self.drafter, self.scheduler.running)
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return None
        self.faults.involved = scheduled.requests
        now = self._clock()
        for request in scheduled.requests:
            if request.first_step_s is None:
                request.first_step_s = now
        return scheduled, step_plan(scheduled)

    def _step_done(self, scheduled: Scheduled, result: StepResult) -> None:
        """Commit what was computed and hand out what was drawn."""
        if result.failed:
            self.faults.some_failed(scheduled, result.failed)
        served = [one for one in scheduled.requests if one.sequence.num_planned]
        starts, kept = [], []
        for request in served:
            num_planned = request.sequence.num_planned
            starts.append(request.sequence.num_computed)
            if request.id in result.drawn:
                num_drawn = len(result.drawn[request.id].token_ids)
                num_planned -= len(request.draft) + 1 - num_drawn
            kept.append(num_planned)
        self.planner.commit([request.sequence for request in served], kept)
        self.num_steps += 1
        self.num_computed_tokens += scheduled.batch.num_tokens
        for request, start in zip(served, starts, strict=True):
            self.faults.involved = (request,)
            request.note_computed(start)
            request.prompt_logprobs.extend(result.scored.get(request.id, ()))
            if request.id in result.drawn:
                self._served(request, result)

    def _served(self, request: Request, result: StepResult) -> None:
        """A request has new tokens, whose K/V but the last one's is committed."""
        sequence, num_known = request.sequence, len(request.output_ids)
        branches = [one for one in request.waiting_branches if one.id in result.drawn]
        self._advance(request, result)
        if request.draft:
            del sequence.tokens[sequence.num_computed :]
            if self.drafter is not None:
                num_right = len(result.drawn[request.id].token_ids) - 1
                self.drafter.verified(request, min(num_right, len(request.output_ids) - num_known))
            request.draft = ()
        for one in branches:
            self._branch_off(one, request)
        self._go_on(request)
        for one in branches:
            self._advance(one, result)
            self._go_on(one)

    def _advance(self, request: Request, result: StepResult) -> None:
        """Add what was drawn; from now on a request stands for its answer's end, if that is it."""
        try:
            advance(request, result.drawn[request.id])
        except Exception as error:  # noqa: BLE001 - a decoder's; only its own text is lost
            self.faults.text_failed(request, error)

    def _go_on(self, request: Request) -> None:
        """Tell the new tokens of a request, which ends if it must, or is computed further."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        self.faults.acquit(request)
        if request.ending is None:
            request.sequence.tokens.append(request.output_ids[-1])
        else:
            self._end(request, request.ending)
        self.tell(request)

    def _branch_off(self, branch: Request, leader: Request) -> None:
        """Let a branch go on from its leader's prompt: with the same pages, or back in the queue."""
        branch.first_step_s = leader.first_step_s
        branch.max_computed = leader.max_computed
        branch.report = leader.report
        try:
            twin, pairs = self.planner.fork(leader.sequence)
        except CacheError:  # no row or no page: it is admitted like any other, its prompt is warm
            self.scheduler.add(branch)
            return
        try:
            if pairs:
                self.executor.copy_pages(pairs)
        except Exception as error:  # noqa: BLE001 - out of memory, say: it can do without
            logger.warning("pages of request %d were not copied: %s", leader.id, error)
            self.planner.release([twin])
            self.scheduler.add(branch)
            return
        branch.sequence = twin
        self.scheduler.join(branch)

    def tell(self, request: Request) -> None:
        """Put what is new of a request into the outbox, its end included."""
        leader, asked = request.group, request.params.logprobs is not None
        output = self._settle(leader) if leader.has_ended and not leader.is_settled else None
        start, request.num_told = request.num_told, len(request.output_ids)
        request.is_told = request.is_finished
        if leader.id not in self.rechecks.running:
            self._outbox.append(
                StepOutput(
                    leader.id,
                    tuple(request.output_ids[start:]),
                    output,
                    request.index,
                    take_text(request),
                    tuple(request.logprobs[start:]) if asked else (),
                    request.finish_reason,
                    leader.cache_report(cache_on=self.planner.share)
                    if request is leader and start == 0 < request.num_told
                    else None,
                )
            )
        elif output is not None:
            self.rechecks.settle(leader.id, leader.prompt_logprobs)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request or branch, once: nothing of it stays but published pages."""
        request.ending = reason
        self.scheduler.remove(request)
        self.close(request)

    def close(self, request: Request) -> None:
        """Settle text and reason of a request that ends and holds nothing any more."""
        assert request.ending is not None
        try:
            reason = finish_text(request, request.ending)
        except Exception as error:  # noqa: BLE001 - a decoder's; only its own text is lost
            reason = self.faults.text_failed(request, error)
        request.end_s = self._clock()
        request.finish_reason = reason
        if request.recheck:
            self.rechecks.note(request)

    def _settle(self, leader: Request) -> RequestOutput:
        """The output of a request that has ended, branches included; made once."""
        output = leader.output(cache_on=self.planner.share)
        leader.is_settled = True
        for one in (leader, *leader.branches):
            del self._requests[one.id]
        return output

    def fail(self, request: Request, error: Exception) -> None:
        """End a request or branch with an error, and tell."""
        request.error = error
        self._end(request, FinishReason.ERROR)
        self.tell(request)
