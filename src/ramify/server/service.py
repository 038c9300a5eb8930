"""One request on its way through the engine, whichever API it came by."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from ramify import __version__
from ramify.cache.explain import Explanation
from ramify.cache.inspection import count_pages
from ramify.cache.key import CacheKey
from ramify.cache.maintenance import evict_suffix
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.types import Node
from ramify.engine.cache_admin.view import AsyncCacheView
from ramify.engine.core import EngineCore, StepOutput
from ramify.engine.prefix_namespaces import owner_of_namespace, owner_of_node
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.serving.engine_thread import Health
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import PinError
from ramify.params import (
    CacheReport,
    FinishReason,
    RequestOutput,
    SamplingParams,
)
from ramify.server.cache_miss import CacheMiss, explain_miss
from ramify.server.errors import ApiError
from ramify.server.prompt_renderer import REASONING_TAGS, PromptRenderer, RenderedPrompt
from ramify.server.request_history import HistoryEntry, RequestHistory
from ramify.server.tenants import Caller, QuotaMeter
from ramify.server.tool_calls import detect_format

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_BYTES_PER_TOKEN = 16
MAX_QUEUED_POOLS = 4  # prompt tokens that wait, in sizes of the pool: more would wait for minutes


class Engine(Protocol):
    """What the server needs of `ramify.AsyncLLM`."""

    @property
    def cache(self) -> AsyncCacheView:
        """What is cached, and calls on it."""
        ...

    async def run(self, call: Callable[[EngineCore], T]) -> T:
        """`call(core)` in the engine's thread, between two steps."""
        ...

    def health(self) -> Health:
        """Whether the engine is alive; waits for nothing."""
        ...

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        max_shared: int | None = None,
    ) -> AsyncIterator[StepOutput]:
        """What becomes of a request, as it comes; leaving the iterator aborts it."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request in the engine's words, made by the translation of an API."""

    prompt: RenderedPrompt
    params: SamplingParams
    history_entry: HistoryEntry
    salt: str = ""
    priority: int = 0
    is_prewarm: bool = False  # True: compute the prompt and keep it, say nothing
    max_shared: int | None = None  # tokens that are kept for others; None: all
    is_chat: bool = False  # its answer may come back as a message


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """`usage.ramify_cache`: where the tokens of a prompt came from; they add up to its length."""

    read: int
    shared: int  # computed by another request at the same time
    computed: int
    written: int  # of the computed ones: kept for others, whole pages
    miss: CacheMiss | None

    @property
    def cached(self) -> int:
        """Tokens that nobody computed for this request."""
        return self.read + self.shared

    def as_json(self) -> dict[str, Any]:
        """As it stands in a response."""
        told: dict[str, Any] = {
            "read": self.read,
            "shared_in_flight": self.shared,
            "computed": self.computed,
            "written": self.written,
        }
        return told | ({} if self.miss is None else {"miss": self.miss.as_json()})


@dataclass(slots=True)
class Generation:
    """A request that the engine has; iterate over it once.

    `cache` is there from the first event on, `output` at the end.
    """

    id: str
    request: GenerationRequest
    caller: Caller
    created: int
    events: AsyncIterator[StepOutput]
    first_output: StepOutput | None
    miss: CacheMiss | None
    page_size: int
    publishes: bool = True  # the prefix cache is on
    cache: CacheUsage | None = None
    output: RequestOutput | None = None
    on_end: list[Callable[[Generation], None]] = field(default_factory=list)
    after_end: Callable[[Generation], Awaitable[None]] | None = None  # after its end
    on_event: list[Callable[[Generation, StepOutput], None]] = field(default_factory=list)
    num_output: int = 0  # tokens so far, of all answers
    is_closed: bool = False

    def __post_init__(self) -> None:
        if self.first_output is not None:
            self._note(self.first_output)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        """Events up to the end of the last answer."""
        try:
            if self.first_output is not None:
                yield self.first_output
            async for event in self.events:
                yield self._note(event)
        finally:
            await self.close()

    async def close(self) -> None:
        """Withdraw the request if it is live. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            close = getattr(self.events, "aclose", None)
            try:
                if close is not None:
                    await close()
            finally:
                for call in self.on_end:
                    call(self)
            if self.after_end is not None and self.output is not None:
                await self.after_end(self)

    def page_hashes(self) -> list[int]:
        """Chained hashes of the prompt's whole pages, 64 bits of each."""
        key = CacheKey(self.request.prompt.ids, self.caller.tenant.encode("utf-8", "surrogatepass"))
        hashes = key.page_hashes(self.page_size)
        return [int.from_bytes(one[:8], "big") for one in hashes]

    def raise_error(self, index: int | None = None) -> None:
        """Raise what ended the request, or one of its answers, if it could not be served."""
        if self.output is not None and self.output.error is not None:
            reasons = [one.finish_reason for one in self.output.completions]
            if index is None or reasons[index] is FinishReason.ERROR:
                raise self.output.error

    async def wait(self) -> RequestOutput:
        """Wait for the end."""
        async for _ in self:
            pass
        assert self.output is not None, "the engine ends every request"
        return self.output

    def _note(self, event: StepOutput) -> StepOutput:
        self.num_output += len(event.new_token_ids)
        if event.output is not None:
            self.output = event.output
            self.cache = self._cache_usage(event.output.cache)
        elif self.cache is None and event.cache is not None:
            self.cache = self._cache_usage(event.cache)
        for call in self.on_event:
            call(self, event)
        return event

    def _cache_usage(self, report: CacheReport) -> CacheUsage:
        most, kept = len(self.request.prompt.ids), self.request.max_shared
        most = most if kept is None else min(most, kept)
        whole = most // self.page_size * self.page_size if self.publishes else 0
        cached = report.read_tokens + report.shared_tokens
        return CacheUsage(
            read=report.read_tokens,
            shared=report.shared_tokens,
            computed=report.computed_tokens,
            written=max(0, min(whole, cached + report.computed_tokens) - cached),
            miss=self.miss,
        )


class Service:
    """The engine, and what the server remembers beside it.

    Args:
        engine: an `AsyncLLM`.
        tokenizer: of its model.
        model: the name that clients use; `aliases` are other names for it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_model_len: int,
        page_size: int,
        aliases: Sequence[str] = (),
        prefix_cache: bool = True,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.model, self.names = model, (model, *aliases)
        self.max_model_len, self.page_size, self.prefix_cache = (
            max_model_len,
            page_size,
            prefix_cache,
        )
        self.prompt_renderer = PromptRenderer(tokenizer)
        self.history = RequestHistory()
        self.quotas = QuotaMeter()
        self.started_s = int(time.time())
        self.special_token_ids = tokenizer.special_token_ids
        self.chat_template = tokenizer.chat_template or ""
        self.fingerprint = f"ramify-{__version__}"
        self.listeners: list[Callable[[Generation], None]] = []  # logs, metrics
        self.event_listeners: list[Callable[[Generation, StepOutput], None]] = []

    def check_model(self, name: str | None) -> str:
        """The name by which the model was asked for.

        Raises:
            ApiError: 404, another model was asked for.
        """
        if name is None:
            return self.model
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_prompt_bytes(self, num_bytes: int, param: str) -> None:
        """Refuse what is longer than any prompt before it is rendered and tokenised.

        Raises:
            ApiError: so many bytes of text are more tokens than the context has.
        """
        limit = MAX_BYTES_PER_TOKEN * self.max_model_len
        if num_bytes > limit:
            raise ApiError(
                400,
                f"{num_bytes} bytes of text; more than {limit} cannot fit into this model's "
                f"context of {self.max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )

    async def explain(
        self, prompt: RenderedPrompt, caller: Caller, salt: str = ""
    ) -> tuple[int, CacheMiss | None]:
        """How many tokens of a prompt are there now, and why no more; runs nothing."""
        found = await self.engine.run(lambda core: self._explanation(core, prompt, caller, salt))
        return 0 if found is None else found.hit_tokens, self._cache_miss(found, prompt)

    def _explanation(
        self, core: EngineCore, prompt: RenderedPrompt, caller: Caller, salt: str
    ) -> Explanation | None:
        ids = validate_token_ids(prompt.ids, core.vocab_size)
        if not self.prefix_cache:
            return None

        def own(namespace: bytes) -> bool:
            return owner_of_namespace(namespace)[0] == caller.tenant

        return core.cache.explain(core.namespaces.key(ids, caller.tenant, salt), may_tell=own)

    def _cache_miss(self, found: Explanation | None, prompt: RenderedPrompt) -> CacheMiss | None:
        if found is None:
            return CacheMiss("disabled", 0)
        return explain_miss(found, prompt, self._decode)

    @property
    def cache(self) -> AsyncCacheView:
        """See `AsyncLLM.cache`."""
        return self.engine.cache

    async def start(self, request: GenerationRequest, caller: Caller, *, prefix: str) -> Generation:
        """Hand a request to the engine and wait until it has begun, or was refused.

        Args:
            prefix: of the id that the client sees: "chatcmpl-", "msg_", ….

        Raises:
            ApiError, RequestError: it is refused; nothing of it is left.
        """
        num_tokens = len(request.prompt.ids)
        self.quotas.acquire(caller, num_tokens)
        generation = None
        try:

            def prepare(core: EngineCore) -> Explanation | None:  # all at once: each call waits
                core.scheduler.max_waiting_tokens = MAX_QUEUED_POOLS * core.config.kv_cache_tokens
                found = self._explanation(core, request.prompt, caller, request.salt)
                self._enforce_cache_share(
                    core, request, caller, 0 if found is None else found.hit_tokens
                )
                return found

            miss = self._cache_miss(await self.engine.run(prepare), request.prompt)
            events = self.engine.stream(
                request.prompt.ids,
                request.params,
                priority=request.priority,
                tenant=caller.tenant,
                salt=request.salt,
                max_shared=request.max_shared,
            )
            first = await anext(aiter(events), None)
            generation = Generation(
                id=prefix + secrets.token_hex(16),
                request=request,
                caller=caller,
                created=int(time.time()),
                events=events,
                first_output=first,
                miss=miss,
                page_size=self.page_size,
                publishes=self.prefix_cache,
                on_end=[self._ended],
                on_event=self.event_listeners,
                after_end=self._evict_reasoning,
            )
            try:
                await self._pin_breakpoints(request, caller)
            except BaseException:
                await generation.close()
                raise
            return generation
        finally:
            if generation is None:
                self.quotas.release(caller, num_tokens, 0)

    async def start_all(
        self, requests: Sequence[GenerationRequest], caller: Caller, *, prefix: str
    ) -> list[Generation]:
        """`start` for several at once: all of them, or the first error and none.

        Raises:
            ApiError: 400, there are more than may wait at once; else as `start`.
        """
        limit = await self.engine.run(lambda core: core.max_waiting) if len(requests) > 1 else None
        if limit is not None and len(requests) > limit:
            raise ApiError(
                400,
                f"{len(requests)} prompts in one request; the limit is {limit}, as many as may wait "
                "here at once. Send several requests",
                param="prompt",
            )
        tasks = [asyncio.ensure_future(self.start(job, caller, prefix=prefix)) for job in requests]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for one in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(one, Generation):
                    await one.close()
            raise

    def _ended(self, generation: Generation) -> None:
        output, who, use = generation.output, generation.caller, generation.cache
        computed = generation.num_output  # of a client that went away: what it had by then
        if output is not None:
            computed = output.usage.completion_tokens
        computed += 0 if use is None else use.computed
        self.quotas.release(who, len(generation.request.prompt.ids), computed)
        self.history.put(who.tenant, generation.id, generation.request.history_entry)
        for listener in self.listeners:
            listener(generation)

    async def _evict_reasoning(self, generation: Generation) -> None:
        """Evict an answer that the conversation goes on without, as the template leaves it out.

        Tools' results come before the next message of the user: until then templates keep it.
        """
        output, job = generation.output, generation.request
        if output is None or not job.is_chat or not self.prefix_cache or job.max_shared is not None:
            return
        mark = detect_format(self.chat_template).begin or "{"
        thoughts = []
        for one in output.completions:
            thought, found, said = one.text.rpartition(REASONING_TAGS[1])
            is_thought = bool(found) and thought.lstrip().startswith(REASONING_TAGS[0])
            if is_thought and not (job.history_entry.tools and mark in said):
                thoughts.append(one)
        if not thoughts or not await asyncio.to_thread(
            self.prompt_renderer.template_drops_reasoning
        ):
            return

        def drop(core: EngineCore) -> None:
            for one in thoughts:
                key = core.namespaces.key(
                    job.prompt.ids, generation.caller.tenant, job.salt, answer=one.token_ids
                )
                evict_suffix(core.cache, key, job.prompt.num_stable_tokens)

        await self.engine.run(drop)

    def _enforce_cache_share(
        self, core: EngineCore, request: GenerationRequest, caller: Caller, num_found: int
    ) -> None:
        """Before a tenant that has more than its share takes others' pages, its own oldest go."""
        share = caller.quota.max_cached_share
        if share is None:
            return
        stats, size = core.cache.stats(), self.page_size
        need = -(-len(request.prompt.ids) // size) - num_found // size - stats.free_pages
        if need <= 0:
            return
        atoms = core.namespaces.key(request.prompt.ids, caller.tenant, request.salt).atoms
        width = size * ATOM_BYTES
        leaves: list[tuple[int, int]] = []

        def is_own(node: Node) -> bool:
            return owner_of_node(node)[0] == caller.tenant

        def is_spare(node: Node) -> bool:  # what this prompt begins with is about to be read
            return is_own(node) and not atoms.startswith(node.atoms[:width], node.start * width)

        def look(node: Node) -> bool:
            if node.is_leaf and is_spare(node):
                leaves.append((node.last_access, len(node.pages)))
            return is_own(node)

        over = count_pages(core.cache, look) + need - int(share * stats.num_pages)
        goal = min(over, need)
        if goal <= 0 or not leaves:
            return
        leaves.sort()
        at = bisect_left(list(accumulate(num_pages for _, num_pages in leaves)), goal)
        oldest, _ = leaves[min(at, len(leaves) - 1)]
        core.cache.evict_if(lambda one: one.last_access <= oldest and is_spare(one), goal)

    async def _pin_breakpoints(self, request: GenerationRequest, caller: Caller) -> None:
        """Keep what a request asked to keep; what is over the budget is only logged."""

        def keep(core: EngineCore) -> None:
            known = {pin.key for pin in core.cache.pins(caller.tenant)}  # a hit has refreshed them
            for one in request.prompt.breakpoints:
                whole = one.num_tokens // self.page_size * self.page_size
                key = core.namespaces.key(request.prompt.ids, caller.tenant, request.salt).prefix(
                    whole
                )
                if not whole or key in known:
                    continue
                try:
                    core.cache.pin(key, caller.tenant, one.ttl_s)
                except PinError as error:
                    logger.info("a prefix of %d tokens is not kept: %s", whole, error)

        if request.prompt.breakpoints and self.prefix_cache:
            await self.engine.run(keep)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
