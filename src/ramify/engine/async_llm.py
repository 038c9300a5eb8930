"""`AsyncLLM`: a checkpoint and its engine in a thread of its own, for asyncio programs."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ramify.config import EngineConfig, ModelSection, ResolvedConfig
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.cache_admin.calls import ReadStats
from ramify.engine.cache_admin.warmup import WARM_PARAMS, WARM_PRIORITY, WarmPrompt
from ramify.engine.context import EngineStats
from ramify.engine.core import EngineCore
from ramify.engine.description import EngineDescription, summary
from ramify.engine.identity import EngineIdentity
from ramify.engine.request_options import RequestOptions
from ramify.engine.scheduling.queue_limits import QueueLimits
from ramify.engine.serving.engine_thread import EngineObserver, EngineThread, Health
from ramify.engine.serving.streams import (
    Collector,
    LoopDispatcher,
    OutputCollector,
    Stream,
)
from ramify.engine.sessions.session import AsyncSession, SessionOptions, open_transcript
from ramify.engine.text.prompt_inputs import Message, Prompt, encode, encode_chat
from ramify.engine.weight_reload import LoadedWeights, swap_weights, validate_running_mode
from ramify.errors import ConfigError, RequestError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams

if TYPE_CHECKING:
    from ramify.engine.execution.assembly import LocalEngine
    from ramify.engine.text.tokenizer import Tokenizer

_MODEL = ModelSection()
MAX_WAITING = 1024  # answers; requests beyond this are refused
LONG_TEXT = 8192  # characters; tokenising more on the event loop would hold up other streams
JOIN_S = 5.0  # wait at exit for the step that is being computed
T = TypeVar("T")


class AsyncLLM:
    """Answers prompts for any number of tasks and event loops at once.

    Args:
        model: as `LLM`.
        progress: bars on stderr while weights load, if it is a terminal.
        max_waiting: answers that may wait; the next request raises OverloadedError. None: any number.
        memory_parts: engines that share this machine's memory; the pool is made for a part of it.
        options: those of `LLM`.

    The constructor loads the model in the caller's thread. The engine thread starts with the first
    request and ends with `aclose`, `drain`, or `async with`.

    Raises:
        ConfigError, ModelError: see `LLM`.
    """

    def __init__(
        self,
        model: str | Path = _MODEL.model,
        *,
        progress: bool = False,
        max_waiting: int | None = MAX_WAITING,
        memory_parts: int = 1,
        **options: Any,
    ) -> None:
        config = EngineConfig.of(model=model, max_waiting=max_waiting, **options)
        from ramify.engine.execution.assembly import LocalEngine

        self._engine: LocalEngine | None = LocalEngine(
            config, progress=progress, memory_parts=memory_parts
        )
        self._attach_core(self._engine.core, self._engine.tokenizer)
        if self._engine.ranks is not None:
            self._engine.ranks.on_loss(weakref.WeakMethod(self._engine_thread.end_with))

    @classmethod
    def from_core(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """An `AsyncLLM` over an engine of your own, which nothing else may touch from now on."""
        llm = cls.__new__(cls)
        llm._engine = None  # noqa: SLF001 - its own class
        llm._attach_core(core, tokenizer)  # noqa: SLF001
        return llm

    def _attach_core(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.config: ResolvedConfig = core.config
        self._vocab_size = core.vocab_size
        self.incarnation = core.incarnation  # 64 random bits: another engine has others
        self._core_description = EngineDescription(
            vocab_size=core.vocab_size,
            eos_token_ids=tuple(sorted(core.lifecycle.eos_token_ids)),
        )
        self._core_identity = EngineIdentity.of_namespace(core.namespaces.base, core.config)
        self.compile_grammar = core.compile_grammar  # for any thread
        self._engine_thread = EngineThread(core)
        self._dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDispatcher] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        # If nobody closes it: the thread must not be in a step when the interpreter ends.
        self._finalizer = weakref.finalize(self, _end, self._engine_thread)

    def __repr__(self) -> str:
        description = None if self._engine is None else self._engine.description
        return f"<{type(self).__name__}: {summary(self.config, description)}>"

    @property
    def description(self) -> EngineDescription:
        """Model and implementation of the engine."""
        if self._engine is None:
            return self._core_description
        return self._engine.description

    @property
    def replicas(self) -> None:
        """None: it is one engine. A `ClusterLLM` has the engines of its cluster here."""
        return

    @property
    def queue_limits(self) -> QueueLimits:
        """How much may wait."""
        return QueueLimits.of(self.config)

    async def identity(self) -> EngineIdentity:
        """What the bits of answers depend on; reads the checkpoint unless its digest is remembered.

        Raises:
            CheckpointError: a file of the checkpoint cannot be read.
        """
        if self._engine is not None:
            return await asyncio.to_thread(self._engine.identity)
        return self._core_identity

    @property
    def engine(self) -> LocalEngine:
        """The engine built from the checkpoint: sizes, backend, exactness.

        Raises:
            ConfigError: this `AsyncLLM` was made by `from_core`.
        """
        if self._engine is None:
            raise ConfigError("this AsyncLLM was made by from_core, over an engine without a model")
        return self._engine

    # -- answers -----------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        session: str = "",
        max_shared: int | None = None,
        explain: bool = False,
        retention: Sequence[tuple[int, float | None]] = (),
        cache_share: float | None = None,
        pin_share: float | None = None,
        generated: Sequence[Sequence[int]] = (),
    ) -> Stream:
        """The increments of an answer as they are generated; for errors see `Stream`.

        The increment with the first tokens has `prefix`, the answer to `explain` and `retention`.

        Args:
            prompt: a text or token ids.
            priority, tenant, salt: see `LLM.generate`.
            session: the tenant's name for the conversation that it is a turn of: pages that no other
                session uses are evicted first once `cache.end_session` ends it.
            max_shared: share only this many of the first tokens with other requests; None: all.
            explain: say why no more of the prompt was cached, at the moment of the lookup.
            retention: prefixes of the prompt to pin, in whole pages, once they are computed: pairs
                of a number of tokens and of seconds, which each hit of the whole prefix restarts;
                None: until `cache.unpin`. The owner of the pins is the tenant.
            cache_share: where the prompt needs pages that others have cached, evict the tenant's
                own first, as far as it holds more than this share of the pool. None: the least
                valuable pages, whoever owns them.
            pin_share: refuse pins beyond this share of the pool for the tenant, and pins that
                leave no room for a request of `max_model_len`. None: only the budget of all pins
                counts.
            generated: the first tokens of each answer, which another engine has generated and
                delivered. They count for lengths, stop strings, penalties, the grammar and usage,
                but come neither in an increment nor with log probabilities again. With the same
                `seed` and an equal `identity`, the tokens after them have the bits of an answer
                that was never interrupted.
        """
        options = RequestOptions(
            priority=priority,
            tenant=tenant,
            salt=salt,
            session=session,
            max_shared=max_shared,
            explain=explain,
            retention=retention,
            cache_share=cache_share,
            pin_share=pin_share,
            generated=generated,
        )
        return self._stream_prompt(prompt, params, options)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        **template_options: Any,
    ) -> Stream:
        """`stream` of a conversation, rendered by the model's chat template."""
        encode_prompt = partial(encode_chat, messages, self.tokenizer, **template_options)
        options = RequestOptions(priority=priority, tenant=tenant, salt=salt)
        return self._stream(encode_prompt, params, options, in_thread=True)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
    ) -> RequestOutput:
        """Generate a whole answer; cancelling the task aborts it. For many, use `asyncio.gather`.

        A request that fails while it runs has `output.error`; the other errors are those of
        `Stream`.
        """
        stream = self.stream(prompt, params, priority=priority, tenant=tenant, salt=salt)
        return await stream.whole()

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        **template_options: Any,
    ) -> RequestOutput:
        """`generate` for a conversation, rendered by the model's chat template."""
        stream = self.stream_chat(
            messages, params, priority=priority, tenant=tenant, salt=salt, **template_options
        )
        return await stream.whole()

    def _stream_prompt(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> Stream:
        """A stream of a text or token ids; for an `AsyncSession` too."""
        text = prompt if isinstance(prompt, str) else None
        return self._stream(
            partial(encode, prompt, self.tokenizer),
            params,
            options,
            text=text,
            in_thread=text is not None and len(text) > LONG_TEXT,
        )

    def _stream(
        self,
        encode_prompt: Callable[[], Sequence[int]],
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        text: str | None = None,
        in_thread: bool,
    ) -> Stream:
        """A stream that encodes its prompt, in another thread if `in_thread`, and submits it."""
        chosen = params or SamplingParams()

        async def submit(final_only: bool) -> OutputCollector:
            ids = await asyncio.to_thread(encode_prompt) if in_thread else encode_prompt()
            if isinstance(chosen, SamplingParams) and chosen.structured is not None:
                tenant = str(options.tenant)
                await asyncio.to_thread(self.compile_grammar, chosen, tenant)  # may take a second
            collector = OutputCollector(self.dispatcher(), final_only=final_only)
            self._engine_thread.submit(collector, ids, chosen, options, prompt=text)
            return collector

        return Stream(submit, self._engine_thread.abort)

    def submit(
        self,
        collector: Collector,
        token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Queue a request whose deliveries go to a collector; for servers of other protocols.

        A grammar should be compiled before (`compile_grammar`). The collector gets the id or the
        error that refuses the request, then its increments.

        Raises:
            EngineStoppedError, DrainingError: the engine has ended, or takes no more requests.
        """
        self._engine_thread.submit(collector, token_ids, params, options, prompt=None)

    def abort_collector(self, collector: Collector) -> None:
        """Abort the request of `submit`, if it has not ended; an abandoned collector gets no end."""
        self._engine_thread.abort(collector)

    def observe(self, observer: EngineObserver) -> None:
        """Ask an observer for a report between any two steps, until `unobserve`.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        self._engine_thread.observe(observer)

    def unobserve(self, observer: EngineObserver) -> None:
        """End `observe`."""
        self._engine_thread.unobserve(observer)

    def dispatcher(self) -> LoopDispatcher:
        """The dispatcher of the running event loop, for collectors and observers."""
        loop = asyncio.get_running_loop()
        with self._lock:
            dispatcher = self._dispatchers.get(loop)
            if dispatcher is None:
                dispatcher = self._dispatchers[loop] = LoopDispatcher(loop)
            return dispatcher

    async def abort(self, request_id: int) -> None:
        """Abort a live request; its reader gets an output with the finish reason `abort`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        await self.run(partial(self._engine_thread.abort_id, request_id=request_id))

    def session(
        self,
        begin: Prompt = "",
        *,
        messages: Sequence[Message] | None = None,
        system: str | None = None,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        pin: bool = False,
        ttl_s: float | None = None,
        **template_options: Any,
    ) -> AsyncSession:
        """A prompt that grows turn by turn, branches and goes back: see `AsyncSession`.

        Arguments and errors are those of `LLM.session`; without `ttl_s` a pin lasts until `aclose`.
        """
        transcript = open_transcript(self.tokenizer, begin, messages, system, template_options)
        options = RequestOptions(priority=priority, tenant=tenant, salt=salt)
        return AsyncSession(self, transcript, SessionOptions(options, pin, ttl_s))

    async def _warm(self, prompts: Sequence[WarmPrompt]) -> list[RequestOutput | Exception]:
        num_permits, max_tokens = self.config.max_num_seqs, self.config.max_waiting_tokens
        if max_tokens is not None:  # the queue takes all of them, however long they are
            num_permits = max(1, min(num_permits, max_tokens // self.config.max_model_len))
        permits = asyncio.Semaphore(num_permits)

        async def compute(prompt: WarmPrompt) -> RequestOutput | Exception:
            ids = partial(prompt.ids, self.tokenizer)
            options = prompt.options(WARM_PRIORITY)
            async with permits:
                try:
                    return await self._stream(ids, WARM_PARAMS, options, in_thread=True).whole()
                except RequestError as error:
                    return error

        return list(await asyncio.gather(*map(compute, prompts)))

    # -- the engine --------------------------------------------------------------------------

    async def run(self, call: Callable[[EngineCore], T]) -> T:
        """Return `call(core)`, run in the engine thread between two steps.

        The only way to touch the core. All requests wait while it runs. If the caller is cancelled
        before it begins, it does not run.

        Raises:
            EngineStoppedError: the engine has ended; also anything that `call` raises.
        """
        return await asyncio.wrap_future(self._engine_thread.call(call))

    async def reload_weights(
        self, model: str | Path, *, running: Literal["finish", "restart"] = "finish"
    ) -> None:
        """Replace the weights, as `LLM.reload_weights` does.

        Loads them in another thread while requests go on. With "finish", requests that come after
        that wait until the live ones have ended.
        """
        validate_running_mode(running)
        await self.install_weights(await self.load_weights(model), running=running)

    async def load_weights(self, model: str | Path) -> LoadedWeights:
        """Load weights for `install_weights`, in another thread; see `LocalEngine.load_weights`."""
        return await asyncio.to_thread(self.engine.load_weights, model)

    async def install_weights(
        self, swap: LoadedWeights, *, running: Literal["finish", "restart"] = "finish"
    ) -> None:
        """Compute with loaded weights from now on; see `reload_weights`."""
        validate_running_mode(running)
        change = partial(swap_weights, swap=swap)
        call = (
            self._engine_thread.call_when_idle if running == "finish" else self._engine_thread.call
        )
        await asyncio.wrap_future(call(change))

    @property
    def cache(self) -> AsyncCacheView:
        """The calls of `CacheView` as coroutines."""
        return AsyncCacheView(
            self,
            self.tokenizer,
            self._warm,
            vocab_size=self._vocab_size,
            page_size=self.config.page_size,
        )

    async def stats(self) -> EngineStats:
        """See `LLM.stats`."""
        return await self.run(ReadStats())

    def health(self) -> Health:
        """State of the engine thread and age of its last step; does not wait for it."""
        return self._engine_thread.health()

    # -- the end -----------------------------------------------------------------------------

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, let the live ones finish, then end the engine.

        New requests get a DrainingError. After `timeout_s` the rest are aborted; their readers get
        an output with the finish reason `abort`.

        Returns:
            whether all requests have finished.
        """
        was_over = self._engine_thread.ended.done()
        self._engine_thread.drain()
        ended = asyncio.wrap_future(self._engine_thread.ended)
        try:
            await asyncio.wait_for(asyncio.shield(ended), timeout_s)
        except TimeoutError:
            await self.aclose()
            return False
        await self.aclose()
        return was_over or not self._engine_thread.has_aborted

    async def aclose(self) -> None:
        """End the engine after the present step; live requests are aborted."""
        self._engine_thread.stop()
        await asyncio.shield(asyncio.wrap_future(self._engine_thread.ended))
        self._engine_thread.join()
        if self._engine is not None:
            self._engine.close()
        self._finalizer.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _end(engine_thread: EngineThread) -> None:
    engine_thread.stop()
    engine_thread.join(JOIN_S)
