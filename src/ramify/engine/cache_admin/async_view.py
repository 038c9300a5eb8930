"""`AsyncLLM.cache`: the calls of `CacheView` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ramify.cache.pins import Pin
from ramify.cache.types import CacheStats
from ramify.engine.cache_admin.view import CacheView, ClearResult, TreeView, as_warm_prompts
from ramify.engine.cache_admin.warmup import (
    WarmPrompt,
    WarmupResult,
    pin_public_prefixes,
    public_prefix_ids,
)
from ramify.engine.core import EngineCore
from ramify.engine.text.prompt_inputs import Prefix, prefix_token_ids, stable_prefix_ids
from ramify.errors import RamifyError
from ramify.outputs import Explanation, RequestOutput

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class RunsInEngine(Protocol):
    """Runs calls in the engine thread; `AsyncLLM` does."""

    async def run(self, call: Callable[[EngineCore], T]) -> T:
        """See `AsyncLLM.run`."""
        ...


class AsyncCacheView:
    """The calls of `CacheView` as coroutines; each runs in the engine thread, between two steps."""

    def __init__(
        self,
        engine: RunsInEngine,
        tokenizer: Tokenizer | None,
        compute: Callable[[Sequence[WarmPrompt]], Awaitable[Sequence[RequestOutput | Exception]]],
    ) -> None:
        self._engine, self._tokenizer, self._compute = engine, tokenizer, compute

    async def stats(self) -> CacheStats:
        """See `CacheView.stats`."""
        return await self._run(CacheView.stats)

    async def check(self) -> None:
        """See `CacheView.check`."""
        await self._run(CacheView.check)

    async def explain(self, prompt: Prefix, *, tenant: str = "", salt: str = "") -> Explanation:
        """See `CacheView.explain`."""
        ids = await self._ids(prompt, add_generation_prompt=True)
        return await self._run(lambda view: view.explain(ids, tenant=tenant, salt=salt))

    async def pin(
        self,
        prefix: Prefix,
        *,
        owner: str = "user",
        ttl_s: float | None = None,
        tenant: str = "",
        salt: str = "",
        room_tokens: int = 0,
    ) -> Pin:
        """See `CacheView.pin`; a caller that is cancelled leaves no pin behind."""
        ids = await self._ids(prefix)
        pinning = asyncio.ensure_future(
            self._run(
                lambda view: view.pin(
                    ids,
                    owner=owner,
                    ttl_s=ttl_s,
                    tenant=tenant,
                    salt=salt,
                    room_tokens=room_tokens,
                )
            )
        )
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:  # nobody else knows the pin, so nobody could end it
            with suppress(RamifyError):
                await self.unpin(await pinning)
            raise

    async def unpin(self, pin: Pin | int) -> None:
        """See `CacheView.unpin`."""
        await self._run(lambda view: view.unpin(pin))

    async def pins(self, owner: str | None = None) -> list[Pin]:
        """See `CacheView.pins`."""
        return await self._run(lambda view: view.pins(owner))

    async def tree(self, max_nodes: int = 200) -> TreeView:
        """See `CacheView.tree`."""
        return await self._run(lambda view: view.tree(max_nodes))

    async def clear(
        self,
        *,
        prefix: Prefix | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        older_than_s: float | None = None,
    ) -> ClearResult:
        """See `CacheView.clear`."""
        ids: Sequence[int] | None = None
        if prefix is not None:
            ids = await asyncio.to_thread(stable_prefix_ids, prefix, self._tokenizer)
        return await self._run(
            lambda view: view.clear(prefix=ids, tenant=tenant, salt=salt, older_than_s=older_than_s)
        )

    async def warm(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """See `CacheView.warm`; other requests go on meanwhile."""
        return WarmupResult.of(
            await self._compute(await asyncio.to_thread(as_warm_prompts, prompts))
        )

    async def share(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """See `CacheView.share`; other requests go on meanwhile."""
        prefixes = await asyncio.to_thread(as_warm_prompts, prompts)
        sizes = await self._engine.run(lambda core: (core.vocab_size, core.config.page_size))
        make = partial(
            public_prefix_ids, prefixes, self._tokenizer, vocab_size=sizes[0], page_size=sizes[1]
        )
        ids = await asyncio.to_thread(make)
        result = WarmupResult.of(await self._compute(prefixes))
        await self._engine.run(lambda core: pin_public_prefixes(core, ids, result))
        return result

    async def _ids(self, prefix: Prefix, *, add_generation_prompt: bool = False) -> Sequence[int]:
        return await asyncio.to_thread(
            prefix_token_ids, prefix, self._tokenizer, add_generation_prompt=add_generation_prompt
        )

    async def _run(self, call: Callable[[CacheView], T]) -> T:
        return await self._engine.run(
            lambda core: call(CacheView(core, self._tokenizer, lambda prompts: ()))
        )
