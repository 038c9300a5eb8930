"""`Request`: the state of one request, or of one answer of it, from arrival to its end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, Salt
from ramify.engine.embedding import PromptPooling
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.request_options import RequestOptions
from ramify.engine.stop_strings import StopStrings
from ramify.outputs import (
    CacheReport,
    Completion,
    Explanation,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TierMiss,
    TokenLogprob,
)
from ramify.params import SamplingParams

RECOMPUTED_FOR_LOGPROBS = "prompt_logprobs need the logits of every prompt token"
RECOMPUTED_FOR_POOLING = {
    "mean": "mean pooling needs the hidden state of every prompt token",
    "cls": "cls pooling needs the hidden state of the first prompt token",
}
CACHE_OFF = "prefix_cache=False"


class IncrementalDetokenizer(Protocol):
    """Turns one request's output tokens into text, token by token."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def finish(self) -> str:
        """The text held back at the end of the output."""


# Creates the detokenizer of a request from its `SamplingParams.keep_special_tokens`.
DetokenizerFactory = Callable[[bool | Sequence[str]], IncrementalDetokenizer]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """The state of an answer while it is generated: tokens, text, place in the schedule, counters.

    A request for `n` answers is a parent and n - 1 children, each a `Request`. Children begin when
    the parent's prompt is computed, from its pages. Only the engine's thread reads or writes it.
    Times are seconds of the engine's clock.
    """

    id: int
    prompt: str | None
    prompt_ids: array[int]
    params: SamplingParams
    max_len: int  # tokens at which it ends, prompt included
    stop_token_ids: frozenset[int]
    seed: int
    namespace: bytes
    salts: tuple[Salt, ...]  # from which token on it is private in the namespace
    arrival_s: float
    sequence: RadixSequence
    detokenizer: IncrementalDetokenizer | None = None  # None if the model has no tokenizer
    logits_processor: LogitsProcessor | None = None  # None if it leaves the logits as they are
    priority: int = 0  # larger values first
    tenant: str = ""  # tenants share the steps fairly
    options: RequestOptions = field(default_factory=RequestOptions)  # of its group
    index: int = 0  # of the answer, 0 for the parent
    parent: Request | None = None  # of a child
    children: list[Request] = field(default_factory=list)  # of a parent, live or ended
    draft: tuple[int, ...] = ()  # draft tokens that the current step verifies
    num_draft_tokens: int = 0  # verified so far
    num_accepted_tokens: int = 0  # of these, correct
    output_ids: list[int] = field(default_factory=list)
    num_generated: int = 0  # of `output_ids`: came with the request, were delivered before
    text: str = ""
    num_chars_emitted: int = 0  # of `text`
    num_tokens_emitted: int = 0  # of `output_ids`
    end_emitted: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of those generated here
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooling: PromptPooling = field(init=False)  # of `params.prompt_embedding`
    stop_strings: StopStrings | None = field(init=False)  # None if there are none
    # Both in tokens, see `engine.scheduling.waiting_queue`: arrival less the priority's worth, and
    # that plus the uncached tokens. The smallest rank is scheduled first.
    virtual_arrival: int = 0
    rank: int = 0
    waits_for: Request | None = None  # a running request that computes a prefix of its prompt
    is_held: bool = False  # waits until a tier's pages of its prompt are loaded
    last_step: int = 0  # number of the last step that it was in
    admitted_step: int = 0  # number of the step that gave it its row
    num_output_admitted: int = 0  # output tokens that it had by then
    first_step_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    # Prompt tokens read from the cache and shared with running requests, in its first step.
    cache_counts: tuple[int, int] | None = None
    tier_tokens: dict[str, int] = field(default_factory=dict)  # loaded for it, by tier
    tier_miss: TierMiss | None = None  # the last one, while it waited
    explanation: Explanation | None = None  # taken with `cache_counts`, if it was asked for
    max_computed: int = 0  # largest number of leading tokens that have had K/V
    recomputed: int = 0  # tokens computed again, after preemption or recovery
    preemptions: int = 0
    num_failed_steps: int = 0  # since its last token
    num_rebuilds: int = 0  # of the engine while it ran, since its last token
    suspect_prefix: CacheKey | None = None  # that it had read when it failed and was isolated
    # Set with the last token; `finish_reason` follows when its pages are released.
    pending_finish_reason: FinishReason | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    has_output: bool = False  # the group's `RequestOutput` was made
    verify_cold: bool = False  # keep logprobs, for `HitVerifier` to compare with a cold run

    def __post_init__(self) -> None:
        self.pooling = PromptPooling(self.params.pooling, len(self.prompt_ids))
        self.stop_strings = StopStrings(self.params.stop) if self.params.stop else None

    @classmethod
    def new_sequence(
        cls,
        tokens: array[int],
        namespace: bytes,
        salts: tuple[Salt, ...],
        params: SamplingParams,
        max_shared: int | None = None,
    ) -> RadixSequence:
        """A planner sequence over `tokens`, nothing of it computed."""
        reuse = not params.needs_all_prompt_rows
        return RadixSequence(tokens, namespace, reuse, salts=salts, max_shared=max_shared)

    @property
    def parent_or_self(self) -> Request:
        """The parent, whose id the caller has."""
        return self if self.parent is None else self.parent

    @property
    def pending_children(self) -> list[Request]:
        """Unfinished children that wait for this parent's prompt; empty once it is computed."""
        if not self.children or self.output_ids:
            return []
        return [child for child in self.children if not child.is_finished]

    @property
    def has_ended(self) -> bool:
        """Whether this request and its children have all ended."""
        if self.finish_reason is None:
            return False
        return all(child.is_finished for child in self.children)

    @property
    def is_finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None

    def reset_for_recompute(self) -> None:
        """Replace the sequence by a new one over prompt and output, with nothing computed."""
        tokens = array("i", self.prompt_ids)
        tokens.extend(self.output_ids)
        self.draft = ()
        old = self.sequence
        self.sequence = self.new_sequence(
            tokens, self.namespace, self.salts, self.params, old.max_shared
        )
        self.sequence.may_tell = old.may_tell if self.cache_counts is None else None
        self.sequence.has_looked_up = old.has_looked_up
        self.sequence.session = old.session
        if self.params.needs_all_prompt_rows:
            # They forbid reading the cache until all are known.
            has_logprobs = len(self.prompt_logprobs) == len(self.prompt_ids) - 1
            self.sequence.reuse = (has_logprobs or self.params.prompt_logprobs is None) and (
                self.pooling.is_complete or not self.params.prompt_embedding
            )
            if not self.sequence.reuse:
                self.prompt_logprobs.clear()
                self.pooling = PromptPooling(self.params.pooling, len(self.prompt_ids))
        self.stop_strings = StopStrings(self.params.stop) if self.params.stop else None

    def count_computed(self, start: int) -> None:
        """Update the counters after a step that computed the sequence from token `start` on."""
        end = self.sequence.num_computed
        if self.cache_counts is None:
            num_prompt = len(self.prompt_ids)
            read = min(self.sequence.num_read, num_prompt)
            self.cache_counts = (read, min(self.sequence.num_shared, num_prompt - read))
            self.explanation = self._with_tier_miss(self.sequence.explanation)
        if start < self.max_computed:
            self.recomputed += min(self.max_computed, end) - start
        if self.num_generated:  # another engine has computed these
            num_prompt = len(self.prompt_ids)
            first = max(start, num_prompt, self.max_computed)
            self.recomputed += max(0, min(end, num_prompt + self.num_generated) - first)
        self.max_computed = max(self.max_computed, end)

    def completion(self) -> Completion:
        """The answer of a request or child that has ended."""
        assert self.finish_reason is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            stop_reason=self.stop_reason,
        )

    def cache_report(self, *, cache_on: bool) -> CacheReport:
        """The cache report of a parent's prompt, as far as it has been computed."""
        read, shared = self.cache_counts or (0, 0)
        reason = None
        if not cache_on:
            reason = CACHE_OFF
        elif self.params.prompt_logprobs is not None:
            reason = RECOMPUTED_FOR_LOGPROBS
        elif self.params.prompt_embedding:
            reason = RECOMPUTED_FOR_POOLING.get(self.params.pooling)
        return CacheReport(
            read,
            shared,
            min(len(self.prompt_ids), self.max_computed) - read - shared,
            sum(request.recomputed for request in (self, *self.children)),
            reason,
            self._tier_tokens(read),
        )

    def _with_tier_miss(self, explanation: Explanation | None) -> Explanation | None:
        """Add why the next page was not loaded, if a tier had it."""
        miss = self.tier_miss
        if explanation is None or miss is None or explanation.reason == "pending":
            return explanation
        # Others may have computed these pages meanwhile: then the hit ends elsewhere.
        if not miss.begin <= explanation.hit_tokens < miss.end:
            return explanation
        return replace(explanation, tier_miss=miss)

    def _tier_tokens(self, num_read: int) -> dict[str, int]:
        """Of `num_read` tokens, those that were loaded for this request, by tier."""
        left, tokens = num_read, dict[str, int]()
        for tier, count in self.tier_tokens.items():
            if used := min(count, left):
                tokens[tier] = used
                left -= used
        return tokens

    def output(self, *, cache_on: bool) -> RequestOutput:
        """The `RequestOutput` of a parent; it and its children have ended."""
        members = (self, *self.children)
        end_s = max(member.end_s for member in members if member.end_s is not None)
        decode_tokens_per_s = None
        num_decoded = sum(
            max(0, len(member.output_ids) - member.num_generated - 1) for member in members
        )
        if self.first_token_s is not None and num_decoded:
            decode_s = end_s - self.first_token_s
            decode_tokens_per_s = num_decoded / decode_s if decode_s > 0 else None
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *self.prompt_logprobs)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            completions=tuple(member.completion() for member in members),
            metrics=RequestMetrics(
                queue_s=(end_s if self.first_step_s is None else self.first_step_s)
                - self.arrival_s,
                ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
                total_s=end_s - self.arrival_s,
                decode_tokens_per_s=decode_tokens_per_s,
                preemptions=sum(member.preemptions for member in members),
                num_drafted=sum(member.num_draft_tokens for member in members),
                num_accepted=sum(member.num_accepted_tokens for member in members),
            ),
            cache=self.cache_report(cache_on=cache_on),
            prompt_logprobs=prompt_logprobs,
            prompt_embedding=self.pooling.embedding() if self.params.prompt_embedding else None,
            error=next((member.error for member in members if member.error is not None), None),
        )
