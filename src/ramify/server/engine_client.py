"""`EngineClient`: all that the server knows of an engine, in this process or behind a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ramify.config import ResolvedConfig
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.context import EngineStats
from ramify.engine.description import EngineDescription
from ramify.engine.scheduling.queue_limits import QueueLimits
from ramify.engine.serving.engine_thread import Health
from ramify.engine.serving.streams import Stream
from ramify.engine.text.prompt_inputs import Prompt
from ramify.engine.text.tokenizer import Tokenizer
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.server.replicas import Replicas


class EngineClient(Protocol):
    """The calls of the server; `AsyncLLM` describes them. For one event loop, but for `compile_grammar`."""

    @property
    def config(self) -> ResolvedConfig:
        """Sizes and options of the engine."""
        ...

    @property
    def description(self) -> EngineDescription:
        """Model and implementation of the engine."""
        ...

    @property
    def queue_limits(self) -> QueueLimits:
        """How much may wait, in all queues together."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's; None if it has none."""
        ...

    @property
    def replicas(self) -> Replicas | None:
        """The engines of a cluster, each by itself; None: this is one engine."""
        ...

    @property
    def cache(self) -> AsyncCacheView:
        """What an operator can see and change; warm-up and public prefixes."""
        ...

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
    ) -> Stream:
        """The increments of an answer."""
        ...

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """A whole answer."""
        ...

    async def abort(self, request_id: int) -> None:
        """Abort a live request; its reader gets an output with the finish reason `abort`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        ...

    def compile_grammar(self, params: SamplingParams, tenant: str = "") -> None:
        """Compile the grammar of `params.structured`; for any thread.

        Raises:
            RequestError: the grammar is invalid or not supported.
        """
        ...

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        ...

    def health(self) -> Health:
        """State of the engine; waits for nothing."""
        ...

    async def reload_weights(self, model: str | Path) -> None:
        """Replace the weights by others of the same model.

        Raises:
            ModelError, ConfigError: they do not fit; nothing has changed.
            RolloutError: some of several engines have them.
        """
        ...

    async def aclose(self) -> None:
        """End it; live requests are aborted."""
        ...
