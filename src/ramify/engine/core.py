"""The engine without tensors: requests in, steps planned, carried out, committed and told."""

from __future__ import annotations

import logging
import random
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from ramify.attention.planner import RadixAttentionPlanner
from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.recheck import Rechecks
from ramify.engine.request import Request
from ramify.engine.scheduler import Scheduled, Scheduler
from ramify.engine.step import Draw, Executor, Score, StepPlan, StepResult
from ramify.errors import (
    EmptyPromptError,
    InvalidParamsError,
    PromptTooLongError,
    RequestTooLargeError,
    StepFailedError,
    TokenOutOfRangeError,
    UnknownRequestError,
)
from ramify.kv.block_table import PagedBlockTable
from ramify.params import FinishReason, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

MAX_FAILURES = 2  # of steps in a row: one with batch mates, who may be at fault, and one alone


class TextDecoder(Protocol):
    """Turns one request's tokens into text as they come."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; it may be empty."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request; `output` is there when it has ended."""

    request_id: int
    new_token_ids: tuple[int, ...]
    output: RequestOutput | None


class EngineCore:
    """Single-threaded by contract: whoever owns it calls `step` until nothing is unfinished.

    Args:
        config: sizes; `config.asked` says whether prefixes are shared.
        executor: carries out the steps.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own ends of sequence.
        namespace: what the K/V depends on beside the tokens: model, weights, dtype.
        text_decoder: makes a decoder per request; None when the model has no tokenizer.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.executor, self.vocab_size = config, executor, vocab_size
        self.eos_token_ids, self.namespace = frozenset(eos_token_ids), namespace
        self.cache = PrefixCache(
            config.num_pages, config.page_size, policy=config.asked.cache.policy
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
        )
        self.rechecks = Rechecks(config.asked.attention.verify_sample)
        self._draw = random.Random()  # noqa: S311  # which requests are checked is no secret
        self.num_steps = 0
        self.num_computed_tokens = 0  # query rows of all steps so far
        self._text_decoder, self._clock = text_decoder, clock
        self._decoders: dict[int, TextDecoder] = {}
        self._requests: dict[int, Request] = {}
        self._ids = count()

    # -- requests ----------------------------------------------------------------------------

    def add_request(
        self, token_ids: Sequence[int], params: SamplingParams, *, prompt: str | None = None
    ) -> int:
        """Queue a request; returns its id.

        Raises:
            RequestError: it can never be served. Nothing is queued, others are untouched.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "SamplingParams")
        ids = self._checked_ids(token_ids)
        max_len = self._max_len(len(ids), params)
        if params.stop and self._text_decoder is None:
            raise InvalidParamsError("stop", params.stop, "empty: the model has no tokenizer")
        request_id = next(self._ids)
        stop_ids = frozenset(params.stop_token_ids)
        sequence = Request.new_sequence(array("i", ids), self.namespace, params)
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_ids=ids,
            params=params,
            max_len=max_len,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_token_ids,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            namespace=self.namespace,
            arrival_s=self._clock(),
            sequence=sequence,
        )
        request.recheck = self._draw.random() < self.rechecks.share
        if self._text_decoder is not None:
            self._decoders[request_id] = self._text_decoder()
        self._queue(request)
        return request_id

    def _queue(self, request: Request) -> None:
        self._requests[request.id] = request
        self.scheduler.add(request)

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
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        ids = array("i", hit.token_ids[: self.config.max_model_len - 1])
        request = Request(
            id=next(self._ids),
            prompt=None,
            prompt_ids=ids,
            params=params,
            max_len=len(ids) + 1,
            stop_ids=frozenset(),
            seed=0,
            namespace=hit.namespace,
            arrival_s=self._clock(),
            sequence=Request.new_sequence(ids[:], hit.namespace, params),
        )
        self.rechecks.running[request.id] = hit
        self._queue(request)
        return True

    def abort(self, request_id: int) -> RequestOutput:
        """End a live request now; what it computed stays warm.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self._requests.get(request_id) if isinstance(request_id, int) else None
        if request is None:
            raise UnknownRequestError(request_id)
        return self._end(request, FinishReason.ABORT)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_unfinished

    def _checked_ids(self, token_ids: Sequence[int]) -> array[int]:
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
            raise InvalidParamsError("prompt", token_ids, "text or a sequence of token ids")
        ids = list(token_ids)
        if not ids:
            raise EmptyPromptError
        for kind in set(map(type, ids)):  # few, however long the prompt is
            if kind is bool or not issubclass(kind, int | np.integer):
                place = next(place for place, token in enumerate(ids) if type(token) is kind)
                raise InvalidParamsError(f"prompt[{place}]", ids[place], "an integer token id")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            outside = (place for place, one in enumerate(ids) if not 0 <= one < self.vocab_size)
            position = next(outside)
            raise TokenOutOfRangeError(int(ids[position]), position, self.vocab_size)
        return array("i", ids)

    def _max_len(self, num_prompt: int, params: SamplingParams) -> int:
        limit = self.config.max_model_len
        if num_prompt >= limit:
            raise PromptTooLongError(num_prompt, limit)
        page_size, num_pages = self.config.page_size, self.config.num_pages
        if params.max_tokens is None:  # as long as context and pool allow
            asked = min(limit, max(num_prompt, num_pages * page_size) + 1)
        else:
            asked = min(limit, num_prompt + params.max_tokens)
        pages = -(-(asked - 1) // page_size)  # the last token's K/V is never needed
        if pages > num_pages:
            raise RequestTooLargeError(num_prompt, asked - num_prompt, num_pages, page_size)
        return asked

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """schedule → plan → execute → commit → update; what it did, request by request."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        now = self._clock()
        for request in scheduled.requests:
            if request.first_step_s is None:
                request.first_step_s = now
        try:
            plan = self._step_plan(scheduled)
            result = self.executor.execute(plan)
        except Exception as error:  # noqa: BLE001 - contained here: the step's requests are told
            return self._step_failed(scheduled, error)
        except BaseException:  # an interrupt: the engine stays whole for whoever goes on
            self._put_back(scheduled)
            raise
        starts = [request.sequence.num_computed for request in scheduled.requests]
        self.planner.commit([request.sequence for request in scheduled.requests])
        self.num_steps += 1
        self.num_computed_tokens += plan.batch.num_tokens
        outputs = []
        for request, start in zip(scheduled.requests, starts, strict=True):
            sequence = request.sequence
            request.note_computed(start)
            if request.id in result.scored:
                request.prompt_logprobs.extend(result.scored[request.id])
            if sequence.num_uncomputed == 0:
                hidden = request.id in self.rechecks.running
                output = self._advance(request, result)
                if not hidden:
                    outputs.append(output)
        return outputs

    def _step_plan(self, scheduled: Scheduled) -> StepPlan:
        batch = scheduled.batch
        ids = np.empty(batch.num_tokens, np.int64)
        draws, scores = [], []
        for index, request in enumerate(scheduled.requests):
            sequence, params = request.sequence, request.params
            start, stop = int(batch.cu_seqlens_q[index]), int(batch.cu_seqlens_q[index + 1])
            begin, end = sequence.num_computed, sequence.num_computed + stop - start
            ids[start:stop] = np.frombuffer(sequence.tokens[begin:end], np.int32)
            if end == len(sequence.tokens):
                draws.append(
                    Draw(
                        request.id,
                        stop - 1,
                        end,
                        request.seed,
                        params.temperature,
                        params.top_k,
                        params.top_p,
                        0 if params.logprobs is None and request.recheck else params.logprobs,
                    )
                )
            if params.prompt_logprobs is not None:
                first = max(begin, len(request.prompt_logprobs))
                targets = request.prompt_ids[first + 1 : end + 1]
                if targets:
                    score = Score(
                        request.id, start + first - begin, tuple(targets), params.prompt_logprobs
                    )
                    scores.append(score)
        return StepPlan(batch, ids, tuple(draws), tuple(scores))

    def _advance(self, request: Request, result: StepResult) -> StepOutput:
        """One new token: append it, and end the request if it is the last."""
        drawn = result.drawn[request.id]
        token = drawn.token_id
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        request.failures = 0
        request.output_ids.append(token)
        if drawn.logprob is not None:
            request.logprobs.append(drawn.logprob)
        reason = None
        if token in request.stop_ids:
            reason, request.stop_reason = FinishReason.STOP, token
        elif self._finds_stop_text(request, token):
            reason = FinishReason.STOP
        elif len(request.prompt_ids) + len(request.output_ids) >= request.max_len:
            reason = FinishReason.LENGTH
        if reason is None:
            request.sequence.tokens.append(token)
            return StepOutput(request.id, (token,), None)
        return StepOutput(request.id, (token,), self._end(request, reason))

    def _finds_stop_text(self, request: Request, token: int) -> bool:
        """Add the token's text; True when a stop text is complete, which is cut off."""
        decoder = self._decoders.get(request.id)
        if decoder is None:
            return False
        known = len(request.text)
        request.text += decoder.step(token)
        return self._cut_at_stop(request, known)

    @staticmethod
    def _cut_at_stop(request: Request, known: int) -> bool:
        found = [
            (at, stop)
            for stop in request.params.stop
            if (at := request.text.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, request.stop_reason = min(found)
        request.text = request.text[:at]
        return True

    def _end(self, request: Request, reason: FinishReason) -> RequestOutput:
        """End a request, once: nothing of it stays but published pages."""
        self.scheduler.remove(request)
        decoder = self._decoders.pop(request.id, None)
        if decoder is not None and not isinstance(request.stop_reason, str):
            known = len(request.text)
            request.text += decoder.finish()
            if self._cut_at_stop(request, known) and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP  # the stop text was in what the decoder held back
        del self._requests[request.id]
        request.finish_reason, request.end_s = reason, self._clock()
        if request.id in self.rechecks.running:
            self.rechecks.settle(request.id, request.prompt_logprobs)
        elif request.recheck:
            self.rechecks.note(request)
        return request.output(cache_on=self.planner.share)

    # -- when a step fails -------------------------------------------------------------------

    def _step_failed(self, scheduled: Scheduled, error: Exception) -> list[StepOutput]:
        logger.warning("a step of %d requests failed: %s", len(scheduled.requests), error)
        self._put_back(scheduled)
        outputs = []
        for request in scheduled.requests:
            request.failures += 1
            if request.failures >= MAX_FAILURES:
                request.error = StepFailedError(
                    f"request {request.id} was in {request.failures} failed steps, the limit is "
                    f"{MAX_FAILURES}; the last one failed with {type(error).__name__}: {error}"
                )
                request.error.__cause__ = error
                hidden = request.id in self.rechecks.running
                output = StepOutput(request.id, (), self._end(request, FinishReason.ERROR))
                if not hidden:
                    outputs.append(output)
        return outputs

    def _put_back(self, scheduled: Scheduled) -> None:
        """Nothing of the step counts: its pages are erased, its requests wait again."""
        page_size = self.config.page_size
        touched = []
        for request in scheduled.requests:
            sequence = request.sequence
            assert sequence.row is not None
            touched += self.table.pages(sequence.row)[sequence.num_computed // page_size :]
        sequences = [request.sequence for request in scheduled.requests]
        back = set(map(id, self.planner.abandon(sequences)))
        self.executor.erase_pages(sorted(set(touched)))
        running = self.scheduler.running
        self.scheduler.send_back([one for one in running if id(one.sequence) in back])
