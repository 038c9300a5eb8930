"""`AsyncLLM.cache`: the calls of `CacheView` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cache.pins import Pin
from ramify.cache.types import CacheStats
from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView
from ramify.engine.cache_admin.calls import (
    CheckCache,
    ClearCache,
    EndPins,
    EndSession,
    EvictAnswers,
    Explain,
    ExplainToTenant,
    ListPins,
    PinPrefix,
    PinPublicPrefixes,
    ReadBranches,
    ReadCacheStats,
    ReadTree,
    RunsInEngine,
    Unpin,
    UnpinPrefix,
)
from ramify.engine.cache_admin.view import ClearResult, TreeView, as_warm_prompts, preview_text
from ramify.engine.cache_admin.warmup import (
    WarmPrompt,
    WarmupResult,
    public_prefix_ids,
)
from ramify.engine.text.prompt_inputs import Prefix, prefix_token_ids, stable_prefix_ids
from ramify.errors import RamifyError
from ramify.outputs import Explanation, RequestOutput

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer


class AsyncCacheView:
    """The calls of `CacheView` as coroutines.

    Prompts become token ids here; everything else runs in the engine, as a value of `calls`.

    Args:
        compute: answers warm-up prompts.
        vocab_size, page_size: of the engine.
    """

    def __init__(
        self,
        engine: RunsInEngine,
        tokenizer: Tokenizer | None,
        compute: Callable[[Sequence[WarmPrompt]], Awaitable[Sequence[RequestOutput | Exception]]],
        *,
        vocab_size: int,
        page_size: int,
    ) -> None:
        self._engine, self._tokenizer, self._compute = engine, tokenizer, compute
        self._vocab_size, self._page_size = vocab_size, page_size

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: await its calls, such as stats() and tree()>"

    async def stats(self) -> CacheStats:
        """See `CacheView.stats`."""
        return await self._engine.run(ReadCacheStats())

    async def check(self) -> None:
        """See `CacheView.check`."""
        await self._engine.run(CheckCache())

    async def explain(self, prompt: Prefix, *, tenant: str = "", salt: str = "") -> Explanation:
        """See `CacheView.explain`."""
        ids = await self._ids(prompt, add_generation_prompt=True)
        return await self._engine.run(Explain(ids, tenant, salt))

    async def explain_to_tenant(
        self, token_ids: Sequence[int], *, tenant: str = "", salt: str = ""
    ) -> Explanation | None:
        """See `CacheView.explain_to_tenant`."""
        return await self._engine.run(ExplainToTenant(token_ids, tenant, salt))

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
        call = PinPrefix(ids, owner, ttl_s, tenant, salt, room_tokens)
        pinning = asyncio.ensure_future(self._engine.run(call))
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:  # nobody else knows the pin, so nobody could end it
            with suppress(RamifyError):
                await self.unpin(await pinning)
            raise

    async def unpin(self, pin: Pin | int) -> None:
        """See `CacheView.unpin`."""
        await self._engine.run(Unpin(pin.id if isinstance(pin, Pin) else pin))

    async def unpin_prefix(
        self, prefix: Prefix, *, owner: str, tenant: str = "", salt: str = ""
    ) -> int:
        """See `CacheView.unpin_prefix`."""
        return await self._engine.run(UnpinPrefix(owner, await self._ids(prefix), tenant, salt))

    async def pins(self, owner: str | None = None) -> list[Pin]:
        """See `CacheView.pins`."""
        return await self._engine.run(ListPins(owner))

    async def end_pins(self, owner: str) -> int:
        """See `CacheView.end_pins`."""
        return await self._engine.run(EndPins(owner))

    async def end_session(self, name: str, *, tenant: str = "") -> int | None:
        """See `CacheView.end_session`."""
        return await self._engine.run(EndSession(name, tenant))

    async def tree(self, max_nodes: int = 200) -> TreeView:
        """See `CacheView.tree`."""
        dump = await self._engine.run(ReadTree(max_nodes))
        if self._tokenizer is None:
            return dump
        return replace(
            dump,
            nodes=tuple(
                replace(node, text=preview_text(node.token_ids, self._tokenizer))
                for node in dump.nodes
            ),
        )

    async def branches(self, query: BranchQuery) -> BranchView:
        """See `CacheView.branches`."""
        return await self._engine.run(ReadBranches(query))

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
        return await self._engine.run(ClearCache(ids, tenant, salt, older_than_s))

    async def evict_answers(
        self,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        num_kept: int,
        *,
        tenant: str = "",
        salt: str = "",
    ) -> None:
        """See `CacheView.evict_answers`."""
        await self._engine.run(EvictAnswers(prompt, answers, num_kept, tenant, salt))

    async def warm(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """See `CacheView.warm`; other requests go on meanwhile."""
        return WarmupResult.of(
            await self._compute(await asyncio.to_thread(as_warm_prompts, prompts))
        )

    async def share(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """See `CacheView.share`; other requests go on meanwhile."""
        prefixes = await asyncio.to_thread(as_warm_prompts, prompts)
        make = partial(
            public_prefix_ids,
            prefixes,
            self._tokenizer,
            vocab_size=self._vocab_size,
            page_size=self._page_size,
        )
        ids = await asyncio.to_thread(make)
        result = WarmupResult.of(await self._compute(prefixes))
        await self._engine.run(PinPublicPrefixes(ids, result))
        return result

    async def _ids(self, prefix: Prefix, *, add_generation_prompt: bool = False) -> Sequence[int]:
        return await asyncio.to_thread(
            prefix_token_ids, prefix, self._tokenizer, add_generation_prompt=add_generation_prompt
        )
