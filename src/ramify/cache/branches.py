"""Branches of the tree below a node, a few levels at a time: what a chart of a large tree reads.

The work of a call is bounded, whatever the tree: it runs between two steps of an engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from ramify.cache.call_guard import guarded
from ramify.cache.content_atoms import slice_atoms
from ramify.cache.key import HASH_BYTES, chain_hashes, namespace_hash
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import RadixTree
from ramify.errors import ConfigError

MAX_VISITS: Final = 2048  # nodes and roots that a call looks at: 2 to 4 ms
MAX_HASHED_TOKENS: Final = 1 << 16  # of a call: 2 ms
PREVIEW_ATOMS: Final = 160
UNCOUNTED: Final = 1 << 62  # before any number of hits


@dataclass(frozen=True, slots=True)
class BranchFilter:
    """Which namespaces a reader may see. The owner of a node is its last salt, else its namespace.

    Args:
        is_own: for an owner: its nodes are shown in full.
        is_shared: for a namespace: nodes there without a salt are shown where an own node follows,
            as bare prefixes: no count, time or lease, since those are of other readers too.
        first: namespaces to look at before the newest ones, of which a call cannot visit any number.
    """

    is_own: Callable[[bytes], bool]
    is_shared: Callable[[bytes], bool]
    first: tuple[bytes, ...] = ()


SEES_ALL: Final = BranchFilter(lambda owner: True, lambda namespace: True)


@dataclass(frozen=True, slots=True)
class Branch:
    """A node and what is known below it. `parent` is 0 for a child of a root."""

    id: int
    parent: int
    namespace: bytes
    salt: bytes | None  # the last salt on the path to its end
    start_token: int
    num_tokens: int  # of its edge, with evicted ones
    cached_tokens: int  # of these, in the pool
    is_own: bool  # False: a bare prefix, all that follows here is 0
    hits: int
    leases: int
    is_pending: bool
    age_s: float
    idle_s: float
    first_atoms: bytes  # packed int32, at most `PREVIEW_ATOMS`
    is_cut: bool  # it has children that the answer leaves out
    # Of its first evicted page, to look for in a tier; empty: none is evicted, or not hashed.
    evicted_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class Branches:
    """The nodes of most hits at and below a node, each after its parent."""

    nodes: tuple[Branch, ...]
    is_cut: bool  # beginnings of prompts were left out


@guarded
def read_branches(
    cache: PrefixCache,
    below: int = 0,
    *,
    max_nodes: int,
    max_levels: int,
    shows: BranchFilter = SEES_ALL,
    hashes_evicted: bool = False,
) -> Branches:
    """Follow the most hits down from a node; cost: at most `MAX_VISITS` nodes.

    Evicted nodes whose tokens are remembered are among them.

    Args:
        below: id of a node, which comes first in the answer; 0: all beginnings of prompts.
        max_nodes: of the answer, at least 1; bare prefixes above them are not counted.
        max_levels: of the answer, at least 1.
        hashes_evicted: set `evicted_hash`, of the first `MAX_HASHED_TOKENS` of the nodes.

    Raises:
        ConfigError: no such node, or the reader may not see it: of a bare prefix, none of the nodes
            that were looked at behind it is an own one.
    """
    hasher = _PageHasher(cache._tree) if hashes_evicted else None  # noqa: SLF001 - its own package
    return _Walk(cache, shows, max_nodes, max_levels, hasher).read(below)


class _PageHasher:
    """Hashes of the pages of nodes, within a budget."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree, self._room = tree, MAX_HASHED_TOKENS
        self._ends: dict[int, bytes] = {}  # node → hash of its last page

    def first_evicted(self, node: int) -> bytes:
        """The hash of the first evicted page of a node; empty without one, or without room."""
        tree = self._tree
        if self._room <= 0 or tree.resident[node] == tree.length[node]:
            return b""
        above = self._end(tree.parent[node])
        return above and self._chain(above, node, tree.resident[node] + 1)

    def _end(self, node: int) -> bytes:
        """The hash of the last page of a node or root; empty without room."""
        tree, path = self._tree, []
        while node not in self._ends and tree.parent[node]:
            path.append(node)  # of a page at least
            if len(path) * tree.page_size > self._room:
                self._room = 0
                return b""
            node = tree.parent[node]
        end = self._ends.get(node) or namespace_hash(tree.namespaces[node])
        for below in reversed(path):
            if not (end := self._chain(end, below, tree.length[below])):
                return b""
            self._ends[below] = end
        return end

    def _chain(self, above: bytes, node: int, num_pages: int) -> bytes:
        """The hash of a page of a node, counted from 1; empty without room."""
        tree = self._tree
        self._room -= num_pages * tree.page_size
        if self._room < 0:
            return b""
        atoms = bytes(tree.edges[node][: num_pages * tree.page_bytes])
        content = slice_atoms(tree.content_from(node, 0), 0, num_pages * tree.page_size)
        return chain_hashes(above, atoms, tree.page_bytes, content)[-HASH_BYTES:]


class _Walk:
    """One call of `read_branches`: a queue by hits, and the nodes that it has taken."""

    def __init__(
        self,
        cache: PrefixCache,
        shows: BranchFilter,
        max_nodes: int,
        max_levels: int,
        hasher: _PageHasher | None,
    ) -> None:
        store = cache._store  # noqa: SLF001 - the cache's own package
        self._tree, self._ghosts, self._now_s = store.tree, store.ghosts, store.clock()
        self._hasher = hasher
        self._shows, self._max_nodes, self._max_levels = shows, max_nodes, max_levels
        self._num_visits = self._num_own = 0
        self._queue: list[tuple[int, int, int]] = []  # (-hits, node, level)
        self._taken: list[int] = []  # in the order of the queue
        self._salts: dict[int, bytes | None] = {}  # node → the last salt on the path to its end
        self._bare: set[int] = set()  # prefixes that are shown if an own node follows
        self._cut: set[int] = set()  # nodes with children that were not taken; 0: roots

    def read(self, below: int) -> Branches:
        """The answer."""
        if below:
            if not self._is_live(below) or not self._admits(below):
                raise self._missing(below)
            self._push(below, 1)
        else:
            self._push_roots()
        while self._queue and self._num_own < self._max_nodes:
            _, node, level = heapq.heappop(self._queue)
            self._taken.append(node)
            self._num_own += node not in self._bare
            self._push_children(node, level)
        if below in self._bare and not self._num_own:
            raise self._missing(below)
        for _, node, _ in self._queue:
            if node not in self._bare:
                self._cut.add(self._above(node))
        return self._in_order(below)

    def _missing(self, node: int) -> ConfigError:
        return ConfigError(f"node {node} is not in the cache; it was evicted, or never was")

    def _above(self, node: int) -> int:
        """The parent of a node; 0 for a child of a root."""
        above = self._tree.parent[node]
        return above if self._tree.parent[above] else 0

    def _is_live(self, node: int) -> bool:
        tree = self._tree
        return 0 < node < len(tree.parent) and tree.parent[node] != 0

    def _salt_of(self, node: int) -> bytes | None:
        """The last salt on the path to a node's end. O(depth), or O(1) if its parent's is known."""
        if node not in self._salts:
            tree = self._tree
            salts = [atom.salt for _, atom in tree.content.get(node, ()) if atom.salt is not None]
            above = tree.parent[node]
            if salts:
                self._salts[node] = salts[-1]
            elif above in self._salts:
                self._salts[node] = self._salts[above]
            else:
                self._salts[node] = tree.salt_of(above)
        return self._salts[node]

    def _owner(self, node: int) -> bytes:
        tree, salt = self._tree, self._salt_of(node)
        return tree.namespaces[tree.root[node]] if salt is None else salt

    def _admits(self, node: int) -> bool:
        """Whether a reader sees a node, itself or as the beginning of an own prompt."""
        if self._shows.is_own(self._owner(node)):
            return True
        tree = self._tree
        if self._salt_of(node) is None and self._shows.is_shared(tree.namespaces[tree.root[node]]):
            self._bare.add(node)
            return True
        return False

    def _push_roots(self) -> None:
        tree, first = self._tree, self._shows.first
        newest = (name for name in reversed(tree.roots) if name not in first)
        for namespace in chain((name for name in first if name in tree.roots), newest):
            root = tree.roots[namespace]
            self._num_visits += 1
            if self._num_visits > MAX_VISITS // 2:
                self._cut.add(0)
                return
            if self._shows.is_own(namespace) or self._shows.is_shared(namespace):
                self._push_children(root, 0)

    def _push_children(self, node: int, level: int) -> None:
        tree = self._tree
        shown = node if tree.parent[node] else 0
        if level >= self._max_levels and tree.first_child[node]:
            self._cut.add(shown)
            return
        room = MAX_VISITS - self._num_visits
        children = [*islice(tree.children(node), max(0, room) + 1)]
        if len(children) > room:
            self._cut.add(shown)
            children.pop()
        self._num_visits += len(children)
        for child in children:
            is_computed = tree.resident[child] or not self._ghosts.never_computed(child)
            if is_computed and self._admits(child):
                self._push(child, level + 1)

    def _push(self, node: int, level: int) -> None:
        # Bare prefixes come first: among them, an order by hits would say what others read.
        hits = UNCOUNTED if node in self._bare else self._tree.hits[node]
        heapq.heappush(self._queue, (-hits, node, level))

    def _branch(self, node: int) -> Branch:
        tree, size = self._tree, self._tree.page_size
        is_own = node not in self._bare
        return Branch(
            id=node,
            parent=self._above(node),
            namespace=tree.namespaces[tree.root[node]],
            salt=self._salt_of(node),
            start_token=tree.start[node] * size,
            num_tokens=tree.length[node] * size,
            cached_tokens=tree.owned[node] * size,
            is_own=is_own,
            hits=tree.hits[node] if is_own else 0,
            leases=tree.ref_count[node] if is_own else 0,
            is_pending=is_own and tree.leader[node] != 0,
            age_s=self._now_s - tree.created_s[node] if is_own else 0.0,
            idle_s=self._now_s - tree.last_access_s[node] if is_own else 0.0,
            first_atoms=bytes(tree.edges[node][: PREVIEW_ATOMS * ATOM_BYTES]),
            is_cut=is_own and node in self._cut,
            evicted_hash=b"" if self._hasher is None else self._hasher.first_evicted(node),
        )

    def _in_order(self, below: int) -> Branches:
        """The nodes taken, depth first; bare prefixes only where an own node follows."""
        wanted = {0, below}
        for node in reversed(self._taken):  # children were taken after their parents
            if node in wanted or node not in self._bare:
                wanted |= {node, self._above(node)}
        children: dict[int, list[int]] = {}
        for node in self._taken:
            if node in wanted:
                parent = 0 if node == below else self._above(node)
                children.setdefault(parent, []).append(node)
        walk: list[Branch] = []
        stack = children.get(0, [])[::-1]
        while stack:
            node = stack.pop()
            walk.append(self._branch(node))
            stack += children.get(node, [])[::-1]
        return Branches(tuple(walk), 0 in self._cut)
