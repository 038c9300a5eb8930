"""One request in flight: what is sent to the engine, its output stream and its prompt cache usage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ramify.cache.key import CacheKey
from ramify.engine.serving.streams import Stream
from ramify.outputs import CacheReport, FinishReason, RequestOutput, StepOutput, TokenLogprob
from ramify.params import SamplingParams
from ramify.server.cache_miss import CacheMiss
from ramify.server.prompt_renderer import RenderedPrompt
from ramify.server.request_history import HistoryEntry
from ramify.server.tenants import Caller
from ramify.server.tool_calls import (
    ParsedToolCall,
    TextOrCall,
    ToolCallFormat,
    ToolCallParser,
    split,
    stop_after_call,
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of any API, translated for the engine."""

    history_entry: HistoryEntry
    params: SamplingParams
    salt: str = ""
    priority: int = 0
    is_prewarm: bool = False  # compute and cache the prompt; the response has no text
    is_chat: bool = False  # a later request may send the answer back as a message
    # A parser for one answer; None: answers are plain text.
    new_tool_parser: Callable[[], ToolCallParser | None] = lambda: None

    @property
    def prompt(self) -> RenderedPrompt:
        """Token ids of the prompt, and the request fields that they came from."""
        return self.history_entry.prompt


def with_tool_calls(
    request: GenerationRequest,
    tools: Sequence[Mapping[str, Any]],
    call_format: ToolCallFormat,
    *,
    forced: bool,
    single: bool,
) -> GenerationRequest:
    """A request whose answers are parsed for calls of these tools; the same one if there are none.

    Args:
        tools: definitions of functions; empty if the model must not call any.
        forced: `params.structured` allows nothing but a call.
        single: at most one call; the answer ends after it if the format has an end delimiter.
    """
    if not tools:
        return request
    names = [tool["function"]["name"] for tool in tools]
    params = request.params
    if single and not forced:
        params = stop_after_call(params, call_format)
    new_parser = partial(ToolCallParser, call_format, names, forced=forced, single=single)
    return replace(request, params=params, new_tool_parser=new_parser)


def sampling_filters(
    temperature: float | None, top_k: int | None, top_p: float | None
) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`. Clients may send `top_p=0` (greedy), `top_k<=0` (off)."""
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": top_k if top_k is not None and top_k > 0 else None,
        "top_p": 1.0 if top_p is None else max(top_p, 1e-9),
    }


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """`usage.ramify_cache`: `read + shared + computed` is the length of the prompt in tokens."""

    read: int  # from the cache
    shared: int  # computed by another request at the same time
    computed: int
    written: int  # computed tokens that stay cached for others: whole pages only
    miss: CacheMiss | None
    pins_refused: int = 0  # breakpoints whose prefix could not be pinned

    @property
    def cached(self) -> int:
        """Tokens that this request did not have to compute."""
        return self.read + self.shared

    def as_json(self) -> dict[str, Any]:
        """The JSON object of a response."""
        payload: dict[str, Any] = {
            "read": self.read,
            "shared_in_flight": self.shared,
            "computed": self.computed,
            "written": self.written,
        }
        if self.pins_refused:
            payload["pins_refused"] = self.pins_refused
        return payload | ({} if self.miss is None else {"miss": self.miss.as_json()})


@dataclass(slots=True)
class Generation:
    """A request that the engine has accepted; iterate over it once.

    `cache` is set from the first event on, `output` by the last one.
    """

    id: str
    request: GenerationRequest
    caller: Caller
    created: int  # Unix seconds
    events: Stream
    first_output: StepOutput | None
    miss: CacheMiss | None
    page_size: int
    publishes: bool  # the prefix cache is on
    on_end: Callable[[Generation], None]
    after_end: Callable[[Generation], Awaitable[None]]
    on_event: Sequence[Callable[[Generation, StepOutput], None]]
    cache: CacheUsage | None = None
    output: RequestOutput | None = None
    num_output: int = 0  # tokens so far, of all choices
    num_pins_refused: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        if self.first_output is not None:
            self._record(self.first_output)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        """Yield events until the last choice has ended."""
        try:
            if self.first_output is not None:
                yield self.first_output
            async for event in self.events:
                yield self._record(event)
        finally:
            await self.close()

    async def close(self) -> None:
        """Abort the request if it is live, then call `on_end` and `after_end`. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            try:
                await self.events.aclose()
            finally:
                self.on_end(self)
            await self.after_end(self)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that this request did not have to compute, as far as is known."""
        return 0 if self.cache is None else self.cache.cached

    def page_hashes(self) -> list[int]:
        """Chained hashes of the prompt's whole pages, the first 64 bits of each."""
        key = CacheKey(self.request.prompt.ids, self.caller.tenant.encode("utf-8", "surrogatepass"))
        hashes = key.page_hashes(self.page_size)
        return [int.from_bytes(page_hash[:8], "big") for page_hash in hashes]

    def raise_error(self, index: int | None = None) -> None:
        """Raise the error that ended the request, or that ended choice `index`, if there is one."""
        if self.output is not None and self.output.error is not None:
            reasons = [completion.finish_reason for completion in self.output.completions]
            if index is None or reasons[index] is FinishReason.ERROR:
                raise self.output.error

    async def wait(self) -> RequestOutput:
        """Consume all events; returns the complete output, or raises the error that ended it."""
        async for _ in self:
            pass
        self.raise_error()
        assert self.output is not None, "the engine ends every request"
        return self.output

    def _record(self, event: StepOutput) -> StepOutput:
        self.num_output += len(event.new_token_ids)
        if event.prefix is not None:
            self.num_pins_refused = event.prefix.num_pins_refused
        if event.output is not None:
            self.output = event.output
            self.cache = self._cache_usage(event.output.cache)
        elif self.cache is None and event.cache is not None:
            self.cache = self._cache_usage(event.cache)
        for call in self.on_event:
            call(self, event)
        return event

    def _cache_usage(self, report: CacheReport) -> CacheUsage:
        num_shareable, max_shared = (
            len(self.request.prompt.ids),
            self.request.history_entry.max_shared,
        )
        if max_shared is not None:
            num_shareable = min(num_shareable, max_shared)
        num_publishable = num_shareable // self.page_size * self.page_size if self.publishes else 0
        cached = report.read_tokens + report.shared_tokens
        return CacheUsage(
            read=report.read_tokens,
            shared=report.shared_tokens,
            computed=report.computed_tokens,
            written=max(0, min(num_publishable, cached + report.computed_tokens) - cached),
            miss=self.miss,
            pins_refused=self.num_pins_refused,
        )


def total_usage(generations: Sequence[Generation]) -> CacheUsage | None:
    """Sums over generations, and the first miss; None while the usage of none is known."""
    usages = [generation.cache for generation in generations if generation.cache is not None]
    if not usages:
        return None
    return CacheUsage(
        read=sum(usage.read for usage in usages),
        shared=sum(usage.shared for usage in usages),
        computed=sum(usage.computed for usage in usages),
        written=sum(usage.written for usage in usages),
        miss=next((usage.miss for usage in usages if usage.miss is not None), None),
        pins_refused=sum(usage.pins_refused for usage in usages),
    )


TRUNCATED = (FinishReason.LENGTH, FinishReason.ABORT)  # ABORT: the server shut down


@dataclass(slots=True)
class Answer:
    """One answer of a generation, as far as it was generated."""

    parser: ToolCallParser | None  # None: the answer is plain text
    stop_token_ids: frozenset[int] = frozenset()  # they end an answer and are not shown with it
    text: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0

    def visible_logprobs(self, event: StepOutput) -> tuple[TokenLogprob, ...]:
        """Logprobs of an event's tokens, without the stop token that ended the answer."""
        logprobs = event.logprobs
        if (
            event.finish_reason is FinishReason.STOP
            and logprobs
            and logprobs[-1].token_id in self.stop_token_ids
        ):
            return logprobs[:-1]
        return logprobs

    def add(self, event: StepOutput) -> list[TextOrCall]:
        """Append an event; returns the text to show and the calls that it completes."""
        self.num_tokens += len(event.new_token_ids)
        self.logprobs += self.visible_logprobs(event)
        self.finish_reason = event.finish_reason
        pieces: list[TextOrCall] = [event.text] if event.text else []
        if self.parser is not None:
            pieces = self.parser.feed(event.text, is_last=event.finish_reason is not None)
        text, calls = split(pieces)
        self.text += text
        self.calls += calls
        return pieces
