"""Requests from `add_request` to their last output: the registry of live requests, and outputs."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ramify.cache import Salt
from ramify.engine.context import EngineContext
from ramify.engine.hit_verifier import HitVerifier
from ramify.engine.logits.logits_processors import GrammarMatcher, LogitsProcessor
from ramify.engine.output_processor import flush_held_text, take_stable_text
from ramify.engine.request import IncrementalDetokenizer, Request
from ramify.errors import InvalidParamsError, StepFailedError
from ramify.params import (
    CacheReport,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)


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


class RequestLifecycle:
    """Creates requests, ends them, and collects what their callers have not read yet.

    Args:
        context: the engine's scheduler and planner.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own ends of sequence.
        detokenizer_factory: makes a decoder per request; None when the model has no tokenizer.
        grammar_compiler: makes a matcher for one answer; None when there is no structured output.
        clock: seconds.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        detokenizer_factory: Callable[[], IncrementalDetokenizer] | None,
        grammar_compiler: Callable[[StructuredOutput], GrammarMatcher] | None,
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[int, Request] = {}  # live ones, branches too, oldest first
        self.hit_verifier = HitVerifier(context.config.requested.attention.verify_sample)
        self.detokenizer_factory, self.grammar_compiler = detokenizer_factory, grammar_compiler
        self._context, self._clock = context, clock
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self._outputs: list[StepOutput] = []  # more than one step's after an interrupt
        self._ids = count()

    # -- beginning ---------------------------------------------------------------------------

    def create(
        self,
        ids: array[int],
        params: SamplingParams,
        scope: tuple[bytes, tuple[Salt, ...]],
        max_len: int,
    ) -> Request:
        """A request without logits processor and detokenizer, in no queue and not registered."""
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

    def create_group(
        self,
        ids: array[int],
        params: SamplingParams,
        scope: tuple[bytes, tuple[Salt, ...]],
        max_len: int,
        *,
        prompt: str | None,
        priority: int,
        tenant: str,
        max_shared: int | None,
    ) -> Request:
        """A leader with its n - 1 children, ready to be registered and queued.

        Raises:
            RequestError: its structured output cannot be followed.
        """
        leader = self.create(ids, params, scope, max_len)
        leader.prompt = prompt
        for index in range(1, params.n):
            child = self.create(ids, replace(params, prompt_logprobs=None), scope, max_len)
            child.seed = leader.seed + index
            child.index, child.parent = index, leader
            leader.children.append(child)
        for request in (leader, *leader.children):
            request.priority, request.tenant = priority, tenant
            request.sequence.max_shared = max_shared
            self.rebuild_text_state(request)
        return leader

    def rebuild_text_state(self, request: Request) -> None:
        """Give a request a logits processor, and a detokenizer that has seen its output.

        Called for a new request, and again after a call failed half-way and left them inconsistent.
        """
        request.logits_processor = self._create_logits_processor(request)
        if self.detokenizer_factory is not None:
            request.detokenizer = self.detokenizer_factory()
            ends = isinstance(request.stop_reason, int)  # in a token that is no text
            for token in request.output_ids[: -1 if ends else None]:
                request.detokenizer.step(token)

    def _create_logits_processor(self, request: Request) -> LogitsProcessor | None:
        params, matcher = request.params, None
        if params.structured is not None:
            if self.grammar_compiler is None:
                allowed = "None: the model has no tokenizer"
                raise InvalidParamsError("structured", "given", allowed)
            matcher = self.grammar_compiler(params.structured)
        return LogitsProcessor.create_if_needed(
            request.prompt_ids,
            params,
            stop_token_ids=request.stop_token_ids,
            vocab_size=self.vocab_size,
            matcher=matcher,
        )

    def register(self, leader: Request) -> None:
        """Make a request and its children live."""
        self.requests.update((request.id, request) for request in (leader, *leader.children))

    def unregister(self, leader: Request) -> None:
        """Undo `register`, also one that an interrupt cut off."""
        for request in (leader, *leader.children):
            self.requests.pop(request.id, None)

    # -- outputs -----------------------------------------------------------------------------

    @property
    def live(self) -> list[Request]:
        """Requests and children whose last output was not made yet, oldest first."""
        return list(self.requests.values())

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` would return any."""
        return bool(self._outputs)

    def take_outputs(self) -> list[StepOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def discard_outputs(self, request_ids: Container[int]) -> list[StepOutput]:
        """Drop the outputs of these requests that were not taken yet; returns them."""
        dropped = [output for output in self._outputs if output.request_id in request_ids]
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
        return dropped

    def emit(self, request: Request) -> None:
        """Append a `StepOutput` with the new tokens of a request, and its end if it has ended."""
        leader, asked = request.parent_or_self, request.params.logprobs is not None
        output = self.make_output(leader) if leader.has_ended and not leader.has_output else None
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
                    leader.cache_report(cache_on=self._context.planner.share)
                    if request is leader and start == 0 < request.num_tokens_emitted
                    else None,
                )
            )
        elif output is not None:
            self.hit_verifier.compare(leader.id, leader.prompt_logprobs)

    def make_output(self, leader: Request) -> RequestOutput:
        """The output of a request whose answers have all ended; it is live no longer. Made once."""
        output = leader.output(cache_on=self._context.planner.share)
        leader.has_output = True
        for request in (leader, *leader.children):
            del self.requests[request.id]
        return output

    # -- end ---------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request or branch, once: nothing of it stays but published pages."""
        request.pending_finish_reason = reason
        self._context.scheduler.remove(request)
        self.finalize(request)

    def finalize(self, request: Request) -> None:
        """Set text and finish reason of a request that ends and holds no pages any more."""
        assert request.pending_finish_reason is not None
        try:
            reason = flush_held_text(request, request.pending_finish_reason)
        except Exception as error:  # noqa: BLE001 - a decoder's; only its own text is lost
            reason = self.detokenize_failed(request, error)
        request.end_s = self._clock()
        request.finish_reason = reason
        if request.verify_cold:
            self.hit_verifier.record(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request or branch with an error, and emit it."""
        request.error = error
        self.finish(request, FinishReason.ERROR)
        self.emit(request)

    def detokenize_failed(self, request: Request, error: Exception) -> FinishReason:
        """A request's detokenizer raised: the request ends, with the tokens that it has."""
        failure = StepFailedError(
            f"request {request.parent_or_self.id} has tokens of which no text can be made: "
            f"{type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        self._context.failures.errors += 1
        request.detokenizer, request.error = None, failure
        request.pending_finish_reason = FinishReason.ERROR
        return FinishReason.ERROR
