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
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.survey import count_pages
from ramify.cache.trim import drop_beyond
from ramify.cache.values import Node
from ramify.engine.cache_view import AsyncCacheView
from ramify.engine.core import EngineCore, StepOutput
from ramify.engine.intake import checked_ids
from ramify.engine.loop import Health
from ramify.engine.places import owner_of, whose
from ramify.engine.tokenizer import Tokenizer
from ramify.errors import PinError
from ramify.params import (
    CacheReport,
    FinishReason,
    RequestOutput,
    SamplingParams,
)
from ramify.server.errors import ApiError
from ramify.server.explain import Miss, miss_of
from ramify.server.prompts import THINK, Prompt, PromptMaker
from ramify.server.records import Record, RecordStore
from ramify.server.tenants import Caller, Meter
from ramify.server.tools import format_of

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
class Job:
    """A request in the engine's words, made by the translation of an API."""

    prompt: Prompt
    params: SamplingParams
    record: Record
    salt: str = ""
    priority: int = 0
    answer: bool = True  # False: compute the prompt and keep it, say nothing (prewarm)
    max_shared: int | None = None  # tokens that are kept for others; None: all
    is_chat: bool = False  # its answer may come back as a message


@dataclass(frozen=True, slots=True)
class CacheUse:
    """`usage.ramify_cache`: where the tokens of a prompt came from; they add up to its length."""

    read: int
    shared: int  # computed by another request at the same time
    computed: int
    written: int  # of the computed ones: kept for others, whole pages
    miss: Miss | None

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
    job: Job
    who: Caller
    created: int
    events: AsyncIterator[StepOutput]
    first: StepOutput | None
    miss: Miss | None
    page_size: int
    keeps: bool = True  # the prefix cache is on
    cache: CacheUse | None = None
    output: RequestOutput | None = None
    on_end: list[Callable[[Generation], None]] = field(default_factory=list)
    settle: Callable[[Generation], Awaitable[None]] | None = None  # after its end
    on_event: list[Callable[[Generation, StepOutput], None]] = field(default_factory=list)
    num_output: int = 0  # tokens so far, of all answers
    is_closed: bool = False

    def __post_init__(self) -> None:
        if self.first is not None:
            self._note(self.first)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        """Events up to the end of the last answer."""
        try:
            if self.first is not None:
                yield self.first
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
            if self.settle is not None and self.output is not None:
                await self.settle(self)

    def page_hashes(self) -> list[int]:
        """Chained hashes of the prompt's whole pages, 64 bits of each."""
        key = CacheKey(self.job.prompt.ids, self.who.tenant.encode("utf-8", "surrogatepass"))
        hashes = key.page_hashes(self.page_size)
        return [int.from_bytes(one[:8], "big") for one in hashes]

    def raise_error(self, index: int | None = None) -> None:
        """Raise what ended the request, or one of its answers, if it could not be served."""
        if self.output is not None and self.output.error is not None:
            reasons = [one.finish_reason for one in self.output.completions]
            if index is None or reasons[index] is FinishReason.ERROR:
                raise self.output.error

    async def whole(self) -> RequestOutput:
        """Wait for the end."""
        async for _ in self:
            pass
        assert self.output is not None, "the engine ends every request"
        return self.output

    def _note(self, event: StepOutput) -> StepOutput:
        self.num_output += len(event.new_token_ids)
        if event.output is not None:
            self.output = event.output
            self.cache = self._use(event.output.cache)
        elif self.cache is None and event.cache is not None:
            self.cache = self._use(event.cache)
        for call in self.on_event:
            call(self, event)
        return event

    def _use(self, report: CacheReport) -> CacheUse:
        most, kept = len(self.job.prompt.ids), self.job.max_shared
        most = most if kept is None else min(most, kept)
        whole = most // self.page_size * self.page_size if self.keeps else 0
        cached = report.read_tokens + report.shared_tokens
        return CacheUse(
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
        self.prompts = PromptMaker(tokenizer)
        self.records = RecordStore()
        self.meter = Meter()
        self.started_s = int(time.time())
        self.special_ids = tokenizer.special_ids
        self.chat_template = tokenizer.chat_template or ""
        self.fingerprint = f"ramify-{__version__}"
        self.listeners: list[Callable[[Generation], None]] = []  # logs, metrics
        self.event_listeners: list[Callable[[Generation, StepOutput], None]] = []

    def require_model(self, name: str | None) -> str:
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

    def require_short(self, num_bytes: int, param: str) -> None:
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

    async def look_up(self, prompt: Prompt, who: Caller, salt: str = "") -> tuple[int, Miss | None]:
        """How many tokens of a prompt are there now, and why no more; runs nothing."""
        found = await self.engine.run(lambda core: self._explanation(core, prompt, who, salt))
        return 0 if found is None else found.hit_tokens, self._miss(found, prompt)

    def _explanation(
        self, core: EngineCore, prompt: Prompt, who: Caller, salt: str
    ) -> Explanation | None:
        ids = checked_ids(prompt.ids, core.vocab_size)
        if not self.prefix_cache:
            return None

        def own(namespace: bytes) -> bool:
            return owner_of(namespace)[0] == who.tenant

        return core.cache.explain(core.places.key(ids, who.tenant, salt), may_tell=own)

    def _miss(self, found: Explanation | None, prompt: Prompt) -> Miss | None:
        if found is None:
            return Miss("disabled", 0)
        return miss_of(found, prompt, self._decode)

    @property
    def cache(self) -> AsyncCacheView:
        """See `AsyncLLM.cache`."""
        return self.engine.cache

    async def begin(self, job: Job, who: Caller, *, prefix: str) -> Generation:
        """Hand a request to the engine and wait until it has begun, or was refused.

        Args:
            prefix: of the id that the client sees: "chatcmpl-", "msg_", ….

        Raises:
            ApiError, RequestError: it is refused; nothing of it is left.
        """
        num_tokens = len(job.prompt.ids)
        self.meter.enter(who, num_tokens)
        generation = None
        try:

            def prepare(core: EngineCore) -> Explanation | None:  # all at once: each call waits
                core.scheduler.max_waiting_tokens = MAX_QUEUED_POOLS * core.config.kv_cache_tokens
                found = self._explanation(core, job.prompt, who, job.salt)
                self._make_room(core, job, who, 0 if found is None else found.hit_tokens)
                return found

            miss = self._miss(await self.engine.run(prepare), job.prompt)
            events = self.engine.stream(
                job.prompt.ids,
                job.params,
                priority=job.priority,
                tenant=who.tenant,
                salt=job.salt,
                max_shared=job.max_shared,
            )
            first = await anext(aiter(events), None)
            generation = Generation(
                id=prefix + secrets.token_hex(16),
                job=job,
                who=who,
                created=int(time.time()),
                events=events,
                first=first,
                miss=miss,
                page_size=self.page_size,
                keeps=self.prefix_cache,
                on_end=[self._ended],
                on_event=self.event_listeners,
                settle=self._drop_thinking,
            )
            try:
                await self._pin(job, who)
            except BaseException:
                await generation.close()
                raise
            return generation
        finally:
            if generation is None:
                self.meter.leave(who, num_tokens, 0)

    async def begin_all(self, jobs: Sequence[Job], who: Caller, *, prefix: str) -> list[Generation]:
        """`begin` for several at once: all of them, or the first error and none.

        Raises:
            ApiError: 400, there are more than may wait at once; else as `begin`.
        """
        limit = await self.engine.run(lambda core: core.max_waiting) if len(jobs) > 1 else None
        if limit is not None and len(jobs) > limit:
            raise ApiError(
                400,
                f"{len(jobs)} prompts in one request; the limit is {limit}, as many as may wait "
                "here at once. Send several requests",
                param="prompt",
            )
        tasks = [asyncio.ensure_future(self.begin(job, who, prefix=prefix)) for job in jobs]
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
        output, who, use = generation.output, generation.who, generation.cache
        computed = generation.num_output  # of a client that went away: what it had by then
        if output is not None:
            computed = output.usage.completion_tokens
        computed += 0 if use is None else use.computed
        self.meter.leave(who, len(generation.job.prompt.ids), computed)
        self.records.put(who.tenant, generation.id, generation.job.record)
        for listener in self.listeners:
            listener(generation)

    async def _drop_thinking(self, generation: Generation) -> None:
        """Evict an answer that the conversation goes on without, as the template leaves it out.

        Tools' results come before the next message of the user: until then templates keep it.
        """
        output, job = generation.output, generation.job
        if output is None or not job.is_chat or not self.prefix_cache or job.max_shared is not None:
            return
        mark = format_of(self.chat_template).begin or "{"
        thoughts = []
        for one in output.completions:
            thought, found, said = one.text.rpartition(THINK[1])
            is_thought = bool(found) and thought.lstrip().startswith(THINK[0])
            if is_thought and not (job.record.tools and mark in said):
                thoughts.append(one)
        if not thoughts or not await asyncio.to_thread(self.prompts.drops_thinking):
            return

        def drop(core: EngineCore) -> None:
            for one in thoughts:
                key = core.places.key(
                    job.prompt.ids, generation.who.tenant, job.salt, answer=one.token_ids
                )
                drop_beyond(core.cache, key, job.prompt.stable_len)

        await self.engine.run(drop)

    def _make_room(self, core: EngineCore, job: Job, who: Caller, num_found: int) -> None:
        """Before a tenant that has more than its share takes others' pages, its own oldest go."""
        share = who.quota.max_cached_share
        if share is None:
            return
        stats, size = core.cache.stats(), self.page_size
        need = -(-len(job.prompt.ids) // size) - num_found // size - stats.free_pages
        if need <= 0:
            return
        atoms = core.places.key(job.prompt.ids, who.tenant, job.salt).atoms
        width = size * ATOM_BYTES
        leaves: list[tuple[int, int]] = []

        def is_own(node: Node) -> bool:
            return whose(node)[0] == who.tenant

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

    async def _pin(self, job: Job, who: Caller) -> None:
        """Keep what a request asked to keep; what is over the budget is only logged."""

        def keep(core: EngineCore) -> None:
            known = {pin.key for pin in core.cache.pins(who.tenant)}  # a hit has refreshed them
            for one in job.prompt.breakpoints:
                whole = one.num_tokens // self.page_size * self.page_size
                key = core.places.key(job.prompt.ids, who.tenant, job.salt).prefix(whole)
                if not whole or key in known:
                    continue
                try:
                    core.cache.pin(key, who.tenant, one.ttl_s)
                except PinError as error:
                    logger.info("a prefix of %d tokens is not kept: %s", whole, error)

        if job.prompt.breakpoints and self.prefix_cache:
            await self.engine.run(keep)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
