"""`PromptHashes`: page hashes of a prompt as each replica computes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ramify.engine.prefix_namespaces import PrefixNamespaces


class PromptHashes:
    """Hashes prompts in the cache namespaces that are in use, with the public prefixes of all.

    Replicas with equal weights have one namespace; while weights are replaced there are two.

    Args:
        page_size: of every replica.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._public: list[array[int]] = []
        self._by_base: dict[bytes, PrefixNamespaces] = {}

    def declare_public(self, ids: array[int]) -> None:
        """Let all tenants share the whole pages of a prefix, at every replica."""
        if ids in self._public:
            return
        self._public.append(ids)
        for namespaces in self._by_base.values():
            namespaces.declare_public(ids)

    def of(self, bases: Iterable[bytes], ids: array[int], tenant: str, salt: str) -> list[bytes]:
        """The hashes of a prompt's whole pages in each namespace, in their order.

        Packed, 16 bytes each: lists of thousands of them would be work for the garbage collector.

        Args:
            bases: the namespaces in use; what is kept of others is dropped.
        """
        # Long prompts are hashed in another thread.
        self._by_base = in_use = {base: self._namespaces(base) for base in bases}
        return [
            namespaces.key(ids, tenant, salt).packed_hashes(self._page_size)
            for namespaces in in_use.values()
        ]

    def _namespaces(self, base: bytes) -> PrefixNamespaces:
        known = self._by_base.get(base)
        if known is None:
            known = PrefixNamespaces(base, self._page_size)
            for ids in self._public:
                known.declare_public(ids)
        return known
