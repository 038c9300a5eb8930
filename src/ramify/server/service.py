"""Start requests in the engine for every API: quotas, explanations, request history."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ramify.config import MAX_QUEUED_POOLS
from ramify.counts import counted
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import EngineStoppedError, InvalidParamsError, NoReplicaError, ReplicaLostError
from ramify.models.configs.pooling import PoolingConfig
from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.outputs import Explanation, StepOutput
from ramify.prompt_rules import rules_named
from ramify.server.activity import Activity
from ramify.server.engine_client import EngineClient
from ramify.server.errors import ApiError, ContextLengthError
from ramify.server.generation import Generation, GenerationRequest
from ramify.server.grammars.constraint import FORMAT_PARAMS, AnswerConstraints, refused_format
from ramify.server.history.cache_miss import CacheMiss, explain_miss
from ramify.server.history.expiring_store import ExpiringStore
from ramify.server.history.named_values import NamedValues, TokenPrefix
from ramify.server.history.stored_conversation import StoredConversation
from ramify.server.history.stored_requests import (
    HistoryEntry,
    PromptComparison,
    first_difference,
    is_fully_reused,
)
from ramify.server.live_requests import LiveRequests
from ramify.server.model_dialects.call_text import calls_text
from ramify.server.model_dialects.events import CallStart, ReasoningDelta
from ramify.server.model_dialects.output_format import named
from ramify.server.prompts.renderer import PromptRenderer, RenderedPrompt
from ramify.server.request_fields.unsupported_fields import UnknownFieldLog
from ramify.server.tenants import TENANT_PIN_SHARE, Caller, QuotaMeter

ANY_NAME = "*"  # among the model names: requests may send any name
LATEST = ":latest"  # the tag that clients of Ollama give to a name without one
MAX_NAME_CHARS = 256
MAX_BYTES_PER_TOKEN = 16
# Longer prompts are refused before their tokens become Python objects.
MAX_RENDERED_CONTEXTS = 4


class RequestService:
    """An engine with what the server adds: names, quotas, request history, listeners.

    Args:
        tokenizer: of the engine's model.
        model: the model's name, in responses to requests that name none.
        aliases: further names that requests may send; with `ANY_NAME` among them, any name.
        tool_call_parser, reasoning_parser: names of output formats; by default the template's.
        pooling: of embeddings; None: the last token's unit vector.
        sampling_defaults: values of sampling parameters that a request omits; None: those of the APIs.
        embedding_size: elements of an embedding; None: not known, no request may cut them.
        wrapper: architecture of a model that reads images or audio, of which only the text decoder is
            loaded; None: a text model.
        drops_forbidden_tools: requests that forbid calls have no tools in their prompts. Else they
            share the prompts of requests that allow them.
        tools_first: prompts have tools before the system prompt, if the chat template can.
        prompt_rules: rules of prompt hygiene, by name; see `ramify.prompt_rules`.

    Raises:
        ConfigError: there is no output format or prompt rule of a name.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        model: str,
        aliases: Sequence[str] = (),
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        pooling: PoolingConfig | None = None,
        sampling_defaults: SamplingDefaults | None = None,
        embedding_size: int | None = None,
        wrapper: str | None = None,
        drops_forbidden_tools: bool = False,
        tools_first: bool = False,
        prompt_rules: Sequence[str] = (),
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.model = model
        self.pooling = PoolingConfig() if pooling is None else pooling
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.embedding_size = embedding_size
        self.prompt_rules = rules_named(prompt_rules)
        self.wrapper, self.drops_forbidden_tools = wrapper, drops_forbidden_tools
        self.names = tuple(dict.fromkeys((model, *(n for n in aliases if n != ANY_NAME))))
        self.serves_any_name = ANY_NAME in aliases
        self.max_model_len = engine.config.max_model_len
        self.max_request_len = engine.config.max_request_len  # what clients are told
        self.page_size = engine.config.page_size
        self.prefix_cache = engine.config.requested.cache.prefix_cache
        self.max_prompt_bytes = self.max_model_len * min(
            MAX_BYTES_PER_TOKEN, tokenizer.max_token_bytes
        )
        template = "\n".join(tokenizer.chat_template_sources)
        self.output_format = named(
            tool_call_parser,
            reasoning_parser,
            template=template,
            special_tokens=tokenizer.special_token_texts.values(),
        )
        self.prompt_renderer = PromptRenderer(
            tokenizer,
            max_tokens=MAX_RENDERED_CONTEXTS * self.max_model_len,
            max_model_len=self.max_model_len,
            write_calls=partial(calls_text, self.output_format.calls.name, template),
            tools_first=tools_first,
        )
        self.history: ExpiringStore[HistoryEntry] = ExpiringStore()  # by response id
        self.conversations: ExpiringStore[StoredConversation] = ExpiringStore()
        self.prefixes: NamedValues[TokenPrefix] = NamedValues("prefix")
        self.public_prefixes: NamedValues[TokenPrefix] = NamedValues("public prefix")
        self.quotas = QuotaMeter()
        self.live, self.activity = LiveRequests(), Activity()
        self.has_several_tenants = False  # set by the server that has the keys
        self.unknown_fields = UnknownFieldLog()
        self.started_s = int(time.time())
        self.special_token_ids = tokenizer.special_token_ids
        self.constraints = AnswerConstraints(
            engine,
            tokenizer,
            self.output_format,
            shows_tools=self.prompt_renderer.conventions.writes_tools,
        )
        self.listeners: list[Callable[[Generation], None]] = []  # called when a request has ended
        self.event_listeners: list[Callable[[Generation, StepOutput], None]] = []

    @property
    def max_queued_tokens(self) -> int:
        """Prompt tokens that may wait at once; replicas that join or leave change it."""
        limit = self.engine.queue_limits.max_waiting_tokens
        return limit or MAX_QUEUED_POOLS * self.engine.config.kv_cache_tokens

    def check_model(self, name: str | None) -> str:
        """The model name for the response to a request: as it was sent, or the server's own.

        A name may have the tag `LATEST`, under which Ollama's list of models has it.

        Raises:
            ApiError: 404, this server has no model of that name.
        """
        if name is None:
            return self.model
        is_served = name in self.names or name.removesuffix(LATEST) in self.names
        if not is_served and not (self.serves_any_name and len(name) <= MAX_NAME_CHARS):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_prompt_bytes(self, num_bytes: int, param: str) -> None:
        """Refuse a text that no context holds, before it is rendered and tokenised.

        Raises:
            ContextLengthError: 400, more bytes for each token of the context than any token has.
        """
        limit = self.max_prompt_bytes
        if num_bytes > limit:
            raise ContextLengthError(
                -(-num_bytes * self.max_model_len // self.max_prompt_bytes),
                self.max_model_len,
                param=param,
                note=f" (an estimate, as low as can be: it is {num_bytes} bytes of text)",
            )

    async def explain(
        self, prompt: RenderedPrompt, caller: Caller, salt: str = ""
    ) -> tuple[int, CacheMiss | None]:
        """Explain a lookup of a prompt: cached tokens, reason for the miss. Computes nothing."""
        explanation = await self.engine.cache.explain_to_tenant(
            prompt.ids, tenant=caller.tenant, salt=salt
        )
        num_cached = 0 if explanation is None else explanation.read_tokens
        return num_cached, self._cache_miss(explanation, prompt)

    def _cache_miss(
        self, explanation: Explanation | None, prompt: RenderedPrompt
    ) -> CacheMiss | None:
        if explanation is None:
            return CacheMiss("disabled", 0)
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return explain_miss(explanation, prompt, decode, self.page_size)

    def compare_with_earlier(self, generation: Generation, id_: str) -> PromptComparison | None:
        """Compare with the caller's request of response `id_`; None if unknown or expired."""
        new, old = generation.request.history_entry, self.history.get(generation.caller.tenant, id_)
        if old is None:
            return None
        difference = first_difference(old, new)
        is_same_model = difference is None or difference.kind != "model"
        is_reused = is_same_model and is_fully_reused(
            old, new, generation.num_cached, self.page_size
        )
        return PromptComparison(difference, is_reused, old.num_reusable_tokens)

    async def start(self, request: GenerationRequest, caller: Caller, *, prefix: str) -> Generation:
        """Submit a request to the engine and wait for its first output.

        Args:
            prefix: of the response id that the client gets: "chatcmpl-", "msg_", ….

        Raises:
            ApiError, RequestError: it is refused; nothing of it is left.
        """
        prompt, num_tokens = request.prompt, len(request.prompt.ids)
        self.quotas.acquire(caller, num_tokens, request.params.n)
        generation = None
        live = self.live.arrive(
            caller.tenant,
            num_prompt=num_tokens,
            max_tokens=request.params.max_tokens,
            num_answers=request.params.n,
            is_background=caller.is_background,
        )
        self.observe_live(caller.tenant)
        arrival_ns = time.time_ns()
        try:
            events = self.engine.stream(
                prompt.ids,
                request.params,
                priority=request.priority + caller.priority,
                tenant=caller.tenant,
                salt=request.salt,
                session=request.session,
                max_shared=request.history_entry.max_shared,
                explain=True,
                retention=tuple(
                    (breakpoint_.num_tokens, breakpoint_.ttl_s)
                    for breakpoint_ in prompt.breakpoints
                ),
                cache_share=caller.quota.max_cached_share,
                pin_share=self.pin_share(caller),
            )
            first_output = await anext(aiter(events), None)
            generation = Generation(
                id=prefix + secrets.token_hex(16),
                request=request,
                caller=caller,
                created=int(time.time()),
                arrival_ns=arrival_ns,
                events=events,
                first_output=first_output,
                miss=self._first_miss(first_output, prompt),
                page_size=self.page_size,
                publishes=self.prefix_cache,
                on_end=self._account,
                on_event=self.event_listeners,
                after_end=self._after_end,
                abort=self.engine.abort,
            )
            self.activity.begun(caller.tenant, generation.cache, self.live.begin(live, generation))
            self.observe_live(caller.tenant)
            return generation
        except InvalidParamsError as error:
            if request.format_path and error.name in FORMAT_PARAMS:
                raise refused_format(error, request.format_path) from error
            raise
        finally:
            if generation is None:
                self.live.withdraw(live)
                self.quotas.release(caller, num_tokens, 0, request.params.n)
                await self._unpin_if_unnamed(request, caller)  # its client may have left too late

    def observe_live(self, tenant: str | None) -> None:
        """Note how many requests of a tenant, and of all, are live now."""
        live = self.live
        for scope in {tenant, None}:
            self.activity.observe(
                scope, num_running=live.num_running(scope), num_waiting=live.num_waiting(scope)
            )

    def pin_share(self, caller: Caller) -> float | None:
        """Share of the pool that a caller may pin; None: no limit of its own."""
        share = caller.quota.max_pinned_share
        return TENANT_PIN_SHARE if share is None and self.has_several_tenants else share

    @property
    def room_tokens(self) -> int:
        """Tokens of the pool that no pin may take: for the longest request of another tenant."""
        return self.max_model_len if self.has_several_tenants else 0

    def _first_miss(
        self, first_output: StepOutput | None, prompt: RenderedPrompt
    ) -> CacheMiss | None:
        """Reason for the miss; None also if the request ended before its prompt was computed."""
        if first_output is None or first_output.prefix is None:
            return None
        return self._cache_miss(first_output.prefix.explanation, prompt)

    async def start_all(
        self, requests: Sequence[GenerationRequest], caller: Caller, *, prefix: str
    ) -> list[Generation]:
        """`start` several requests at once: all of them, or none if one is refused.

        Raises:
            ApiError: 400, there are more requests than the engine's queue holds; else as `start`.
        """
        answers = [request.params.n for request in requests]
        limit = self.engine.queue_limits.max_waiting
        if limit is not None and sum(answers[:-1]) >= limit:
            raise ApiError(
                400,
                f"{counted(len(requests), 'prompt')} with {counted(sum(answers), 'answer')} in one request, but at most "
                f"{counted(limit, 'answer')} may wait here at once. Send several requests",
                param="prompt",
            )
        num_tokens = sum(len(request.prompt.ids) for request in requests)
        self.quotas.check_batch(caller, len(requests), num_tokens, sum(answers))
        tasks = [
            asyncio.ensure_future(self.start(request, caller, prefix=prefix))
            for request in requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Generation):
                    await result.close()
            raise

    def _account(self, generation: Generation) -> None:
        """Charge the quota, remember the request, call the listeners."""
        caller, request, output = generation.caller, generation.request, generation.output
        # A client that disconnected pays for the tokens that were generated by then.
        num_computed = generation.num_output if output is None else output.usage.completion_tokens
        num_computed += 0 if generation.cache is None else generation.cache.computed
        self.quotas.release(caller, len(request.prompt.ids), num_computed, request.params.n)
        self.live.end(generation)
        self.activity.ended(caller.tenant, generation.num_output)
        if request.is_remembered and not caller.is_background:
            entry = request.history_entry.without_text()
            self.history.put(caller.tenant, generation.id, entry)
        for listener in self.listeners:
            listener(generation)

    async def _after_end(self, generation: Generation) -> None:
        await self._evict_reasoning(generation)
        if generation.request.ends_session:
            await self.let_session_go(generation.caller.tenant, generation.request.session)
        await self._unpin_if_unnamed(generation.request, generation.caller)

    async def _unpin_if_unnamed(self, request: GenerationRequest, caller: Caller) -> None:
        """End the pin that a request has made whose named prefix has no name any more."""
        named = request.prompt.named
        if named is not None and named.is_pinned:
            ids = request.prompt.ids[: named.num_tokens]
            with suppress(EngineStoppedError, NoReplicaError, ReplicaLostError):
                await self.unpin_unnamed(ids, caller.tenant)

    async def unpin_unnamed(self, ids: array[int], tenant: str) -> None:
        """End a tenant's pins of a prefix that no name has: requests in flight pin it after its end."""
        pages = self._whole_pages(ids)
        has_name = any(
            len(prefix.ids) // self.page_size * self.page_size == len(pages)
            and self._whole_pages(prefix.ids) == pages
            for prefix in self.prefixes.of(tenant)
        )
        if not has_name and pages:
            await self.engine.cache.unpin_prefix(pages, owner=tenant, tenant=tenant)

    def _whole_pages(self, ids: array[int]) -> list[int]:
        return ids[: len(ids) // self.page_size * self.page_size].tolist()

    async def let_session_go(self, tenant: str, name: str) -> None:
        """End a session, if it is alive and the engine runs."""
        with suppress(EngineStoppedError, NoReplicaError, ReplicaLostError):
            await self.engine.cache.end_session(name, tenant=tenant)

    async def _evict_reasoning(self, generation: Generation) -> None:
        """Evict an answer's K/V if it contains reasoning that the next prompt will not repeat.

        Chat templates drop the reasoning of earlier turns, so the next prompt cannot match it. Many
        keep it before tool results, where an answer with a tool call stays cached.
        """
        output, request = generation.output, generation.request
        if output is None or not self.prefix_cache:
            return
        if not request.is_chat or request.history_entry.max_shared is not None:
            return
        reasoning = self.output_format.reasoning
        marks = (*reasoning.marks.begin, *reasoning.marks.end, *reasoning.hidden)
        texts = [completion.text for completion in output.completions]
        if not any(mark in text for text in texts for mark in marks):
            return

        def is_dropped(text: str) -> bool:
            renderer, kinds = self.prompt_renderer, request.event_types(text)
            if ReasoningDelta not in kinds:
                return False
            return renderer.drops_call_reasoning if CallStart in kinds else renderer.drops_reasoning

        def find_answers() -> list[Sequence[int]]:
            return [
                completion.token_ids
                for completion in output.completions
                if is_dropped(completion.text)
            ]

        answers = await asyncio.to_thread(find_answers)
        if not answers:
            return
        # A drain ends the engine with the last answer; a replica takes its cache with it.
        with suppress(EngineStoppedError, NoReplicaError, ReplicaLostError):
            await self.engine.cache.evict_answers(
                request.prompt.ids,
                answers,
                request.prompt.num_stable_tokens,
                tenant=generation.caller.tenant,
                salt=request.salt,
            )
