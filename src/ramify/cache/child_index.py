"""Find the child of a node by its first page: `ChildIndex`, and the index "radix" of the tree."""

from __future__ import annotations

from typing import Final, Protocol

from ramify.cache.gc_untracked import untracked
from ramify.cache.packed import ATOM_BYTES

# Dicts of a PageIndex or HashIndex, chosen by a byte of their keys: each stays quick to resize.
SHARDS: Final = 256


class ChildIndex(Protocol):
    """Finds the child of a node by the atoms of the child's first page."""

    max_pages: int | None  # limit of the pages in a node; None: no limit

    def find(self, parent: int, atoms: bytes, position: int) -> int:
        """The child of `parent` that begins with the page at byte `position`; 0 if none does."""

    def add(self, node: int) -> None:
        """Enter a node, which is linked below its parent already."""

    def remove(self, node: int) -> None:
        """Remove a node, before its parent or its edge changes."""


class PageIndex:
    """Hash table from (first page of a node, its parent) to the node: the index "radix"."""

    max_pages: int | None = None

    def __init__(self, edges: list[bytes | memoryview], parent: list[int], page_bytes: int) -> None:
        self._edges, self._parent = edges, parent  # columns of the tree
        self._page_bytes = page_bytes
        self._shards: list[dict[bytes, int]] = [untracked({}) for _ in range(SHARDS)]

    def find(self, parent: int, atoms: bytes, position: int) -> int:
        """See `ChildIndex.find`. One dict lookup for any number of children."""
        end = position + self._page_bytes
        shard = self._shards[atoms[end - ATOM_BYTES]]
        return shard.get(atoms[position:end] + parent.to_bytes(4, "little"), 0)

    def add(self, node: int) -> None:
        """Enter a node under its first page and its parent."""
        edge, end = self._edges[node], self._page_bytes
        shard = self._shards[edge[end - ATOM_BYTES]]
        name = bytes(edge[:end]) + self._parent[node].to_bytes(4, "little")
        assert name not in shard, "siblings share their first page"
        shard[name] = node

    def remove(self, node: int) -> None:
        """Remove a node's entry."""
        edge, end = self._edges[node], self._page_bytes
        del self._shards[edge[end - ATOM_BYTES]][
            bytes(edge[:end]) + self._parent[node].to_bytes(4, "little")
        ]
