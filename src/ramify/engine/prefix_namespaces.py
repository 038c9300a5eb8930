"""Prefix namespaces: which tenants and salts share cached prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from ramify.cache import CacheKey, Node, Salt
from ramify.cache.branches import Branch
from ramify.cache.inspection import NodeInfo
from ramify.cache.key import namespace_of, namespace_parts


class PrefixNamespaces:
    """Maps (prompt, tenant, salt) to a cache key.

    - no tenant, no salt → namespace `base`
    - begins with a public prefix → namespace `base`; behind the prefix a salt made of tenant and
      salt keeps the rest private
    - else → a namespace of its own for each (tenant, salt)

    When a prefix becomes public, what a tenant has cached below it cannot be hit any more.

    Args:
        base: namespace without tenant: what K/V depends on besides the tokens.
        page_size: tokens; only whole pages can be public.
    """

    def __init__(self, base: bytes, page_size: int) -> None:
        self.base, self._page_size = base, page_size
        self._public: list[array[int]] = []

    def declare_public(self, ids: array[int]) -> None:
        """Let all tenants share the whole pages of a prefix."""
        whole = ids[: len(ids) // self._page_size * self._page_size]
        if whole and whole not in self._public:
            self._public.append(whole)
            self._public.sort(key=len, reverse=True)

    def scope_of(self, ids: array[int], tenant: str, salt: str) -> tuple[bytes, tuple[Salt, ...]]:
        """Namespace of a prompt, and the salts that make its later tokens private there."""
        if not tenant and not salt:
            return self.base, ()
        for prefix in self._public:
            if ids[: len(prefix)] == prefix:
                return self.base, (Salt(len(prefix), namespace_of(tenant=tenant, salt=salt)),)
        return namespace_of(base=self.base, tenant=tenant, salt=salt), ()

    def key(
        self, ids: array[int], tenant: str = "", salt: str = "", *, answer: Sequence[int] = ()
    ) -> CacheKey:
        """The cache key of a prompt followed by `answer`."""
        namespace, salts = self.scope_of(ids, tenant, salt)
        tokens = ids + array("i", answer) if answer else ids
        salts_inside = [salt for salt in salts if salt.start < len(tokens)]
        return CacheKey(tokens, namespace, salts=salts_inside)

    def keys_under(self, ids: array[int], tenant: str, salt: str) -> list[CacheKey]:
        """Every key under which a prompt that begins with `ids` may be cached for a tenant."""
        return [*dict.fromkeys((CacheKey(ids, self.base), *self.keys_of(ids, tenant, salt)))]

    def keys_of(self, ids: array[int], tenant: str, salt: str) -> list[CacheKey]:
        """Every key that `key` may have returned for a prompt, whatever was public at that time."""
        if not tenant and not salt:
            return [CacheKey(ids, self.base)]
        owner = namespace_of(tenant=tenant, salt=salt)
        keys = [
            CacheKey(ids, self.base, salts=[Salt(len(prefix), owner)] if prefix != ids else [])
            for prefix in self._public
            if ids[: len(prefix)] == prefix
        ]
        return [*keys, CacheKey(ids, namespace_of(base=self.base, tenant=tenant, salt=salt))]

    def is_stale(self, node: NodeInfo | Branch) -> bool:
        """Whether no request can hit the node any more, since it belongs to other weights."""
        if node.salt is not None or node.namespace == self.base:
            return node.namespace != self.base
        tenant, salt = owner_of_node(node)
        return node.namespace != namespace_of(base=self.base, tenant=tenant, salt=salt)


def owner_of_node(node: Node | NodeInfo | Branch) -> tuple[str, str]:
    """Tenant and salt that a node's end belongs to; empty if it is shared by all."""
    return owner_of_namespace(node.namespace if node.salt is None else node.salt)


@lru_cache(4096)
def owner_of_namespace(namespace: bytes) -> tuple[str, str]:
    """Tenant and salt of a namespace, or of a salt behind a public prefix."""
    parts = namespace_parts(namespace)
    return str(parts.get("tenant", "")), str(parts.get("salt", ""))
