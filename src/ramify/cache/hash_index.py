"""Hash index: pages by chained hash, in dicts sharded by a byte of the hash.

It is vLLM's alternative to the radix tree.

A page's hash covers all pages before it, as external stores and routers name pages. It is that of
`CacheKey.page_hashes`, except for pages with content atoms: here their numbers in this process are
hashed. Each node holds one page. Pins, eviction, ghosts and events are those of the radix tree, so
that the two differ by the cost of the index alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.child_index import SHARDS, ChildIndex, PageIndex
from ramify.cache.gc_untracked import untracked
from ramify.cache.key import chain_hashes, namespace_hash
from ramify.cache.tree import RadixTree


class HashIndex:
    """Child index by the hash of a page and all pages before it.

    Every hit compares the page's atoms and its parent, so that a collision of hashes costs a
    comparison and never gives a wrong page.

    Args:
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
        """The child of `parent` whose page starts at `position`; 0 if there is none."""
        page = atoms[position : position + self._page_bytes]
        page_hash = self._chain(self._hash_of(parent), page, self._page_bytes)
        self._missed = (parent, page, page_hash)  # what `add` will need next
        node = self._nodes[page_hash[0]].get(page_hash, 0)
        if not node or self._matches(node, parent, page):
            return node
        others = self._collided.get(page_hash, ())
        return next((other for other in others if self._matches(other, parent, page)), 0)

    def add(self, node: int) -> None:
        """Index a new node by its page."""
        tree = self._tree
        parent, edge = tree.parent[node], tree.edge(node)
        missed_parent, missed_page, page_hash = self._missed
        if parent != missed_parent or edge != missed_page:
            page_hash = self._chain(self._hash_of(parent), edge, self._page_bytes)
        self._hashes[node] = page_hash
        if self._nodes[page_hash[0]].setdefault(page_hash, node) != node:
            self._collided.setdefault(page_hash, []).append(node)

    def remove(self, node: int) -> None:
        """Remove a node from the index; its number can be used again."""
        self._missed = (0, b"", b"")  # the number may be reused for another node
        page_hash, self._hashes[node] = self._hashes[node], b""
        others = self._collided.get(page_hash, [])
        if node in others:
            others.remove(node)
        elif others:
            self._nodes[page_hash[0]][page_hash] = others.pop()
        else:
            del self._nodes[page_hash[0]][page_hash]
        if not others:
            self._collided.pop(page_hash, None)

    def _hash_of(self, node: int) -> bytes:
        page_hash = self._hashes[node]
        if page_hash:
            return page_hash
        namespace = self._tree.namespaces[node]
        known, root_hash = self._roots.get(node, (None, b""))
        if known != namespace:  # a new root, perhaps with a reused number
            root_hash = namespace_hash(namespace)
            self._roots[node] = (namespace, root_hash)
        return root_hash

    def _matches(self, node: int, parent: int, page: bytes) -> bool:
        tree = self._tree
        return tree.parent[node] == parent and tree.edges[node] == page


def _page_index(tree: RadixTree) -> ChildIndex:
    return PageIndex(tree.edges, tree.parent, tree.page_bytes)


INDICES: dict[str, Callable[[RadixTree], ChildIndex]] = {"radix": _page_index, "hash": HashIndex}
