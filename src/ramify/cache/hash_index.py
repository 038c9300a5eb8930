"""The flat alternative to the radix tree: every page by itself, under a hash of all before it.

A page is found by its chained hash in one dict for the whole cache, as block-based engines do it and
as external stores and routers name pages. The hash is that of `CacheKey.page_hashes`, but for pages
with marks, whose numbers in this process are hashed here. Nodes hold one page each;
everything else (pins, order of eviction, ghosts, events) is what it is for the radix tree, so the
two can be compared by what an index costs alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.gc_untracked import untracked
from ramify.cache.key import chain_hashes, namespace_hash
from ramify.cache.tree import SHARDS, ChildIndex, PageIndex, RadixTree


class HashIndex:
    """Children by the hash of their page and all pages before it.

    A hash only proposes: the page's atoms and its parent are compared on every hit, so that a
    collision costs a comparison and never gives a wrong page.

    Args:
        tree: whose nodes are found.
        chain: (parent's hash, page, page bytes) → the page's hash.
    """

    max_pages: int | None = 1

    def __init__(
        self, tree: RadixTree, chain: Callable[[bytes, bytes, int], bytes] = chain_hashes
    ) -> None:
        self._tree = tree
        self._page_bytes = tree.page_bytes
        self._chain = chain
        self._hashes = tree.column(b"")
        self._roots: dict[int, tuple[bytes, bytes]] = {}  # root → namespace and its hash
        self._nodes: list[dict[bytes, int]] = [untracked({}) for _ in range(SHARDS)]  # by hash
        self._missed = (0, b"", b"")
        self._collided: dict[bytes, list[int]] = {}  # further nodes with the same hash

    def find(self, parent: int, atoms: bytes, position: int) -> int:
        """One hash and one dict lookup."""
        page = atoms[position : position + self._page_bytes]
        name = self._chain(self._hash_of(parent), page, self._page_bytes)
        self._missed = (parent, page, name)  # what `add` is going to ask for
        node = self._nodes[name[0]].get(name, 0)
        if not node or self._matches(node, parent, page):
            return node
        others = self._collided.get(name, ())
        return next((other for other in others if self._matches(other, parent, page)), 0)

    def add(self, node: int) -> None:
        """Hash a new node's page and make it known."""
        tree = self._tree
        parent, edge = tree.parent[node], tree.edge(node)
        missed_parent, missed_page, name = self._missed
        if parent != missed_parent or edge != missed_page:
            name = self._chain(self._hash_of(parent), edge, self._page_bytes)
        self._hashes[node] = name
        if self._nodes[name[0]].setdefault(name, node) != node:
            self._collided.setdefault(name, []).append(node)

    def remove(self, node: int) -> None:
        """Drop the hash of a page that is forgotten, so that its number can be used again."""
        self._missed = (0, b"", b"")  # the number may come to stand for another node
        name, self._hashes[node] = self._hashes[node], b""
        others = self._collided.get(name, [])
        if node in others:
            others.remove(node)
        elif others:
            self._nodes[name[0]][name] = others.pop()
        else:
            del self._nodes[name[0]][name]
        if not others:
            self._collided.pop(name, None)

    def _hash_of(self, node: int) -> bytes:
        found = self._hashes[node]
        if found:
            return found
        namespace = self._tree.namespaces[node]
        known, name = self._roots.get(node, (None, b""))
        if known != namespace:  # a new root, perhaps with the number of a forgotten one
            name = namespace_hash(namespace)
            self._roots[node] = (namespace, name)
        return name

    def _matches(self, node: int, parent: int, page: bytes) -> bool:
        tree = self._tree
        return tree.parent[node] == parent and tree.edges[node] == page


INDICES: dict[str, Callable[[RadixTree], ChildIndex]] = {"radix": PageIndex, "hash": HashIndex}
