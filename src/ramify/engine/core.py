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
from ramify.cache.key import namespace_of
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.advance import TextDecoder, advance, finish_text, take_text
from ramify.engine.intake import check_vocabulary, checked_ids, max_len
from ramify.engine.plan import step_plan
from ramify.engine.recheck import Rechecks
from ramify.engine.request import Request
from ramify.engine.scheduler import Scheduled, Scheduler
from ramify.engine.shaping import Matcher, Shaper
from ramify.engine.speculative import Drafter, drafter_of
from ramify.engine.step import Executor, StepResult
from ramify.errors import CacheError, InvalidParamsError, StepFailedError, UnknownRequestError
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

MAX_FAILURES = 2  # of steps in a row: one with batch mates, who may be at fault, and one alone


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
        self.eos_token_ids, self.namespace = frozenset(eos_token_ids), namespace
        self.cache = PrefixCache(
            config.num_pages, config.page_size, policy=config.asked.cache.policy, clock=clock
        )
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
            tenant: whose it is: tenants share the steps fairly, and never each other's prefixes.
            salt: only requests with the same one share prefixes.
            max_shared: only so many of its first tokens are kept for others; by default all,
                those of the answer included.

        Raises:
            OverloadedError: `max_waiting` requests wait already.
            RequestError: it can never be served. Nothing is queued, others are untouched.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidParamsError("priority", priority, "an integer")
        if max_shared is not None and (not isinstance(max_shared, int) or max_shared < 0):
            raise InvalidParamsError("max_shared", max_shared, "None or a number of tokens >= 0")
        for name, value in (("tenant", tenant), ("salt", salt)):
            if not isinstance(value, str):
                raise InvalidParamsError(name, value, "a text")
        ids = checked_ids(token_ids, self.vocab_size)
        longest = max_len(len(ids), params, self.config)
        check_vocabulary(params, self.vocab_size)
        if params.stop and self._text_decoder is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        self.scheduler.require_place(self.max_waiting, self._clock())
        namespace = self.namespace_for(tenant, salt)
        request = self._new_request(ids, params, namespace, longest)
        request.prompt, request.priority, request.tenant = prompt, priority, tenant
        request.recheck = self._draw.random() < self.rechecks.share
        for index in range(1, params.n):
            branch = self._new_request(
                ids, replace(params, prompt_logprobs=None), namespace, longest
            )
            branch.seed = request.seed + index
            branch.priority, branch.tenant = priority, tenant
            branch.index, branch.leader = index, request
            request.branches.append(branch)
        for one in (request, *request.branches):
            one.sequence.max_shared = max_shared
            one.shaper = self._shaper(one)
        for one in (request, *request.branches):
            self._requests[one.id] = one
            if self._text_decoder is not None:
                one.decoder = self._text_decoder()
        self.scheduler.add(request)
        return request.id

    def namespace_for(self, tenant: str = "", salt: str = "") -> bytes:
        """Where the prefixes of a tenant and salt are cached."""
        if not tenant and not salt:
            return self.namespace
        return namespace_of(base=self.namespace, tenant=tenant, salt=salt)

    def _new_request(
        self, ids: array[int], params: SamplingParams, namespace: bytes, longest: int
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
            namespace=namespace,
            arrival_s=self._clock(),
            sequence=Request.new_sequence(ids[:], namespace, params),
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
        request = self._new_request(ids, params, hit.namespace, len(ids) + 1)
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
        for one in (request, *request.branches):
            if not one.is_finished:
                self._end(one, FinishReason.ABORT)
        return self._settle(request)

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
        """schedule → plan → execute → commit → update; what it did, request by request."""
        self._step()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _step(self) -> None:
        if self.drafter is not None:
            for request, draft in self.drafter.propose(self.scheduler.running):
                request.draft = draft
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return
        now = self._clock()
        for request in scheduled.requests:
            if request.first_step_s is None:
                request.first_step_s = now
        try:
            result = self.executor.execute(step_plan(scheduled))
        except Exception as error:  # noqa: BLE001 - contained here: the step's requests are told
            self._step_failed(scheduled, error)
            return
        except BaseException:  # an interrupt: the engine stays whole for whoever goes on
            self._put_back(scheduled.requests)
            raise
        try:
            self._step_done(scheduled, result)
        except BaseException:  # whoever was not served goes on from what it has; see `_outbox`
            idle = [one for one in self.scheduler.running if not one.sequence.num_uncomputed]
            self._put_back([*scheduled.requests, *idle])
            raise

    def _step_done(self, scheduled: Scheduled, result: StepResult) -> None:
        """Commit what was computed and hand out what was drawn."""
        if result.failed:
            self._some_failed(scheduled, result.failed)
        served = [one for one in scheduled.requests if one.sequence.num_planned]
        starts, kept, news = [], [], {}
        for request in served:
            sequence = request.sequence
            num_planned = sequence.num_planned
            starts.append(sequence.num_computed)
            if request.id in result.drawn:
                news[request.id] = advance(request, result.drawn[request.id])
                num_planned -= len(request.draft) + 1 - news[request.id][0]
            kept.append(num_planned)
        self.planner.commit([request.sequence for request in served], kept)
        self.num_steps += 1
        self.num_computed_tokens += scheduled.batch.num_tokens
        for request, start in zip(served, starts, strict=True):
            request.note_computed(start)
            request.prompt_logprobs.extend(result.scored.get(request.id, ()))
            if request.id in news:
                self._served(request, news[request.id], result)

    def _served(
        self, request: Request, new: tuple[int, FinishReason | None], result: StepResult
    ) -> None:
        """A request has new tokens, whose K/V but the last one's is committed."""
        sequence = request.sequence
        if request.draft:
            del sequence.tokens[sequence.num_computed :]
            if self.drafter is not None:
                num_right = len(result.drawn[request.id].token_ids) - 1
                self.drafter.verified(request, min(num_right, new[0]))
            request.draft = ()
        branches = [
            one for one in request.branches if one.id in result.drawn and not one.output_ids
        ]
        for one in branches:
            self._branch_off(one, request)
        self._go_on(request, *new)
        for one in branches:
            self._go_on(one, *advance(one, result.drawn[one.id]))

    def _go_on(self, request: Request, num_new: int, reason: FinishReason | None) -> None:
        """Tell the new tokens of a request, which ends for a reason, or is computed further."""
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        request.failures = 0
        if reason is None:
            request.sequence.tokens.append(request.output_ids[-1])
        else:
            self._end(request, reason)
        self._tell(request, num_new)

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
        except BaseException:
            self.planner.release([twin])
            raise
        branch.sequence = twin
        self.scheduler.join(branch)

    def _tell(self, request: Request, num_new: int) -> None:
        leader = request.group
        output = self._settle(leader) if leader.has_ended and not leader.is_settled else None
        if leader.id not in self.rechecks.running:
            asked = request.params.logprobs is not None
            self._outbox.append(
                StepOutput(
                    leader.id,
                    tuple(request.output_ids[len(request.output_ids) - num_new :]),
                    output,
                    request.index,
                    take_text(request),
                    tuple(request.logprobs[-num_new:]) if asked and num_new else (),
                    request.finish_reason,
                    leader.cache_report(cache_on=self.planner.share)
                    if request is leader and 0 < num_new == len(request.output_ids)
                    else None,
                )
            )
        elif output is not None:
            self.rechecks.settle(leader.id, leader.prompt_logprobs)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request or branch, once: nothing of it stays but published pages."""
        self.scheduler.remove(request)
        request.finish_reason, request.end_s = finish_text(request, reason), self._clock()
        if request.leader is not None:
            del self._requests[request.id]  # a leader is known until all its answers have ended
        if request.recheck:
            self.rechecks.note(request)

    def _settle(self, leader: Request) -> RequestOutput:
        """The output of a request that has ended, branches included; made once."""
        leader.is_settled = True
        del self._requests[leader.id]
        return leader.output(cache_on=self.planner.share)

    # -- when a step fails -------------------------------------------------------------------

    def _step_failed(self, scheduled: Scheduled, error: Exception) -> None:
        logger.warning("a step of %d requests failed: %s", len(scheduled.requests), error)
        self._put_back(scheduled.requests)
        for request in scheduled.requests:
            self._blame(request, error)

    def _some_failed(self, scheduled: Scheduled, errors: dict[int, Exception]) -> None:
        """Some requests of a step failed: they and those that read their pages do not count."""
        failed = {}
        for request in scheduled.requests:
            names = [one.id for one in (request, *request.waiting_branches) if one.id in errors]
            if names:
                failed[request] = errors[names[0]]
        total = len(scheduled.requests)
        first = next(iter(failed.values()))
        logger.warning("%d of %d requests of a step failed: %s", len(failed), total, first)
        self._put_back(list(failed))
        for request, error in failed.items():
            self._blame(request, error)

    def _blame(self, request: Request, error: Exception) -> None:
        """Count a failure; a request that failed too often ends, its waiting branches too."""
        request.failures += 1
        if request.failures < MAX_FAILURES:
            return
        for one in (request, *request.waiting_branches):
            one.error = StepFailedError(
                f"request {one.group.id} was in {request.failures} failed steps, the limit is "
                f"{MAX_FAILURES}; the last one failed with {type(error).__name__}: {error}"
            )
            one.error.__cause__ = error
            self._end(one, FinishReason.ERROR)
            self._tell(one, 0)

    def _put_back(self, requests: Sequence[Request]) -> None:
        """Nothing of a step counts for these: its pages are erased, they wait again."""
        page_size, running = self.config.page_size, self.scheduler.running
        held = {}
        for one in running:
            if one.sequence.row is not None:
                pages = self.table.pages(one.sequence.row)
                held[id(one.sequence)] = pages[one.sequence.num_computed // page_size :]
        planned = [one.sequence for one in requests if one.sequence.row is not None]
        back = set(map(id, self.planner.abandon(planned)))
        self.executor.erase_pages(sorted({page for key in back for page in held[key]}))
        self.scheduler.send_back([one for one in running if id(one.sequence) in back])
