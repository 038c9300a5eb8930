"""`llm.cache`: what is cached, why a prompt misses, and what an operator may do about it."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ramify.cache.explain import Explanation
from ramify.cache.inspection import NodeInfo, count_pages, nodes_under, time_before, top_nodes
from ramify.cache.key import CacheKey
from ramify.cache.pins import Pin
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.types import CacheStats, Node
from ramify.engine.cache_admin.warmup import (
    WarmPrompt,
    WarmupResult,
    pin_public_prefixes,
    public_prefix_ids,
    read_prompts,
)
from ramify.engine.core import EngineCore
from ramify.engine.prefix_namespaces import owner_of_node
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.text.prompt_inputs import Prefix, prefix_token_ids, stable_prefix_ids
from ramify.errors import ConfigError, InvalidParamsError, RamifyError
from ramify.params import RequestOutput

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

PREVIEW_CHARS = 60
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of pages in the cache, for people. It follows its parent in the list."""

    id: int
    parent: int  # 0: a prompt begins here
    level: int  # nodes above it
    start: int  # tokens above it
    num_tokens: int
    num_pages: int
    hits: int  # lookups that it served
    pins: int  # requests and pins that hold it now
    is_pending: bool  # being computed
    num_children: int
    age_s: float
    idle_s: float
    namespace: str  # a short name for it
    tenant: str
    is_stale: bool  # of earlier weights: nobody can hit it
    token_ids: tuple[int, ...]  # the first ones
    text: str  # of these; empty without a tokenizer


_COPIED_FIELDS = {field.name for field in fields(TreeNode)} & (
    {field.name for field in fields(NodeInfo)} - {"namespace"}
)


@dataclass(frozen=True, slots=True)
class TreeView:
    """The most used nodes, in the order of a walk from the top."""

    nodes: tuple[TreeNode, ...]
    num_nodes: int  # in the cache; the others are left out


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Pages that were dropped, and those that were asked for too but are in use."""

    num_pages: int
    num_kept: int


class CacheView:
    """The calls behind `llm.cache`; for the thread that drives the engine.

    Prefixes are texts (tokenised as prompts are), token ids, or messages of a conversation. A
    `tenant` or `salt` names where they are cached, as in `LLM.generate`.
    """

    def __init__(
        self,
        engine: EngineCore,
        tokenizer: Tokenizer | None,
        compute: Callable[[Sequence[WarmPrompt]], Sequence[RequestOutput | Exception]],
    ) -> None:
        self._engine, self._tokenizer, self._compute = engine, tokenizer, compute

    @property
    def core(self) -> PrefixCache:
        """The cache itself, with leases and pages."""
        return self._engine.cache

    def stats(self) -> CacheStats:
        """Counters and occupancy."""
        return self.core.stats()

    def check(self) -> None:
        """Recount everything. A contradiction raises InvariantError."""
        self.core.check()

    def explain(self, prompt: Prefix, *, tenant: str = "", salt: str = "") -> Explanation:
        """Why a lookup of this prompt finds what it finds, and no more; changes nothing."""
        return self.core.explain(self._key(prompt, tenant, salt, add_generation_prompt=True))

    def pin(
        self,
        prefix: Prefix,
        *,
        owner: str = "user",
        ttl_s: float | None = None,
        tenant: str = "",
        salt: str = "",
    ) -> Pin:
        """Keep what is cached of a prefix from eviction: whole pages.

        Args:
            owner: who is to be named in the list of pins.
            ttl_s: seconds, anew with each hit on all of it; None: until `unpin`.

        Raises:
            PinError: nothing of it is cached (`warm` it first), or the budget for pins is spent.
        """
        return self.core.pin(self._key(prefix, tenant, salt), owner, ttl_s)

    def unpin(self, pin: Pin | int) -> None:
        """End a pin. Raises PinError if it has expired or was ended before."""
        self.core.unpin(pin)

    def pins(self, owner: str | None = None) -> list[Pin]:
        """All live pins, or those of an owner, oldest first."""
        return self.core.pins(owner)

    def tree(self, max_nodes: int = 200) -> TreeView:
        """The most used nodes with their texts. Cost: that of the nodes told."""
        if isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1:
            raise ConfigError(f"max_nodes={max_nodes!r} but it must be an integer >= 1")
        found = top_nodes(self.core, max_nodes)
        return TreeView(tuple(map(self._shown, found.nodes)), found.num_nodes)

    def clear(
        self,
        *,
        prefix: Prefix | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        older_than_s: float | None = None,
    ) -> ClearResult:
        """Drop everything, or that to which all that is given applies; also while serving.

        Args:
            prefix: prompts that begin like this; of itself, what no other prompt shares. The last
                token of a text does not count: with more text behind it, it could be another one.
            tenant, salt: of that tenant, with that salt. With a `prefix`, they are "" if not given.
            older_than_s: not used for so many seconds.

        What requests and pins hold stays, and is counted. Cost: a look at every cached node.
        """
        if prefix is None and tenant is None and salt is None and older_than_s is None:
            return ClearResult(self.core.clear(), self.core.stats().cached_pages)
        if older_than_s is not None and not (
            isinstance(older_than_s, int | float) and older_than_s >= 0
        ):
            raise ConfigError(f"older_than_s={older_than_s!r} but it must be a number >= 0")
        under: frozenset[int] | None = None
        if prefix is not None:
            ids = stable_prefix_ids(prefix, self._tokenizer)
            checked = validate_token_ids(ids, self._engine.vocab_size)
            tenant, salt = tenant or "", salt or ""
            ways = self._engine.namespaces.keys_under(checked, tenant, salt)
            under = frozenset[int]().union(*(nodes_under(self.core, way) for way in ways))
        limit_s = None if older_than_s is None else time_before(self.core, older_than_s)

        def is_meant(node: Node) -> bool:
            if under is not None and node.id not in under:
                return False
            if tenant is not None or salt is not None:
                owner = owner_of_node(node)
                if tenant not in (None, owner[0]) or salt not in (None, owner[1]):
                    return False
            return limit_s is None or node.used_s <= limit_s

        evicted = self.core.evict_if(is_meant)
        return ClearResult(
            evicted, count_pages(self.core, lambda node: node.pins > 0 and is_meant(node))
        )

    def warm(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """Compute prompts that are going to be asked for; returns how much there was to do.

        Args:
            prompts: a file, see `read_prompts`; or a list.

        Raises:
            ConfigError: the file cannot be used; nothing was computed.
        """
        return WarmupResult.of(self._compute(_as_warm_prompts(prompts)))

    def share(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """Compute prefixes, keep them, and let every tenant read them: what you declare public.

        A prompt of a tenant that begins with all of one reads its whole pages; what follows stays
        the tenant's own. Nothing else is ever shared between tenants. A declaration holds as long
        as the engine. The pin ends with new weights, or if a page is suspected of damage: then the
        next request computes the prefix for all, and another `share` pins it again. Share before
        tenants ask: what they have cached by then is not found any more.

        Args:
            prompts: a file, see `read_prompts`; or a list. A conversation is to end where all
                others go on differently: with a system message, and with the tools of it. The last
                token of a text is left out, as more text could change it.

        Raises:
            ConfigError: the file cannot be used, the prefix cache is off, or a prefix has a tenant
                or salt, is shorter than a page, or cannot be served.
            PinError: they take more than half of the pages. In all cases nothing is shared.
        """
        many = _as_warm_prompts(prompts)
        ids = self._public_prefix_ids(many)
        told = WarmupResult.of(self._compute(many))
        pin_public_prefixes(self._engine, ids, told)
        return told

    def _public_prefix_ids(self, many: Sequence[WarmPrompt]) -> list[array[int]]:
        engine = self._engine
        return public_prefix_ids(
            many,
            self._tokenizer,
            vocab_size=engine.vocab_size,
            page_size=engine.config.page_size,
        )

    def _key(
        self, prefix: Prefix, tenant: str, salt: str, *, add_generation_prompt: bool = False
    ) -> CacheKey:
        ids = prefix_token_ids(prefix, self._tokenizer, add_generation_prompt=add_generation_prompt)
        checked = validate_token_ids(ids, self._engine.vocab_size)
        return self._engine.namespaces.key(checked, tenant, salt)

    def _shown(self, one: NodeInfo) -> TreeNode:
        ids = tuple(token for token in array("i", one.first_atoms) if token >= 0)
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if len(text) > PREVIEW_CHARS:
                text = text[: PREVIEW_CHARS - 1] + "…"
        tenant, _ = owner_of_node(one)
        return TreeNode(
            **{name: getattr(one, name) for name in _COPIED_FIELDS},
            start=one.start_token,
            namespace=hashlib.blake2b(one.namespace, digest_size=4).hexdigest(),
            tenant=tenant,
            is_stale=self._engine.namespaces.is_stale(one),
            token_ids=ids,
            text=text,
        )


class RunsInEngine(Protocol):
    """What can carry out calls in the engine's thread."""

    async def run(self, call: Callable[[EngineCore], T]) -> T:
        """See `AsyncLLM.run`."""
        ...


class AsyncCacheView:
    """The calls of `CacheView` as coroutines; each runs in the engine's thread, between two steps."""

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
    ) -> Pin:
        """See `CacheView.pin`; a caller that is cancelled leaves no pin behind."""
        ids = await self._ids(prefix)
        pinning = asyncio.ensure_future(
            self._run(
                lambda view: view.pin(ids, owner=owner, ttl_s=ttl_s, tenant=tenant, salt=salt)
            )
        )
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:  # nobody would know of it, so that it would never end
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
        """See `CacheView.warm`; requests of others go on meanwhile."""
        return WarmupResult.of(
            await self._compute(await asyncio.to_thread(_as_warm_prompts, prompts))
        )

    async def share(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """See `CacheView.share`; requests of others go on meanwhile."""
        many = await asyncio.to_thread(_as_warm_prompts, prompts)
        sizes = await self._engine.run(lambda core: (core.vocab_size, core.config.page_size))
        make = partial(
            public_prefix_ids, many, self._tokenizer, vocab_size=sizes[0], page_size=sizes[1]
        )
        ids = await asyncio.to_thread(make)
        told = WarmupResult.of(await self._compute(many))
        await self._engine.run(lambda core: pin_public_prefixes(core, ids, told))
        return told

    async def _ids(self, prefix: Prefix, *, add_generation_prompt: bool = False) -> Sequence[int]:
        return await asyncio.to_thread(
            prefix_token_ids, prefix, self._tokenizer, add_generation_prompt=add_generation_prompt
        )

    async def _run(self, call: Callable[[CacheView], T]) -> T:
        return await self._engine.run(
            lambda core: call(CacheView(core, self._tokenizer, lambda many: ()))
        )


def _as_warm_prompts(prompts: object) -> Sequence[WarmPrompt]:
    if isinstance(prompts, list | tuple):
        for one in prompts:
            if not isinstance(one, WarmPrompt):
                raise InvalidParamsError("prompts", one, "a WarmPrompt each: WarmPrompt(text)")
        return prompts
    if not isinstance(prompts, str | Path):
        raise InvalidParamsError("prompts", prompts, "a file, or a list of WarmPrompt")
    return read_prompts(Path(prompts))
