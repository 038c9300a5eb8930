"""Where prefixes are cached: below weights and tenant, but for those that everybody may read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from ramify.cache import CacheKey, Salt
from ramify.cache.key import namespace_of, namespace_parts


class CachedNode(Protocol):
    """A node, as the cache or a survey tells it."""

    @property
    def namespace(self) -> bytes:
        """Of the root above it."""

    @property
    def salt(self) -> bytes | None:
        """The last one on the way to its end."""


class PrefixNamespaces:
    """Which keys the prompts of tenants have.

    A tenant has a namespace of his own. A prompt that begins with a prefix that is declared public
    lies in the namespace of no tenant, and behind that prefix a salt makes it private again: its
    K/V is shared by all, what follows is nobody else's. A shorter prompt lies in its tenant's
    namespace. What a tenant had cached when a prefix of it became public is not found any more.

    Args:
        base: the namespace of no tenant: what K/V depends on beside the tokens.
        page_size: tokens; only whole pages can be shared.
    """

    def __init__(self, base: bytes, page_size: int) -> None:
        self.base, self._page_size = base, page_size
        self._public: list[array[int]] = []

    def declare_public(self, ids: array[int]) -> int:
        """Let all tenants read the whole pages of a prefix; returns their tokens."""
        whole = ids[: len(ids) // self._page_size * self._page_size]
        if whole and whole not in self._public:
            self._public.append(whole)
            self._public.sort(key=len, reverse=True)
        return len(whole)

    def scope_of(self, ids: array[int], tenant: str, salt: str) -> tuple[bytes, tuple[Salt, ...]]:
        """The namespace of a prompt, and from where on it is private there."""
        if not tenant and not salt:
            return self.base, ()
        for one in self._public:
            if ids[: len(one)] == one:
                return self.base, (Salt(len(one), namespace_of(tenant=tenant, salt=salt)),)
        return namespace_of(base=self.base, tenant=tenant, salt=salt), ()

    def key(
        self, ids: array[int], tenant: str = "", salt: str = "", *, answer: Sequence[int] = ()
    ) -> CacheKey:
        """Under which a prompt is cached, and what was answered to it."""
        namespace, salts = self.scope_of(ids, tenant, salt)
        whole = ids + array("i", answer) if answer else ids
        return CacheKey(whole, namespace, salts=[one for one in salts if one.start < len(whole)])

    def keys_under(self, ids: array[int], tenant: str, salt: str) -> list[CacheKey]:
        """Keys below which everything lies that begins with `ids` and may be a tenant's."""
        found = [CacheKey(ids, self.base)]
        if tenant or salt:
            own = namespace_of(tenant=tenant, salt=salt)
            found += [
                CacheKey(ids, self.base, salts=[Salt(len(one), own)])
                for one in self._public
                if len(one) < len(ids) and ids[: len(one)] == one
            ]
            found.append(CacheKey(ids, namespace_of(base=self.base, tenant=tenant, salt=salt)))
        return found

    def is_stale(self, node: CachedNode) -> bool:
        """Whether no request asks for it any more: its weights are gone."""
        if node.salt is not None or node.namespace == self.base:
            return node.namespace != self.base
        tenant, salt = owner_of_node(node)
        return node.namespace != namespace_of(base=self.base, tenant=tenant, salt=salt)


def owner_of_node(node: CachedNode) -> tuple[str, str]:
    """Tenant and salt of what is cached at the end of a node; empty: everybody's."""
    return owner_of_namespace(node.namespace if node.salt is None else node.salt)


@lru_cache(4096)
def owner_of_namespace(namespace: bytes) -> tuple[str, str]:
    """Tenant and salt of a namespace, or of a salt behind a public prefix."""
    parts = namespace_parts(namespace)
    return str(parts.get("tenant", "")), str(parts.get("salt", ""))
