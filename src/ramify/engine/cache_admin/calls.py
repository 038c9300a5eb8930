"""Calls to an engine as values: each runs in the engine thread, between two steps.

A value can cross a process boundary, a lambda cannot. Whoever has the core runs `call(core)`.
"""

# ruff: noqa: D102 - the docstring of each class says what its call does

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from ramify.cache.pins import Pin
from ramify.cache.types import CacheStats
from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView, view_branches
from ramify.engine.cache_admin.view import CacheView, ClearResult, TreeView
from ramify.engine.cache_admin.warmup import WarmupResult, pin_public_prefixes
from ramify.engine.context import EngineStats
from ramify.engine.core import EngineCore
from ramify.outputs import Explanation

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class EngineCall(Protocol[T_co]):
    """A value that is called with the core."""

    def __call__(self, core: EngineCore, /) -> T_co:
        """Run; in the engine thread."""
        ...


class RunsInEngine(Protocol):
    """Runs calls in the engine thread; `AsyncLLM` does."""

    async def run(self, call: EngineCall[T]) -> T:
        """Return `call(core)`; see `AsyncLLM.run`."""
        ...


class ReadStats(Struct, frozen=True, tag=True):
    """`EngineCore.stats`."""

    def __call__(self, core: EngineCore) -> EngineStats:
        return core.stats()


class ReadCacheStats(Struct, frozen=True, tag=True):
    """`CacheView.stats`."""

    def __call__(self, core: EngineCore) -> CacheStats:
        return _view(core).stats()


class CheckCache(Struct, frozen=True, tag=True):
    """`CacheView.check`."""

    def __call__(self, core: EngineCore) -> None:
        _view(core).check()


class Explain(Struct, frozen=True, tag=True):
    """`CacheView.explain`."""

    token_ids: Sequence[int]
    tenant: str = ""
    salt: str = ""

    def __call__(self, core: EngineCore) -> Explanation:
        return _view(core).explain(self.token_ids, tenant=self.tenant, salt=self.salt)


class ExplainToTenant(Struct, frozen=True, tag=True):
    """`CacheView.explain_to_tenant`."""

    token_ids: Sequence[int]
    tenant: str = ""
    salt: str = ""

    def __call__(self, core: EngineCore) -> Explanation | None:
        return _view(core).explain_to_tenant(self.token_ids, tenant=self.tenant, salt=self.salt)


class EvictAnswers(Struct, frozen=True, tag=True):
    """`CacheView.evict_answers`."""

    token_ids: Sequence[int]
    answers: Sequence[Sequence[int]]
    num_kept: int
    tenant: str = ""
    salt: str = ""

    def __call__(self, core: EngineCore) -> None:
        _view(core).evict_answers(
            self.token_ids, self.answers, self.num_kept, tenant=self.tenant, salt=self.salt
        )


class ReadTree(Struct, frozen=True, tag=True):
    """`CacheView.tree` without texts."""

    max_nodes: int

    def __call__(self, core: EngineCore) -> TreeView:
        return _view(core).tree(self.max_nodes)


class ReadBranches(Struct, frozen=True, tag=True):
    """`view_branches`: a part of the tree, without texts."""

    query: BranchQuery

    def __call__(self, core: EngineCore) -> BranchView:
        return view_branches(core, self.query)


class ClearCache(Struct, frozen=True, tag=True):
    """`CacheView.clear`; the prefix as token ids."""

    prefix: Sequence[int] | None = None
    tenant: str | None = None
    salt: str | None = None
    older_than_s: float | None = None

    def __call__(self, core: EngineCore) -> ClearResult:
        return _view(core).clear(
            prefix=self.prefix, tenant=self.tenant, salt=self.salt, older_than_s=self.older_than_s
        )


class PinPrefix(Struct, frozen=True, tag=True):
    """`CacheView.pin`; the prefix as token ids."""

    token_ids: Sequence[int]
    owner: str
    ttl_s: float | None
    tenant: str
    salt: str
    room_tokens: int

    def __call__(self, core: EngineCore) -> Pin:
        return _view(core).pin(
            self.token_ids,
            owner=self.owner,
            ttl_s=self.ttl_s,
            tenant=self.tenant,
            salt=self.salt,
            room_tokens=self.room_tokens,
        )


class Unpin(Struct, frozen=True, tag=True):
    """`CacheView.unpin`."""

    pin_id: int

    def __call__(self, core: EngineCore) -> None:
        _view(core).unpin(self.pin_id)


class UnpinPrefix(Struct, frozen=True, tag=True):
    """`CacheView.unpin_prefix`; the prefix as token ids."""

    owner: str
    token_ids: Sequence[int]
    tenant: str = ""
    salt: str = ""

    def __call__(self, core: EngineCore) -> int:
        return _view(core).unpin_prefix(
            self.token_ids, owner=self.owner, tenant=self.tenant, salt=self.salt
        )


class ListPins(Struct, frozen=True, tag=True):
    """`CacheView.pins`."""

    owner: str | None = None

    def __call__(self, core: EngineCore) -> list[Pin]:
        return _view(core).pins(self.owner)


class EndPins(Struct, frozen=True, tag=True):
    """`CacheView.end_pins`."""

    owner: str

    def __call__(self, core: EngineCore) -> int:
        return _view(core).end_pins(self.owner)


class EndSession(Struct, frozen=True, tag=True):
    """`CacheView.end_session`."""

    name: str
    tenant: str = ""

    def __call__(self, core: EngineCore) -> int | None:
        return _view(core).end_session(self.name, tenant=self.tenant)


class PinPublicPrefixes(Struct, frozen=True, tag=True):
    """`pin_public_prefixes`, after they were computed with this result."""

    prefixes: Sequence[Sequence[int]]
    result: WarmupResult

    def __call__(self, core: EngineCore) -> None:
        pin_public_prefixes(core, [array("i", ids) for ids in self.prefixes], self.result)


def _view(core: EngineCore) -> CacheView:
    """The view of a core for calls whose prompts are token ids, and which compute none."""
    return CacheView(core, None, lambda prompts: ())
