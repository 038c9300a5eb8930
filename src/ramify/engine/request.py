"""One request's state from arrival to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ramify.attention.planner import RadixSequence
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


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the engine core; nobody else writes it. Times are seconds of one clock."""

    id: int
    prompt: str | None
    prompt_ids: array[int]
    params: SamplingParams
    max_len: int  # tokens at which it ends, prompt included
    stop_ids: frozenset[int]
    seed: int
    namespace: bytes
    arrival_s: float
    sequence: RadixSequence
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last_step: int = 0
    first_step_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    report: tuple[int, int] | None = None  # tokens read and shared, in the first step that counts
    max_computed: int = 0  # tokens whose K/V was computed or read at some time
    recomputed: int = 0
    preemptions: int = 0
    failures: int = 0  # of steps that it was in
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    recheck: bool = False  # keeps log probabilities, to be compared with those of a cold run

    @classmethod
    def new_sequence(
        cls, tokens: array[int], namespace: bytes, params: SamplingParams
    ) -> RadixSequence:
        """A fresh planner state over `tokens`."""
        return RadixSequence(tokens, namespace, reuse=params.prompt_logprobs is None)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def is_prefill(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        return self.sequence.num_uncomputed > 1

    def restart(self) -> None:
        """Back to waiting: a fresh sequence over everything known so far."""
        tokens = array("i", self.prompt_ids)
        tokens.extend(self.output_ids)
        self.sequence = self.new_sequence(tokens, self.namespace, self.params)
        if self.params.prompt_logprobs is not None:
            done = len(self.prompt_logprobs) == len(self.prompt_ids) - 1
            self.sequence.reuse = done  # scored already: nothing forces a second computation
            if not done:
                self.prompt_logprobs.clear()

    def note_computed(self, start: int) -> None:
        """Count a step that computed what the sequence has from token `start` on."""
        end = self.sequence.num_computed
        if self.report is None:
            self.report = (self.sequence.num_read, self.sequence.num_shared)
        self.recomputed += max(0, min(self.max_computed, end) - start)
        self.max_computed = max(self.max_computed, end)

    def output(self, *, cache_on: bool) -> RequestOutput:
        """The value that the caller gets; the request has ended."""
        assert self.finish_reason is not None
        assert self.end_s is not None
        read, shared = self.report or (0, 0)
        num_prompt = len(self.prompt_ids)
        computed = min(num_prompt, self.max_computed) - read - shared
        reason = None
        if not cache_on:
            reason = CACHE_OFF
        elif self.params.prompt_logprobs is not None:
            reason = RECOMPUTED_FOR_LOGPROBS
        decode = None
        if self.first_token_s is not None and len(self.output_ids) > 1:
            spent = self.end_s - self.first_token_s
            decode = (len(self.output_ids) - 1) / spent if spent > 0 else None
        completion = Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            stop_reason=self.stop_reason,
        )
        scored: tuple[TokenLogprob | None, ...] | None = None
        if self.params.prompt_logprobs is not None:
            scored = (None, *self.prompt_logprobs)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            completions=(completion,),
            metrics=RequestMetrics(
                queue_s=(self.end_s if self.first_step_s is None else self.first_step_s)
                - self.arrival_s,
                ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
                total_s=self.end_s - self.arrival_s,
                decode_tokens_per_s=decode,
                preemptions=self.preemptions,
            ),
            cache=CacheReport(read, shared, computed, self.recomputed, reason),
            prompt_logprobs=scored,
            error=self.error,
        )
