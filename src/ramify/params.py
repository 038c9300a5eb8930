"""What a caller asks of one request, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real

from ramify.errors import InvalidParamsError


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, a stop string or end of sequence
    LENGTH = "length"  # max_tokens, or the end of the model's context
    ABORT = "abort"  # the caller withdrew it
    ERROR = "error"  # it could not be served; RequestOutput.error says why

    def __str__(self) -> str:
        """The plain word."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        temperature: 0 is greedy whatever the other values are.
        top_k: keep the k likeliest tokens; None keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass; 1 keeps all.
        seed: draws depend on (seed, position) only; None draws a fresh seed per request.
        n: answers to give; answer i draws as a request of its own with seed + i would.
        max_tokens: at most this many output tokens; None means up to the end of the context.
        stop: texts that end the output; a text that matches is not part of the output.
        stop_token_ids: token ids that end the output, beside the model's own.
        ignore_eos: go on after the model's own end-of-sequence tokens.
        logprobs: None, or how many of the likeliest tokens to report per output token.
        prompt_logprobs: the same for the prompt; such a request reads nothing from the cache.

    Raises:
        InvalidParamsError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 128
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list(stop) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidParamsError("stop", self.stop, "non-empty strings")
        ids = self.stop_token_ids
        if not _is_list(ids) or not all(_is_int(token) and token >= 0 for token in ids):
            raise InvalidParamsError("stop_token_ids", ids, "token ids >= 0")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < float("inf"):
            raise InvalidParamsError("temperature", self.temperature, "a finite number >= 0")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise InvalidParamsError("top_p", self.top_p, "a number in (0, 1]")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise InvalidParamsError("top_k", self.top_k, "None (keep all) or an integer >= 1")
        if not _is_int(self.n) or not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidParamsError("n", self.n, f"an integer in 1..{MAX_ANSWERS}")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise InvalidParamsError("max_tokens", self.max_tokens, "None or an integer >= 1")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            raise InvalidParamsError("seed", self.seed, "None or an integer in [0, 2**63)")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 0 <= value <= MAX_LOGPROBS):
                raise InvalidParamsError(name, value, f"None or an integer in 0..{MAX_LOGPROBS}")
        self._make_plain()

    def _make_plain(self) -> None:
        """Numbers of other packages as Python's own."""
        for name in ("n", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))


MAX_ANSWERS = 128  # the OpenAI API's limit
MAX_LOGPROBS = 1024  # bounds the output of one token; the OpenAI API allows 20


def _is_list(value: object) -> bool:
    return isinstance(value, tuple | list | set | frozenset)  # a generator could be read only once


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: dict[int, float]  # token id -> logprob, likeliest first


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated continuation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None  # the stop text or stop token id that ended it


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where the prompt's K/V came from.

    read + shared + computed = prompt tokens; fewer when the request ended before its prompt was
    computed.
    """

    read_tokens: int  # found in the cache
    shared_tokens: int  # attached to pages that another request computed while this one ran
    computed_tokens: int  # computed for this request
    recomputed_tokens: int = 0  # computed again after preemption, outputs included
    reason: str | None = None  # why nothing was read, when something forbade it

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that were dealt with."""
        return self.read_tokens + self.shared_tokens + self.computed_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds; None where the request did not get that far."""

    queue_s: float  # from arrival to its first step
    ttft_s: float | None  # from arrival to the first output token
    total_s: float  # from arrival to the end
    decode_tokens_per_s: float | None  # output tokens after the first, per second
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts in the form that API users expect."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one ended request.

    A request that could not be served has `error` set, finish reason `error`, and whatever
    tokens it had produced. The text, token ids, logprobs and finish reason of the request are
    those of its first completion.
    """

    request_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    metrics: RequestMetrics
    cache: CacheReport
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # the first token has none
    error: Exception | None = field(default=None, compare=False)

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
        """Log probabilities of the first completion's tokens, or None when not asked for."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Token counts; cached = read + shared."""
        cached = self.cache.read_tokens + self.cache.shared_tokens
        num_output = sum(len(one.token_ids) for one in self.completions)
        return Usage(len(self.prompt_token_ids), num_output, cached)
