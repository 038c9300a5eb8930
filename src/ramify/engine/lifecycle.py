"""The registry of live requests: creates, emits, finishes and fails them."""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import count

from ramify.cache import Salt
from ramify.cache.sessions import open_session
from ramify.counts import counted
from ramify.engine.cache_options import pin_prefixes
from ramify.engine.context import EngineContext
from ramify.engine.hit_verifier import HitVerifier
from ramify.engine.logits.logits_processors import GrammarMatcher, LogitsProcessor
from ramify.engine.output_processor import (
    append_sampled_tokens,
    flush_held_text,
    stable_len,
    take_stable_text,
)
from ramify.engine.prefix_namespaces import owner_of_namespace
from ramify.engine.request import DetokenizerFactory, Request
from ramify.engine.request_options import RequestOptions
from ramify.engine.step import SampledTokens
from ramify.errors import InvalidParamsError, StepFailedError
from ramify.outputs import FinishReason, PrefixReport, RequestOutput, StepOutput, TokenLogprob
from ramify.params import SamplingParams, StructuredOutput


class RequestLifecycle:
    """Live requests by id, and the outputs that `EngineCore.step` has not returned yet.

    A *group* is what one `add_request` creates: a parent and its `n - 1` children. It is live from
    `register` to `make_output`. `EngineCore` describes the arguments.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        detokenizer_factory: DetokenizerFactory | None,
        grammar_compiler: Callable[[StructuredOutput, str], GrammarMatcher] | None,
        clock: Callable[[], float],
    ) -> None:
        self.requests: dict[int, Request] = {}  # live ones by id, children too, oldest first
        self.hit_verifier = HitVerifier(context.config.requested.attention.verify_sample)
        self.detokenizer_factory, self.grammar_compiler = detokenizer_factory, grammar_compiler
        self._context, self._clock = context, clock
        self.vocab_size, self.eos_token_ids = vocab_size, frozenset(eos_token_ids)
        self.num_live: Counter[str] = Counter()  # answers that have not ended, by tenant
        self._outputs: list[StepOutput] = []  # of several steps, if an interrupt cut one off
        self._ids = count()

    # -- creation ----------------------------------------------------------------------------

    def create(
        self,
        ids: array[int],
        params: SamplingParams,
        scope: tuple[bytes, tuple[Salt, ...]],
        max_len: int,
        arrival_s: float,
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
            arrival_s=arrival_s,
            sequence=Request.new_sequence(ids[:], *scope, params),
        )

    def create_group(
        self,
        ids: array[int],
        params: SamplingParams,
        scope: tuple[bytes, tuple[Salt, ...]],
        max_len: int,
        options: RequestOptions,
        *,
        prompt: str | None,
        arrival_s: float,
    ) -> Request:
        """A parent with its n - 1 children, complete but neither registered nor queued.

        Args:
            scope: namespace and salts of the prompt, see `PrefixNamespaces.scope_of`.
            max_len: tokens, prompt included, at which an answer ends.

        Raises:
            RequestError: the grammar of the structured output is invalid.
        """
        parent = self.create(ids, params, scope, max_len, arrival_s)
        parent.prompt, tenant = prompt, options.tenant
        if options.explain:
            parent.sequence.may_tell = lambda namespace: owner_of_namespace(namespace)[0] == tenant
        for index in range(1, params.n):
            child = self.create(
                ids, replace(params, prompt_logprobs=None), scope, max_len, arrival_s
            )
            child.seed = parent.seed + index
            child.index, child.parent = index, parent
            parent.children.append(child)
        cache, session = self._context.cache, None
        if options.session:
            session = open_session(cache, tenant, options.session)
        for request in (parent, *parent.children):
            request.sequence.session = session
            request.options, request.priority, request.tenant = options, options.priority, tenant
            request.sequence.max_shared = options.max_shared
            self.rebuild_text_state(request)
        return parent

    def replay(self, request: Request, generated: Sequence[int]) -> None:
        """Give a new request tokens that were generated and delivered before, by another engine.

        They count as if they had been generated here, and are not emitted again. If they end the
        answer, `pending_finish_reason` is set.

        Raises:
            InvalidParamsError: there are tokens after the one that ends the answer, or it is whole but
                every prompt token must be computed.
        """
        sampled = SampledTokens(tuple(generated))
        append_sampled_tokens(request, sampled, num_continued=len(generated) - 1)
        num_valid = len(request.output_ids)
        if num_valid < len(generated):
            allowed = f"{counted(num_valid, 'token')}: the last of these ends the answer"
            raise InvalidParamsError("generated", counted(len(generated), "token"), allowed)
        if request.pending_finish_reason and request.params.needs_all_prompt_rows:
            allowed = "less than a whole answer with prompt_logprobs: the prompt must be computed"
            raise InvalidParamsError("generated", counted(num_valid, "token"), allowed)
        request.num_generated = request.num_tokens_emitted = num_valid
        request.sequence.tokens.extend(generated)
        take_stable_text(request)  # came with the tokens

    def end_replayed(self, request: Request) -> None:
        """End a queued answer that had ended with its replayed tokens; emits its end without them."""
        assert request.pending_finish_reason is not None
        self.finish(request, request.pending_finish_reason)
        request.num_chars_emitted = len(request.text)
        self.emit(request)

    def rebuild_text_state(self, request: Request) -> None:
        """Give a request a new logits processor, and a detokenizer that has seen its output.

        Called for a new request, and again after a call failed half-way and left one inconsistent.
        """
        request.logits_processor = self._create_logits_processor(request)
        if self.detokenizer_factory is not None:
            request.detokenizer = self.detokenizer_factory(request.params.keep_special_tokens)
            # A stop token is not text.
            end = -1 if isinstance(request.stop_reason, int) else None
            for token in request.output_ids[:end]:
                request.detokenizer.step(token)

    def _create_logits_processor(self, request: Request) -> LogitsProcessor | None:
        params, matcher = request.params, None
        if not LogitsProcessor.is_needed(params):
            return None
        if params.structured is not None:
            matcher = self.compile_grammar(params.structured, request.tenant)
        return LogitsProcessor(
            request.prompt_ids,
            params,
            stop_token_ids=request.stop_token_ids,
            vocab_size=self.vocab_size,
            matcher=matcher,
        )

    def compile_grammar(self, spec: StructuredOutput, tenant: str) -> GrammarMatcher:
        """A matcher for one answer. For any thread.

        Raises:
            InvalidParamsError: the grammar is invalid, or the model has no tokenizer.
        """
        if self.grammar_compiler is None:
            allowed = "None: the model has no tokenizer"
            raise InvalidParamsError("structured", "given", allowed)
        return self.grammar_compiler(spec, tenant)

    def register(self, parent: Request) -> None:
        """Make a group live."""
        self.requests.update((request.id, request) for request in (parent, *parent.children))
        self.num_live[parent.tenant] += 1 + len(parent.children)

    def unregister(self, parent: Request) -> None:
        """Undo `register`, even if an interrupt cut it off."""
        for request in (parent, *parent.children):
            self.requests.pop(request.id, None)
        self.recount_live()

    def recount_live(self) -> None:
        """Count `num_live` anew: an interrupt may have cut off an update."""
        live = (request for request in self.requests.values() if not request.is_finished)
        self.num_live = Counter(request.tenant for request in live)

    # -- outputs -----------------------------------------------------------------------------

    @property
    def live(self) -> list[Request]:
        """Requests and children whose group has no output yet, oldest first."""
        return list(self.requests.values())

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` would return anything."""
        return bool(self._outputs)

    def take_outputs(self) -> list[StepOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def discard_outputs(self, request_ids: Container[int]) -> list[StepOutput]:
        """Drop the outputs of these requests that were not taken yet; returns the dropped ones."""
        dropped = [output for output in self._outputs if output.request_id in request_ids]
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
        return dropped

    def emit(self, request: Request) -> None:
        """Append a `StepOutput` of the tokens since the last one, and of the end if it came."""
        parent = request if request.parent is None else request.parent
        output = None
        if parent.finish_reason is not None and parent.has_ended and not parent.has_output:
            output = parent.output(cache_on=self._context.planner.share)
        start, end = request.num_tokens_emitted, len(request.output_ids)
        num_chars = stable_len(request)
        if parent.id not in self.hit_verifier.running:
            logprobs: tuple[TokenLogprob, ...] = ()
            cache, prefix = None, None
            if request.params.logprobs is not None:
                logprobs = tuple(request.logprobs[start - request.num_generated :])
            is_first = start == request.num_generated and request.first_token_s is not None
            if is_first and request is parent:
                cache = parent.cache_report(cache_on=self._context.planner.share)
                prefix = self._prefix_report(parent) if parent.options.wants_report else None
            self._outputs.append(
                StepOutput(
                    parent.id,
                    tuple(request.output_ids[start:end]),
                    output,
                    request.index,
                    request.text[request.num_chars_emitted : num_chars],
                    logprobs,
                    request.finish_reason,
                    cache,
                    prefix,
                )
            )
        elif output is not None:
            self.hit_verifier.compare(parent.id, parent.prompt_logprobs)
        # No call from here on: an interrupt would have these tokens emitted again.
        request.num_tokens_emitted, request.num_chars_emitted = end, num_chars
        request.end_emitted = request.finish_reason is not None
        if output is not None:
            parent.has_output = True
            del self.requests[parent.id]
            for child in parent.children:
                del self.requests[child.id]

    def _prefix_report(self, parent: Request) -> PrefixReport:
        """Pin the prefixes of `retention`, which are computed now, and report."""
        options, num_refused, config = parent.options, 0, self._context.config
        if options.retention and self._context.planner.share:
            key = parent.sequence.key(len(parent.prompt_ids))
            num_refused = pin_prefixes(
                self._context.cache,
                key,
                parent.tenant,
                options,
                room_pages=config.num_live_pages(config.max_model_len),
            )
        return PrefixReport(parent.explanation, num_refused)

    def make_output(self, parent: Request) -> RequestOutput:
        """The final output of a group whose answers have all ended; it is not live any more."""
        output = parent.output(cache_on=self._context.planner.share)
        parent.has_output = True
        for request in (parent, *parent.children):
            del self.requests[request.id]
        return output

    # -- end ---------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request or child, once, and release its pages; published ones stay cached."""
        request.pending_finish_reason = reason
        self._context.scheduler.remove(request)
        self.finalize(request)

    def finalize(self, request: Request) -> None:
        """Flush the text and set the finish reason of a request that is in no queue any more."""
        assert request.pending_finish_reason is not None
        try:
            reason = flush_held_text(request, request.pending_finish_reason)
        except Exception as error:  # noqa: BLE001 - a detokenizer's; ends this request only
            reason = self.detokenize_failed(request, error)
        request.end_s = self._clock()
        request.finish_reason = reason
        self.num_live[request.tenant] -= 1
        if not self.num_live[request.tenant]:
            del self.num_live[request.tenant]
        if request.verify_cold:
            self.hit_verifier.record(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request or child with an error, and emit it."""
        request.error = error
        self.finish(request, FinishReason.ERROR)
        self.emit(request)

    def detokenize_failed(self, request: Request, error: Exception) -> FinishReason:
        """Make a request end with an error, with the tokens it has: its detokenizer raised."""
        request.detokenizer = None
        request.error = self.step_failure(
            request, "has tokens of which no text can be made:", error
        )
        request.pending_finish_reason = FinishReason.ERROR
        return FinishReason.ERROR

    def step_failure(self, request: Request, problem: str, cause: BaseException) -> StepFailedError:
        """Count and return the error of a request that ends because the engine failed."""
        self._context.failures.errors += 1
        failure = StepFailedError(
            f"request {request.parent_or_self.id} {problem} {type(cause).__name__}: {cause}"
        )
        failure.__cause__ = cause
        return failure
