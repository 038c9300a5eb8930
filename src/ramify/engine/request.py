"""One request's state from arrival to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from ramify.attention.planner import RadixSequence
from ramify.cache import CacheKey, Salt
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.params import (
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

RECOMPUTED_FOR_LOGPROBS = "prompt_logprobs need the logits of every prompt token"
CACHE_OFF = "prefix_cache=False"


class IncrementalDetokenizer(Protocol):
    """Turns one request's tokens into text as they come."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; it may be empty."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """Owned by the engine core; nobody else writes it. Times are seconds of one clock.

    A request for `n` answers is a parent and n - 1 children, each a `Request` of its own: they
    begin when the parent's prompt is computed.
    """

    id: int
    prompt: str | None
    prompt_ids: array[int]
    params: SamplingParams
    max_len: int  # tokens at which it ends, prompt included
    stop_token_ids: frozenset[int]
    seed: int
    namespace: bytes
    salts: tuple[Salt, ...]  # from where on it is private there
    arrival_s: float
    sequence: RadixSequence
    detokenizer: IncrementalDetokenizer | None = None  # None when the model has no tokenizer
    logits_processor: LogitsProcessor | None = None  # None when its scores stay as they are
    priority: int = 0  # larger ones first
    tenant: str = ""  # tenants share the steps fairly
    index: int = 0  # among the answers
    parent: Request | None = None  # of a branch
    children: list[Request] = field(default_factory=list)  # of a leader, live or ended
    draft: tuple[int, ...] = ()  # guesses for its next tokens, to be verified in this step
    num_draft_tokens: int = 0  # guesses that steps verified
    num_accepted_tokens: int = 0  # of them right
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_chars_emitted: int = 0  # characters of it that were told
    num_tokens_emitted: int = 0  # of its tokens
    end_emitted: bool = False  # that it has ended
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    virtual_arrival: int = 0  # when it came, in computed tokens, less what its priority is worth
    # `virtual_arrival` and what it has to compute: the least is first; see
    # `engine.scheduling.waiting_queue`
    rank: int = 0
    waits_for: Request | None = None  # whom it waits for, who computes a part of its prompt
    last_step: int = 0
    first_step_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    cache_counts: tuple[int, int] | None = (
        None  # tokens read and shared, in the first step that counts
    )
    max_computed: int = 0  # tokens whose K/V was computed or read at some time
    recomputed: int = 0
    preemptions: int = 0
    num_failed_steps: int = 0  # of steps that it was in, since its last token
    num_rebuilds: int = 0  # of the engine while it ran, since its last token
    suspect_prefix: CacheKey | None = None  # what it had read when it failed; it goes on without
    pending_finish_reason: FinishReason | None = (
        None  # its last token is there; `finish_reason` follows
    )
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    has_output: bool = False  # its output was made
    verify_cold: bool = False  # keeps log probabilities, to be compared with those of a cold run

    @classmethod
    def new_sequence(
        cls,
        tokens: array[int],
        namespace: bytes,
        salts: tuple[Salt, ...],
        params: SamplingParams,
        max_shared: int | None = None,
    ) -> RadixSequence:
        """A fresh planner state over `tokens`."""
        reuse = params.prompt_logprobs is None
        return RadixSequence(tokens, namespace, reuse, salts=salts, max_shared=max_shared)

    @property
    def parent_or_self(self) -> Request:
        """The leader, whose id is the one that the caller knows."""
        return self if self.parent is None else self.parent

    @property
    def pending_children(self) -> list[Request]:
        """Branches that begin when the prompt is computed: all of them, or none any more."""
        if not self.children or self.output_ids:
            return []
        return [one for one in self.children if not one.is_finished]

    @property
    def has_ended(self) -> bool:
        """Whether a leader and its branches have all ended."""
        if self.finish_reason is None:
            return False
        return all(one.is_finished for one in self.children)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def reset_for_recompute(self) -> None:
        """Back to waiting: a fresh sequence over everything known so far."""
        tokens = array("i", self.prompt_ids)
        tokens.extend(self.output_ids)
        self.draft = ()
        self.sequence = self.new_sequence(
            tokens, self.namespace, self.salts, self.params, self.sequence.max_shared
        )
        if self.params.prompt_logprobs is not None:
            done = len(self.prompt_logprobs) == len(self.prompt_ids) - 1
            self.sequence.reuse = done  # scored already: nothing forces a second computation
            if not done:
                self.prompt_logprobs.clear()

    def count_computed(self, start: int) -> None:
        """Count a step that computed what the sequence has from token `start` on."""
        end = self.sequence.num_computed
        if self.cache_counts is None:
            self.cache_counts = (self.sequence.num_read, self.sequence.num_shared)
        if start < self.max_computed:
            self.recomputed += min(self.max_computed, end) - start
        self.max_computed = max(self.max_computed, end)

    def completion(self) -> Completion:
        """What this request or branch has produced; it has ended."""
        assert self.finish_reason is not None
        return Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            stop_reason=self.stop_reason,
        )

    def cache_report(self, *, cache_on: bool) -> CacheReport:
        """Where the prompt's K/V came from, as far as it is known; of a leader."""
        read, shared = self.cache_counts or (0, 0)
        reason = None
        if not cache_on:
            reason = CACHE_OFF
        elif self.params.prompt_logprobs is not None:
            reason = RECOMPUTED_FOR_LOGPROBS
        return CacheReport(
            read,
            shared,
            min(len(self.prompt_ids), self.max_computed) - read - shared,
            sum(one.recomputed for one in (self, *self.children)),
            reason,
        )

    def output(self, *, cache_on: bool) -> RequestOutput:
        """The value that the caller of a leader gets; it and its branches have ended."""
        members = (self, *self.children)
        ends = [one.end_s for one in members if one.end_s is not None]
        end_s = max(ends)
        decode = None
        num_later = sum(max(0, len(one.output_ids) - 1) for one in members)
        if self.first_token_s is not None and num_later:
            spent = end_s - self.first_token_s
            decode = num_later / spent if spent > 0 else None
        scored: tuple[TokenLogprob | None, ...] | None = None
        if self.params.prompt_logprobs is not None:
            scored = (None, *self.prompt_logprobs)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            completions=tuple(one.completion() for one in members),
            metrics=RequestMetrics(
                queue_s=(end_s if self.first_step_s is None else self.first_step_s)
                - self.arrival_s,
                ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
                total_s=end_s - self.arrival_s,
                decode_tokens_per_s=decode,
                preemptions=sum(one.preemptions for one in members),
                num_drafted=sum(one.num_draft_tokens for one in members),
                num_accepted=sum(one.num_accepted_tokens for one in members),
            ),
            cache=self.cache_report(cache_on=cache_on),
            prompt_logprobs=scored,
            error=next((one.error for one in members if one.error is not None), None),
        )
