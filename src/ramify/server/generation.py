"""One request in flight: what is sent to the engine, its output stream and its prompt cache usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.cache.key import CacheKey
from ramify.engine.serving.streams import Stream
from ramify.errors import EngineStoppedError, UnknownRequestError
from ramify.outputs import CacheReport, FinishReason, Placement, RequestOutput, StepOutput
from ramify.params import SamplingParams
from ramify.prompt_rules import AppliedRule
from ramify.server.answers.answer import AnswerParts, PartEvent, PlainTextParser
from ramify.server.answers.route import route_json
from ramify.server.history.cache_miss import CacheMiss
from ramify.server.history.stored_requests import HistoryEntry
from ramify.server.model_dialects.events import OutputParser
from ramify.server.prompts.renderer import NamedSpan, RenderedPrompt
from ramify.server.tenants import Caller


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of any API, translated for the engine."""

    history_entry: HistoryEntry
    params: SamplingParams
    salt: str = ""
    session: str = ""  # name of the session that it is a turn of
    ends_session: bool = False
    priority: int = 0
    is_prewarm: bool = False  # compute and cache the prompt; the response has no text
    is_chat: bool = False  # a later request may send the answer back as a message
    warnings: tuple[str, ...] = ()  # what was ignored or changed, for the client
    new_parser: Callable[[], OutputParser] = PlainTextParser  # for one answer
    format_path: str = ""  # field that sets `params.structured`, which the engine compiles
    ends_after_call: bool = False  # an answer ends with its first call
    is_remembered: bool = True  # in the request history, when it has ended

    @property
    def prompt(self) -> RenderedPrompt:
        """Token ids of the prompt, and the request fields that they came from."""
        return self.history_entry.prompt

    def event_types(self, answer: str) -> set[type]:
        """Types of the parser's events in the text of an answer."""
        return {type(event) for event in self.new_parser().feed(answer, is_last=True)}


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """`usage.ramify_cache`: `read + shared + computed` is the length of the prompt in tokens."""

    read: int  # from the cache
    shared: int  # computed by another request at the same time
    computed: int
    written: int  # computed tokens that stay cached for others: whole pages only
    miss: CacheMiss | None
    pins_refused: int = 0  # breakpoints whose prefix could not be pinned
    placement: Placement | None = None  # in a cluster
    resumed: bool = False  # a replica with another identity has gone on with the answer
    tiers: Mapping[str, int] = field(default_factory=dict)  # of `read`, by tier: host, disk
    named: NamedSpan | None = None  # the prefix that the request names
    rules: tuple[AppliedRule, ...] = ()  # of prompt hygiene, that have changed the prompt
    placeholders: tuple[str, ...] = ()  # paths of content that the model did not get

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
        if self.tiers:
            payload["read_by_tier"] = {"pool": self.read - sum(self.tiers.values()), **self.tiers}
        if self.named is not None:
            payload["prefix"] = self.named.as_json(self.read)
        if self.rules:
            payload["rules"] = [rule.as_json() for rule in self.rules]
        if self.placeholders:
            payload["placeholders"] = [*self.placeholders]
        if self.pins_refused:
            payload["pins_refused"] = self.pins_refused
        if self.resumed:
            payload["resumed"] = True
        if self.placement is not None:
            payload["route"] = route_json(self.placement, self.cached)
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
    arrival_ns: int  # when the engine got it, in nanoseconds since the epoch
    events: Stream
    first_output: StepOutput | None
    miss: CacheMiss | None
    page_size: int
    publishes: bool  # the prefix cache is on
    on_end: Callable[[Generation], None]
    after_end: Callable[[Generation], Awaitable[None]]
    on_event: Sequence[Callable[[Generation, StepOutput], None]]
    abort: Callable[[int], Awaitable[None]]  # a live request of the engine, by its id
    cache: CacheUsage | None = None
    output: RequestOutput | None = None
    num_output: int = 0  # tokens so far, of all choices
    num_pins_refused: int = 0
    placement: Placement | None = None
    is_closed: bool = False
    is_complete: bool = False  # all answers have ended, though the engine may go on

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

    async def complete(self, request_id: int) -> None:
        """Let the engine end the request now, with the finish reason `stop`: its answers are whole."""
        self.is_complete = True
        # It may have ended meanwhile.
        with suppress(UnknownRequestError, EngineStoppedError):
            await self.abort(request_id)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that this request did not have to compute, as far as is known."""
        return 0 if self.cache is None else self.cache.cached

    @property
    def end_reason(self) -> str:
        """The finish reason of the ended request; `disconnected` if its client left before."""
        return "disconnected" if self.output is None else str(self.output.finish_reason)

    def page_hashes(self) -> list[int]:
        """Chained hashes of the prompt's whole pages, the first 64 bits of each.

        Requests of different tenants or salts have no hash in common.
        """
        salt = f"\0{self.request.salt}" if self.request.salt else ""
        namespace = (self.caller.tenant + salt).encode("utf-8", "surrogatepass")
        key = CacheKey(self.request.prompt.ids, namespace)
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
        if self.is_complete:
            event = _completed(event)
        self.num_output += len(event.new_token_ids)
        if event.prefix is not None:
            self.num_pins_refused = event.prefix.num_pins_refused
            placement = event.prefix.placement
            if placement is not None and not self.caller.is_admin:
                placement = placement.without_load()
            self.placement = placement
        if event.output is not None:
            self.output = event.output
            self.cache = self._cache_usage(event.output.cache)
        elif self.cache is None and event.cache is not None:
            self.cache = self._cache_usage(event.cache)
        for call in self.on_event:
            call(self, event)
        return event

    def _cache_usage(self, report: CacheReport) -> CacheUsage:
        num_shareable = len(self.request.prompt.ids)
        if self.request.history_entry.max_shared is not None:
            num_shareable = min(num_shareable, self.request.history_entry.max_shared)
        num_publishable = num_shareable // self.page_size * self.page_size if self.publishes else 0
        cached = report.read_tokens + report.shared_tokens
        return CacheUsage(
            read=report.read_tokens,
            shared=report.shared_tokens,
            computed=report.computed_tokens,
            written=max(0, min(num_publishable, cached + report.computed_tokens) - cached),
            miss=self.miss,
            pins_refused=self.num_pins_refused,
            placement=self.placement,
            resumed=self.output is not None and self.output.resumed,
            tiers=report.tier_tokens,
            named=self.request.prompt.named,
            rules=self.request.prompt.rules,
            placeholders=self.request.prompt.placeholders,
        )


def _completed(event: StepOutput) -> StepOutput:
    """An event with the finish reason `stop` in place of `abort`."""
    output = event.output
    if output is not None:
        completions = (
            replace(completion, finish_reason=FinishReason.STOP)
            if completion.finish_reason is FinishReason.ABORT
            else completion
            for completion in output.completions
        )
        output = replace(output, completions=tuple(completions))
    is_aborted = event.finish_reason is FinishReason.ABORT
    finish_reason = FinishReason.STOP if is_aborted else event.finish_reason
    return replace(event, output=output, finish_reason=finish_reason)


async def answer_changes(
    generation: Generation, answers: Sequence[AnswerParts]
) -> AsyncIterator[tuple[StepOutput, list[PartEvent]]]:
    """Add each step to its answer; yields it with what it changes, until all answers have ended.

    The request ends with its answers, which may be before the engine would end it.

    Args:
        answers: by index.
    """
    async for step in generation:
        answer = answers[step.index]
        # An answer that has ended after its call may go on in the engine until the others end.
        if answer.finish_reason is not None:
            continue
        yield step, answer.add(step)
        has_ended = all(answer.finish_reason is not None for answer in answers)
        if has_ended and generation.output is None:
            await generation.complete(step.request_id)


def total_usage(generations: Sequence[Generation]) -> CacheUsage | None:
    """Sums over generations, and the first miss; None while the usage of none is known.

    Several may be at several replicas: the sums have no placement.
    """
    usages = [generation.cache for generation in generations if generation.cache is not None]
    if not usages:
        return None
    tiers = Counter[str]()
    for usage in usages:
        tiers.update(usage.tiers)
    return CacheUsage(
        read=sum(usage.read for usage in usages),
        shared=sum(usage.shared for usage in usages),
        computed=sum(usage.computed for usage in usages),
        written=sum(usage.written for usage in usages),
        miss=next((usage.miss for usage in usages if usage.miss is not None), None),
        pins_refused=sum(usage.pins_refused for usage in usages),
        placement=usages[0].placement if len(usages) == 1 else None,
        resumed=any(usage.resumed for usage in usages),
        tiers=dict(tiers),
        named=usages[0].named if len(usages) == 1 else None,
        rules=usages[0].rules if len(usages) == 1 else (),
        placeholders=usages[0].placeholders if len(usages) == 1 else (),
    )
