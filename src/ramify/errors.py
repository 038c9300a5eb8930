"""Every exception that Ramify raises on purpose.

RamifyError
├─ ConfigError                    an option has a value that cannot work
│  ├─ UnknownOptionError          there is no such option
│  ├─ PoolTooSmallError           the pool has no whole page
│  ├─ RulesError                  a file of cache rules and prices cannot be used
│  └─ UnsupportedBackendError     no attention backend can serve this model and device
├─ ModelError                     a checkpoint cannot be used
│  ├─ CheckpointError             files are missing, truncated or contradict each other
│  └─ UnsupportedModelError       the architecture, or one of its settings, is not supported
├─ RequestError                   the request is at fault; its batch mates are not affected
│  ├─ EmptyPromptError
│  ├─ PromptTooLongError
│  ├─ RequestTooLargeError        the request alone needs more pages than the pool has
│  ├─ TokenOutOfRangeError
│  ├─ InvalidParamsError          a sampling parameter outside its range
│  ├─ UnknownParamError           there is no such sampling parameter
│  ├─ PromptPoolingError          vectors leave out the tokens of the checkpoint's prompt
│  ├─ DeadEndError                no token is allowed next
│  ├─ LibraryPanicError           compiled code of another project panicked on this request
│  ├─ ChatTemplateError           no chat template, or it cannot render these messages
│  ├─ ChatTemplateLimitError      the chat template runs too long, or writes too much
│  ├─ UnknownRequestError         no live request has this id
│  └─ OverloadedError             the queue is full; says when to try again
│     ├─ CompileBusyError         too many grammars are being compiled
│     └─ TokensWaitError          too many prompt tokens are queued
├─ CacheError                     misuse of the cache core, or too few pages
│  ├─ OutOfPagesError             nothing was evicted and nothing was changed
│  ├─ InvalidKeyError             atoms or a namespace that cannot be compared
│  ├─ LeaseError                  a lease was released before, or belongs to another cache
│  ├─ PinError                    a prefix that cannot be pinned, or no such pin
│  ├─ SlotOutOfRangeError         a slot that no page of the pool has
│  ├─ PageOwnershipError          a page was given back or published by a caller that does not own it
│  └─ InvariantError              check() found a contradiction: a bug in Ramify
├─ LogError                       a log of requests cannot be read, or lacks what a command needs
├─ StepMemoryError                a forward pass ran out of memory
├─ StepFailedError                a request failed in its steps; its caller was notified
├─ StoreUnavailableError          a store of K/V pages is closed or out of reach
├─ MissingPackageError            a package of one of Ramify's extras is not installed
├─ ConcurrentCallError            a second thread called what one thread at a time may use
├─ DrainingError                  the engine is shutting down and takes no new requests
└─ EngineStoppedError             the engine was closed, or a bug has ended it
   └─ RankLostError               a process of tensor parallelism has gone
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from ramify.counts import counted

# Of the pins that an error names.
MAX_NAMED_PINS, MAX_OWNER_CHARS = 4, 40
MAX_MESSAGE_CHARS = 2000


def shortened(value: object, limit: int = 200) -> str:
    """A value as text of at most `limit` characters, to be quoted in a message."""
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def printable(text: str) -> str:
    """A text in one line, with what would change a terminal escaped: controls, halves of surrogates."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class RamifyError(Exception):
    """Base of everything raised on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle text and fields: the message is no argument of a subclass's `__init__`."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[RamifyError], args: tuple[object, ...], fields: dict[str, object]
) -> object:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(RamifyError, ValueError):
    """An option has a value that cannot work."""


class UnknownOptionError(ConfigError):
    """There is no option of this name.

    Args:
        advice: what to use in its place; empty: the message lists the options.
    """

    def __init__(self, name: str, known: Iterable[str], advice: str = "") -> None:
        self.name, self.known, self.advice = name, tuple(sorted(known)), advice
        reason = f": {advice}" if advice else f"; the options are {', '.join(self.known)}"
        super().__init__(f"unknown option {name!r}{reason}")


class PoolTooSmallError(ConfigError):
    """The pool has no whole page."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.num_tokens, self.page_size = num_tokens, page_size
        super().__init__(
            f"kv_cache_tokens={num_tokens} is {num_tokens // page_size} pages of {page_size}: "
            "not a single page; raise kv_cache_tokens or kv_cache_memory, or lower page_size"
        )


class RulesError(ConfigError):
    """A file of cache rules and prices cannot be used, or has no rules for a provider."""


class UnsupportedBackendError(ConfigError):
    """No attention backend can serve this model on this device; lists every reason."""

    def __init__(self, asked: str, reasons: dict[str, str]) -> None:
        self.asked, self.reasons = asked, dict(reasons)
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"attention_backend={asked!r} cannot be used here ({listed})")


class ModelError(RamifyError):
    """A checkpoint cannot be used.

    The message may quote names of a damaged file: it has a bounded length, and control characters are
    escaped in it.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(shortened(message, MAX_MESSAGE_CHARS)))


class CheckpointError(ModelError):
    """Files of a checkpoint are missing, truncated or contradict each other."""


class UnsupportedModelError(ModelError):
    """The architecture, or one of its settings, is not supported."""


class RequestError(RamifyError, ValueError):
    """A request is at fault; its batch mates are not affected."""


class EmptyPromptError(RequestError):
    """The prompt has no token."""

    def __init__(self) -> None:
        super().__init__("the prompt has 0 tokens but at least 1 is needed; send some text")


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        self.num_tokens, self.limit = num_tokens, limit
        super().__init__(
            f"the prompt has {num_tokens} tokens but max_model_len is {limit} and at least one "
            f"token must be generated; shorten it by {num_tokens - limit + 1}, or raise "
            "max_model_len if the model allows it"
        )


class RequestTooLargeError(RequestError):
    """The request alone needs more pages at a time than the whole pool has.

    Args:
        num_pages: pages that it holds at a time, at least.
        max_step: `max_batch_tokens` with which the pool could serve it, since every layer has a
            window; 0: there is none.
    """

    def __init__(
        self,
        num_prompt: int,
        max_tokens: int,
        num_pages: int,
        max_pages: int,
        page_size: int,
        *,
        max_step: int = 0,
    ) -> None:
        self.num_prompt, self.max_tokens = num_prompt, max_tokens
        self.num_pages, self.max_pages, self.max_step = num_pages, max_pages, max_step
        # Output tokens that would fit; 0 or less: the prompt itself is too long.
        self.room = max_pages * page_size + 1 - num_prompt
        way_out = f"lower max_tokens to {self.room}" if self.room > 0 else "shorten the prompt"
        options = f"kv_cache_tokens >= {num_pages * page_size}"
        if max_step > 0:
            options += f" or max_batch_tokens <= {max_step}"
        super().__init__(
            f"the request needs {num_pages} pages at a time for a prompt of {num_prompt} tokens and "
            f"max_tokens={max_tokens}, but the pool has {max_pages} pages of {page_size}; "
            f"{way_out}, or start with {options}"
        )


class TokenOutOfRangeError(RequestError):
    """A token id that the model has no embedding for."""

    def __init__(self, token: int, position: int, vocab_size: int) -> None:
        self.token, self.position, self.vocab_size = token, position, vocab_size
        super().__init__(
            f"token id {token} at position {position} is outside 0..{vocab_size - 1}; "
            "encode the prompt with this model's tokenizer"
        )


class InvalidParamsError(RequestError):
    """A sampling parameter outside its range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name}={value!r} is not possible: {name} must be {allowed}")


class UnknownParamError(RequestError, TypeError):
    """There is no sampling parameter, or argument of a call, of this name.

    Args:
        owner: the class or the call that it was given to.
        advice: what to use in its place; empty: the message lists the parameters.
    """

    def __init__(self, owner: str, name: str, known: Iterable[str], advice: str = "") -> None:
        self.owner, self.name, self.known, self.advice = owner, name, tuple(known), advice
        reason = f": {advice}" if advice else f"; the parameters are {', '.join(self.known)}"
        super().__init__(f"{owner} has no {name!r}{reason}")


class PromptPoolingError(RequestError):
    """The checkpoint puts a prompt before texts, and its vectors leave that prompt's tokens out."""


class DeadEndError(RequestError):
    """No token is allowed next, or the grammar needs too much work to say which."""

    def __init__(self, num_tokens: int, reason: str) -> None:
        self.num_tokens, self.reason = num_tokens, reason
        super().__init__(
            f"after {counted(num_tokens, 'output token')} no token can follow: {reason}; loosen the "
            "structured output or allowed_token_ids"
        )


class LibraryPanicError(RequestError):
    """Compiled code of another project panicked on this request."""

    def __init__(self, library: str, reason: str) -> None:
        self.library, self.reason = library, reason
        super().__init__(
            f"{library} gave up on this request: {reason}; change its text, or use a checkpoint "
            "whose tokenizer is intact"
        )


class ChatTemplateError(RequestError):
    """The checkpoint has no chat template, or it cannot render these messages."""


class ChatTemplateLimitError(RequestError):
    """The chat template runs too long, or writes too much; not a ChatTemplateError: probes catch those."""


class UnknownRequestError(RequestError, KeyError):
    """No live request has this id."""

    __str__ = Exception.__str__  # a KeyError's would put the message in quotes

    def __init__(self, request_id: object) -> None:
        self.request_id = request_id
        super().__init__(f"no live request has id {request_id!r}; it has ended or never existed")


class OverloadedError(RequestError):
    """The queue is full; nothing was queued."""

    def __init__(self, num_waiting: int, limit: int, retry_after_s: float) -> None:
        self.num_waiting, self.limit, self.retry_after_s = num_waiting, limit, retry_after_s
        super().__init__(
            f"{num_waiting} answers wait and max_waiting is {limit}; try again in "
            f"{retry_after_s:.0f} s, or start with a larger max_waiting"
        )


class CompileBusyError(OverloadedError):
    """Too many grammars are being compiled; nothing was queued."""

    def __init__(self, retry_after_s: float) -> None:
        self.num_waiting, self.limit, self.retry_after_s = 0, 0, retry_after_s
        RequestError.__init__(
            self, f"other formats are still being compiled; try again in {retry_after_s:.0f} s"
        )


class ClusterFullError(OverloadedError):
    """The queues of all replicas are full; nothing was queued."""

    def __init__(self, num_replicas: int, retry_after_s: float) -> None:
        self.num_waiting, self.limit, self.retry_after_s = 0, 0, retry_after_s
        RequestError.__init__(
            self,
            f"the queues of all {num_replicas} replicas are full; try again in "
            f"{retry_after_s:.0f} s, or start more replicas",
        )


class TokensWaitError(OverloadedError):
    """Too many prompt tokens are queued; nothing was queued."""

    def __init__(self, queued: int, num_tokens: int, limit: int, retry_after_s: float) -> None:
        self.num_waiting, self.limit, self.retry_after_s = queued, limit, retry_after_s
        RequestError.__init__(
            self,
            f"{queued} prompt tokens wait and this prompt has {num_tokens} more; the limit is "
            f"{limit}; try again in {retry_after_s:.0f} s, or start with a larger pool",
        )


class CacheError(RamifyError):
    """Misuse of the cache core, or too few pages."""


class OutOfPagesError(CacheError):
    """Fewer pages are free or evictable than requested; nothing was evicted or changed.

    Args:
        pins: (id, owner, pages) of each pin, which keep pages from eviction; the message names the
            largest.
    """

    def __init__(
        self,
        asked: int,
        free: int,
        evictable: int,
        total: int,
        pins: tuple[tuple[int, str, int], ...] = (),
    ) -> None:
        self.asked, self.free, self.evictable, self.total = asked, free, evictable, total
        self.pins = pins
        largest = heapq.nlargest(MAX_NAMED_PINS, pins, key=lambda pin: pin[2])
        named = [
            f"{number}{f' of {owner[:MAX_OWNER_CHARS]!r}' if owner else ''} ({counted(pages, 'page')})"
            for number, owner, pages in largest
        ]
        if len(pins) > len(named):
            named.append(f"and {len(pins) - len(named)} more")
        cause = f"; pins hold pages: {', '.join(named)}" if pins else ""
        way_out = "unpin some, release a lease" if pins else "release a lease"
        super().__init__(
            f"{counted(asked, 'page')} asked for, but of {total} only {free} are free and {evictable} can "
            f"be evicted{cause}; {way_out}, ask for fewer pages, or use a larger pool"
        )


class InvalidKeyError(CacheError, ValueError):
    """Atoms or a namespace that cannot be compared."""


class LeaseError(CacheError):
    """A lease was released before, was replaced, or belongs to another cache."""


class PinError(CacheError):
    """Nothing to pin, no budget left for the pin, or no such pin; nothing changed."""


class PageOwnershipError(CacheError):
    """A page was given back or published by a caller that does not own it."""


class SlotOutOfRangeError(CacheError, IndexError):
    """A slot outside the pool, from a hole (-1) in a block table for instance."""

    def __init__(self, low: int, high: int, num_slots: int) -> None:
        self.low, self.high, self.num_slots = low, high, num_slots
        super().__init__(
            f"slots {low} to {high} are not all in 0..{num_slots - 1}; give every token a page "
            "before it is written or read"
        )


class InvariantError(CacheError):
    """`check()` found a contradiction: a bug in Ramify."""


class LogError(RamifyError, ValueError):
    """A log of requests cannot be read, or lacks what a command needs."""


class StepMemoryError(RamifyError, MemoryError):
    """A forward pass, or a copy of pages, ran out of memory; the step had no effect."""

    def __init__(self, num_tokens: int, cause: str) -> None:
        self.num_tokens = num_tokens
        super().__init__(
            f"a step of {counted(num_tokens, 'token')} ran out of memory ({cause}); free some, or start with "
            "a smaller kv_cache_tokens, max_batch_tokens or max_model_len"
        )


class StepFailedError(RamifyError):
    """A request failed in its steps, or by a fault of the engine; its pages are released."""


class StoreUnavailableError(RamifyError):
    """A store of K/V pages is closed or out of reach; requests compute without it."""

    def __init__(self, store: str, reason: str, retry_after_s: float | None = None) -> None:
        self.store, self.reason, self.retry_after_s = store, reason, retry_after_s
        again = "" if retry_after_s is None else f"; tried again in {retry_after_s:.1f} s"
        super().__init__(f"{store} answers no call: {reason}{again}")


ENGINE_PACKAGES = (
    "torch", "safetensors", "tokenizers", "prometheus_client", "starlette", "uvicorn", "xxhash", "regex"
)  # fmt: skip


class MissingPackageError(RamifyError, ImportError):
    """A package of one of Ramify's extras is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'ramify[{extra}]'")
        self.package, self.extra = package, extra

    @classmethod
    def of(cls, error: ModuleNotFoundError) -> MissingPackageError | None:
        """The error to raise for a failed import; None if the module is in no extra."""
        package = (error.name or "").split(".")[0]
        return cls(package, "cpu") if package in ENGINE_PACKAGES else None


class ConcurrentCallError(RamifyError):
    """A thread made a call while another thread was inside the same engine or cache; it had no effect."""

    def __init__(self, call: str, thread: str, running_call: str, running_thread: str) -> None:
        self.call, self.thread = call, thread
        self.running_call, self.running_thread = running_call, running_thread
        super().__init__(
            f"{call}() was called by thread {thread!r} while thread {running_thread!r} was in "
            f"{running_call}; use one thread for a loop of add_request and step, and for an "
            "EngineCore, planner or PrefixCache of your own, or hold a lock around your calls; "
            "LLM.generate, LLM.chat, LLM.cache and AsyncLLM may be called by several threads"
        )


class DrainingError(RamifyError):
    """The engine is shutting down; nothing was queued."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            "the engine is shutting down: it finishes the requests that it has and takes no new "
            f"ones; ask another one, or again in {retry_after_s:g} s"
        )


class NoReplicaError(RamifyError):
    """No replica can take a request now; try again in `retry_after_s`."""

    def __init__(self, retry_after_s: float, why: str = "none is connected") -> None:
        super().__init__(f"there is no replica for this request: {why}; try again later")
        self.retry_after_s = retry_after_s


class ReplicaLostError(RamifyError):
    """The replica that computed a request has gone, and no other can go on with its answer."""


class RolloutError(RamifyError):
    """Some replicas have other weights than the others, since replacing them has failed at one."""

    def __init__(self, model: str, replica: str, done: Sequence[str], reason: str) -> None:
        self.model, self.replica, self.done = model, replica, tuple(done)
        super().__init__(
            f"replica {replica} has other weights: {reason}; {', '.join(done) or 'none'} of the others have "
            f"those of {model!r}: try again, or replace them by those of before. Until then no answer "
            "goes on at a replica with other weights"
        )


class EngineStoppedError(RamifyError):
    """The engine was closed, or a bug has ended it."""


class RankLostError(EngineStoppedError):
    """A process of tensor parallelism has ended or does not answer, and its engine has ended with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the engine has ended: make another one, or restart the server")
        self.reason = reason
