"""Output types: of a step and of a request, with token counts, times and cache report."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final


class FinishReason(str, Enum):
    """The reason for which a request ended."""

    STOP = "stop"  # a stop token, a stop string or the end-of-sequence token
    LENGTH = "length"  # max_tokens, or the model's context length
    ABORT = "abort"  # the caller aborted it
    ERROR = "error"  # it failed; RequestOutput.error says why

    def __str__(self) -> str:
        """The value alone, `stop` for instance."""
        return self.value


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: dict[int, float]  # token id -> logprob, likeliest first


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated continuation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None  # the stop text or stop token id that ended it


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Prompt tokens by the source of their K/V.

    read + shared + computed = prompt tokens, or fewer if the request ended during prefill.
    """

    read_tokens: int  # cache hits
    shared_tokens: int  # attached in flight to pages that another request computed
    computed_tokens: int  # computed by this request
    recomputed_tokens: int = 0  # recomputed after preemption, output tokens included
    reason: str | None = None  # why the cache was not read, if an option forbade it
    # Of `read_tokens`: those loaded for this request, by tier (host, disk, remote); the others were in the pool.
    tier_tokens: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens read, shared or computed."""
        return self.read_tokens + self.shared_tokens + self.computed_tokens


TIER_PLACES: Final = {"host": "in host memory", "disk": "on disk", "remote": "in the shared store"}
TIER_REASONS: Final = {
    "slower": "computing was cheaper",
    "late": "the load came too late",
    "corrupt": "failed its checksum",
    "io_error": "could not be read",
    "absent": "gone when it was to be read",
    "evicted": "or was: evicted for others",
    "unanswered": "which did not answer in time",
}


@dataclass(frozen=True, slots=True)
class TierMiss:
    """Why pages of a prompt that a tier had were computed.

    `reason` is "slower": computing was sooner, so no load began; "late": the load came too late;
    or of a page that could not be read: "corrupt", "io_error" or "absent". "unanswered": a store
    beyond a network did not say in time whether it has them. "evicted": it had them, before others.
    """

    tier: str
    reason: str
    begin: int  # tokens of the prompt before the first of these pages
    end: int  # and before the first page behind them

    def __str__(self) -> str:
        """As in "on disk, computing was cheaper"."""
        place = TIER_PLACES.get(self.tier, f"in the tier {self.tier}")
        return f"{place}, {TIER_REASONS.get(self.reason, self.reason)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of `explain`: the tokens that a key would hit, and the reason for the miss.

    `reason` is one of

    - "hit": everything that can hit does; at least one token is always computed;
    - "page_tail": less than a page is left, and pages are shared whole; tokens in part of a page may
      be copied (`copied_tokens`), up to the last one, which makes it a "hit";
    - "pending": the next page is being computed by another request;
    - "evicted": the next page was cached. `evicted_by` is the reason (capacity, session_ended: evicted
      first, since its session had ended, asked, cleared, predicate, window: released outside the
      sliding window, or withdrawn: its step failed or its drafts were rejected), `evicted_ago_s` the time since, `idle_s` how long it had been unused
      by then; `pin_refused` says why it was not pinned;
    - "diverged": a cached prompt is equal up to token `diverged_at`, and differs there. `sibling`
      holds its atoms from the end of the hit on, as packed int32. Where only one of the two has a
      salt, nothing behind the salt is revealed;
    - "namespace": nothing hits here, but `other_namespace` has `other_tokens` of the key;
    - "never_seen": nothing starts like this, or it was forgotten; after a hit, nothing goes on from
      there.
    """

    num_tokens: int  # length of the key
    hit_tokens: int  # in whole pages
    reason: str
    diverged_at: int | None = None
    sibling: bytes = field(default=b"", repr=False)
    evicted_tokens: int = 0  # tokens behind the hit that are ghosts
    evicted_by: str = ""
    evicted_ago_s: float | None = None
    idle_s: float | None = None
    pin_refused: str = ""
    other_namespace: bytes | None = None
    other_tokens: int = 0
    tier_miss: TierMiss | None = None  # a tier had the next page, and it was computed
    copied_tokens: int = 0  # after those of `hit_tokens`, copied from part of a page

    @property
    def read_tokens(self) -> int:
        """Tokens that are not computed: whole pages, and what is copied from part of a page."""
        return self.hit_tokens + self.copied_tokens

    def with_copied(self, num_tokens: int) -> Explanation:
        """This explanation where `num_tokens` tokens after the hit are copied from part of a page."""
        is_all = self.reason == "page_tail" and self.hit_tokens + num_tokens == self.num_tokens - 1
        reason = "hit" if is_all else self.reason
        return replace(self, copied_tokens=num_tokens, reason=reason)

    def __str__(self) -> str:
        summary = f"{self.read_tokens} of {self.num_tokens} tokens found"
        if self.copied_tokens:
            summary += f", {self.copied_tokens} of them in part of a page"
        summary += "; "
        if self.tier_miss is not None:
            summary += f"the next page is {self.tier_miss}; "
        match self.reason:
            case "hit":
                return summary + "that is all there is to find"
            case "page_tail":
                return summary + "the rest is less than a page"
            case "pending":
                return summary + "the next page is being computed"
            case "evicted":
                why = self.evicted_by
                if why == "session_ended":
                    why = "evicted first: its session was ended"
                refused = f", after a pin was refused ({self.pin_refused})" * bool(self.pin_refused)
                return summary + (
                    f"the next {self.evicted_tokens} were evicted {self.evicted_ago_s:.1f} s ago "
                    f"({why}), idle for {self.idle_s:.1f} s{refused}"
                )
            case "diverged":
                return summary + f"a cached prompt is the same up to token {self.diverged_at}"
            case "namespace":
                return summary + f"another namespace has {self.other_tokens}"
        verb = "goes on" if self.read_tokens else "begins"
        return summary + f"nothing cached or remembered {verb} like this"


@dataclass(frozen=True, slots=True)
class Placement:
    """The replica of a cluster that computes a request, and why it was chosen.

    `reason` is that of a `cluster.decisions.Decision`. With "spill" another replica has more of the
    prompt cached; `other_reason` says why it was not chosen: "queue", "bound", "full" or "busy".
    """

    replica: int  # number in the cluster, from 0
    reason: str
    expected_tokens: int  # of the prompt that were expected to hit there
    other_replica: int | None = None
    other_tokens: int = 0  # of the prompt that it has cached
    other_queue_s: float | None = None  # work before a further request; None: not to be told
    other_reason: str = ""

    def without_load(self) -> Placement:
        """The same for a reader who may not know how much others have to be computed."""
        if self.other_replica is None:
            return self
        return replace(self, other_queue_s=None, other_reason="busy")


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Explanation and pins of a request with `explain` or `retention`, sent with its first tokens."""

    # Taken in the step that read the cache; None: not asked for, or an option forbade to read.
    explanation: Explanation | None
    num_pins_refused: int = 0  # prefixes of `retention` that could not be pinned
    placement: Placement | None = None  # in a cluster


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds; None where the request did not get that far."""

    queue_s: float  # from arrival to its first step; of `LLM`, with compiling a grammar
    ttft_s: float | None  # from arrival to the first output token
    total_s: float  # from arrival to the end
    decode_tokens_per_s: float | None  # output tokens after the first, per second
    preemptions: int = 0
    num_drafted: int = 0  # draft tokens verified
    num_accepted: int = 0  # draft tokens accepted: output tokens without a step of their own


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the OpenAI API reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


REFUSED_ID = -1  # of a request that was never queued


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a finished request.

    A failed request has `error` set, finish reason `error`, and the tokens it had produced. Its text,
    token ids, logprobs and finish reason are those of the first completion.
    """

    request_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    metrics: RequestMetrics
    cache: CacheReport
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # the first token has none
    prompt_embedding: array[float] | None = None  # [hidden_size] float32
    error: Exception | None = field(default=None, compare=False)
    # Another engine has gone on with the answer, whose tokens may not be those of the first.
    resumed: bool = False

    @property
    def was_refused(self) -> bool:
        """Whether the prompt was never queued; `error` says why."""
        return self.request_id == REFUSED_ID

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """`completions`, by vLLM's name."""
        return self.completions

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output token ids of the first completion."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log probabilities of the first completion's tokens; None unless requested."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """The reason for which the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts; cached = read + shared."""
        cached = self.cache.read_tokens + self.cache.shared_tokens
        num_output = sum(len(completion.token_ids) for completion in self.completions)
        return Usage(len(self.prompt_token_ids), num_output, cached)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """New tokens of one answer of a request, as one step produced them.

    `text` and `logprobs` lag behind the tokens while the text may be the start of a stop string.
    `output` is set when all answers of the request have ended. Unpacks to
    (request_id, list of new token ids, whether the request has ended).
    """

    request_id: int
    new_token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    index: int = 0  # of the answer, 0..n-1
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None  # of this answer, when it has ended
    cache: CacheReport | None = None  # with the first tokens of the first answer
    prefix: PrefixReport | None = None  # with `cache`, if the request asked for it

    def __iter__(self) -> Iterator[Any]:
        return iter((self.request_id, list(self.new_token_ids), self.output is not None))
