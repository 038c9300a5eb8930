"""`AsyncLLM`: the engine in a thread of its own, for programs that run on event loops."""

from __future__ import annotations

import asyncio
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ramify.config import EngineConfig, ModelSection, ResolvedConfig
from ramify.engine.cache_admin.view import AsyncCacheView
from ramify.engine.cache_admin.warmup import WARM_PARAMS, WarmPrompt
from ramify.engine.core import EngineCore
from ramify.engine.serving.engine_thread import EngineThread, Health
from ramify.engine.serving.streams import LoopDispatcher, OutputCollector, Stream
from ramify.engine.sessions.session import AsyncSession, SessionOptions, open_transcript
from ramify.engine.stats import EngineStats
from ramify.engine.text.prompt_inputs import Message, Prompt, encode, encode_chat
from ramify.engine.weight_reload import swap_weights, validate_running_mode
from ramify.errors import ConfigError, RequestError
from ramify.params import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ramify.engine.execution.assembly import LocalEngine
    from ramify.engine.text.tokenizer import Tokenizer

_MODEL = ModelSection()
MAX_WAITING = 1024  # requests: beyond, a server does better to say no than to let everybody wait
LONG_TEXT = 8192  # characters; tokenising more than that would hold up the other streams
JOIN_S = 5.0  # at the interpreter's exit, for a step that is being computed
T = TypeVar("T")


class AsyncLLM:
    """Answers prompts for any number of tasks and event loops at once.

    Args:
        model: as `LLM`.
        progress: bars on stderr while weights load, if it is a terminal.
        max_waiting: requests that may wait; one more is an OverloadedError. None: any number.
        options: those of `LLM`.

    The constructor loads the model in the caller's thread. The engine's thread starts with the
    first request and ends with `aclose`, `drain`, or `async with`.

    Raises:
        ConfigError, ModelError: see `LLM`.
    """

    def __init__(
        self,
        model: str | Path = _MODEL.model,
        *,
        progress: bool = False,
        max_waiting: int | None = MAX_WAITING,
        **options: Any,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ConfigError(f"model={model!r} but it must be a directory or a name")
        asked = EngineConfig.of(model=str(model), max_waiting=max_waiting, **options)
        from ramify.engine.execution.assembly import LocalEngine

        self._engine: LocalEngine | None = LocalEngine(asked, progress=progress)
        self._attach_core(self._engine.core, self._engine.tokenizer)

    @classmethod
    def from_core(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """The same over an engine of your own, which nobody else may touch from now on."""
        made = cls.__new__(cls)
        made._engine = None  # noqa: SLF001 - its own class
        made._attach_core(core, tokenizer)  # noqa: SLF001
        return made

    @classmethod
    def over(cls, core: EngineCore, tokenizer: Tokenizer | None = None) -> AsyncLLM:
        """Deprecated: `from_core`."""
        warnings.warn(
            "AsyncLLM.over is deprecated; use AsyncLLM.from_core", DeprecationWarning, stacklevel=2
        )
        return cls.from_core(core, tokenizer)

    def _attach_core(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.config: ResolvedConfig = core.config
        self._compile_grammar = core.compile_grammar
        self._engine_thread = EngineThread(core)
        self._dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDispatcher] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        # nobody closed it, or the program ends: the thread must not be in a step by then
        self._finalizer = weakref.finalize(self, _end, self._engine_thread)

    @property
    def engine(self) -> LocalEngine:
        """What was made of the checkpoint: sizes, backend, exactness.

        Raises:
            ConfigError: nothing was: see `from_core`.
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
        max_shared: int | None = None,
    ) -> Stream:
        """The increments of an answer as they come: see `Stream`, also for the errors.

        Args:
            prompt: a text or token ids.
            priority, tenant, salt: see `LLM.generate`.
            max_shared: only so many of its first tokens are kept for others; by default all.
        """
        make = partial(encode, prompt, self.tokenizer)
        is_long = isinstance(prompt, str) and len(prompt) > LONG_TEXT
        options = {
            "prompt": prompt if isinstance(prompt, str) else None,
            "priority": priority,
            "tenant": tenant,
            "salt": salt,
            "max_shared": max_shared,
        }
        return self._stream(make, params, options, in_thread=is_long)

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
        """The same for a conversation, through the model's chat template."""
        make = partial(encode_chat, messages, self.tokenizer, **template_options)
        options = {"priority": priority, "tenant": tenant, "salt": salt}
        return self._stream(make, params, options, in_thread=True)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
    ) -> RequestOutput:
        """One whole answer; cancelling the task ends the request. For many, `asyncio.gather`.

        A request that failed while it ran has `output.error`; the other errors are those of
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
        """The whole answer to a conversation, through the model's chat template."""
        stream = self.stream_chat(
            messages, params, priority=priority, tenant=tenant, salt=salt, **template_options
        )
        return await stream.whole()

    def _stream(
        self,
        make: Callable[[], Sequence[int]],
        params: SamplingParams | None,
        options: dict[str, Any],
        *,
        in_thread: bool,
    ) -> Stream:
        chosen = params or SamplingParams()

        async def submit(final_only: bool) -> OutputCollector:
            ids = await asyncio.to_thread(make) if in_thread else make()
            if isinstance(chosen, SamplingParams) and chosen.structured is not None:
                await asyncio.to_thread(self._compile_grammar, chosen)  # a format may take a second
            collector = OutputCollector(self._dispatcher(), final_only=final_only)
            self._engine_thread.submit(collector, ids, chosen, **options)
            return collector

        return Stream(submit, self._engine_thread.abort)

    def _dispatcher(self) -> LoopDispatcher:
        """The one of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            outlet = self._dispatchers.get(loop)
            if outlet is None:
                outlet = self._dispatchers[loop] = LoopDispatcher(loop)
            return outlet

    async def abort(self, request_id: int) -> None:
        """End a live request; its reader gets an output with the finish reason `abort`.

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

        Args:
            begin: what a plain session begins with: a text or token ids.
            messages, system: for a conversation through the chat template: its first messages, or
                the text of a system message before them. `messages=[]` begins with nothing.
            priority, tenant, salt: of every turn, as in `generate`.
            pin: keep the newest turn from eviction, if the budget for pins allows.
            ttl_s: how long a pin lives without being hit; None: until `aclose`.
            template_options: `tools`, and further variables of the template.

        Raises:
            RequestError: what it begins with cannot be tokenised, or there is no chat template.
        """
        transcript = open_transcript(self.tokenizer, begin, messages, system, template_options)
        return AsyncSession(self, transcript, SessionOptions(priority, tenant, salt, pin, ttl_s))

    async def _warm(self, many: Sequence[WarmPrompt]) -> list[RequestOutput | Exception]:
        room = asyncio.Semaphore(self.config.max_num_seqs)

        async def compute(one: WarmPrompt) -> RequestOutput | Exception:
            make = partial(one.ids, self.tokenizer)
            options = {"priority": -1, "tenant": one.tenant, "salt": one.salt}
            async with room:
                try:
                    return await self._stream(make, WARM_PARAMS, options, in_thread=True).whole()
                except RequestError as error:
                    return error

        return list(await asyncio.gather(*map(compute, many)))

    # -- the engine --------------------------------------------------------------------------

    async def run(self, call: Callable[[EngineCore], T]) -> T:
        """`call(core)` in the engine's thread, between two steps; for all that touches the core.

        While it runs nobody's answer goes on. If the caller is cancelled before it began, it is
        not run.

        Raises:
            EngineStoppedError: the engine has ended; and whatever `call` raises.
        """
        return await asyncio.wrap_future(self._engine_thread.call(call))

    async def reload_weights(
        self, model: str | Path, *, running: Literal["finish", "restart"] = "finish"
    ) -> None:
        """Serve with other weights of the same model: see `LLM.reload_weights`.

        They are loaded in another thread while requests go on. With "finish", requests that come
        after that wait until those before them have ended.
        """
        validate_running_mode(running)
        swap = await asyncio.to_thread(self.engine.load_weights, model)
        change = partial(swap_weights, swap=swap)
        call = (
            self._engine_thread.call_when_idle if running == "finish" else self._engine_thread.call
        )
        await asyncio.wrap_future(call(change))

    @property
    def cache(self) -> AsyncCacheView:
        """What is cached: the calls of `CacheView` as coroutines."""
        return AsyncCacheView(self, self.tokenizer, self._warm)

    async def stats(self) -> EngineStats:
        """Requests that run and wait, work done so far, and the cache's statistics."""
        return await self.run(EngineStats.of)

    def health(self) -> Health:
        """Whether the engine is alive, and how old its last step is; waits for nothing."""
        return self._engine_thread.health()

    # -- the end -----------------------------------------------------------------------------

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new requests, let those that are there finish, then end.

        New ones get a DrainingError. Those that are left after `timeout_s` are aborted and told.

        Returns:
            whether all have finished.
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
        """End the engine after the step that is being computed; live requests are aborted."""
        self._engine_thread.stop()
        await asyncio.shield(asyncio.wrap_future(self._engine_thread.ended))
        self._engine_thread.join()
        self._finalizer.detach()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _end(engine_thread: EngineThread) -> None:
    engine_thread.stop()
    engine_thread.join(JOIN_S)
