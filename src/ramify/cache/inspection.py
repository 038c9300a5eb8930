"""Read-only walks over the whole tree for operators: tree dump, prefix filter. Never on the hot path."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ramify.cache.call_guard import guarded
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.pages import Pages
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.tree import SESSION_ENDED
from ramify.cache.types import Node

MAX_SIBLINGS = 1024  # children of a node that a dump visits, newest first
PREVIEW_ATOMS = 32


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of a tree dump."""

    id: int
    parent: int  # 0 for a child of a root
    level: int  # nodes above it
    namespace: bytes
    start_token: int  # tokens before it
    num_tokens: int  # in its cached pages
    num_pages: int
    hits: int
    pins: int
    is_pending: bool
    num_children: int
    age_s: float  # since its pages were computed
    idle_s: float  # since its last use
    first_atoms: bytes  # packed int32, at most 32
    salt: bytes | None  # the last salt on the path to its end


@dataclass(frozen=True, slots=True)
class TreeDump:
    """The nodes of the most hits, each after its parent."""

    nodes: tuple[NodeInfo, ...]
    num_nodes: int  # in all


@guarded
def top_nodes(cache: PrefixCache, max_nodes: int) -> TreeDump:
    """The `max_nodes` nodes reached by following the most hits, in depth-first order.

    Cost: each node returned, and at most 1,024 of its children.
    """
    tree, store = cache._tree, cache._store  # noqa: SLF001 - a part of the cache's own package
    now_s, size = store.clock(), tree.page_size
    queue = [(-1, root, 0) for root in tree.roots.values()]
    heapq.heapify(queue)
    below: dict[int, list[NodeInfo]] = {}
    num_listed = 0
    while queue and num_listed < max_nodes:
        _, node, level = heapq.heappop(queue)
        if tree.parent[node]:
            num_listed += 1
            above = tree.parent[node]
            is_top = not tree.parent[above]
            info = NodeInfo(
                id=node,
                parent=0 if is_top else above,
                level=level - 1,
                namespace=tree.namespaces[tree.root[node]],
                start_token=tree.start[node] * size,
                num_tokens=tree.owned[node] * size,
                num_pages=tree.owned[node],
                hits=tree.hits[node],
                pins=tree.ref_count[node],
                is_pending=tree.leader[node] != 0,
                num_children=tree.resident_children[node],
                age_s=now_s - tree.created_s[node],
                idle_s=now_s - tree.last_access_s[node],
                first_atoms=tree.edge(node)[: PREVIEW_ATOMS * ATOM_BYTES],
                salt=tree.salt_of(node),
            )
            below.setdefault(info.parent, []).append(info)
        for child in islice(tree.children(node), MAX_SIBLINGS):
            if tree.resident[child]:
                heapq.heappush(queue, (-tree.hits[child], child, level + 1))
    walk: list[NodeInfo] = []
    stack = below.get(0, [])[::-1]
    while stack:
        walk.append(stack.pop())
        stack += below.get(walk[-1].id, [])[::-1]
    return TreeDump(tuple(walk), tree.num_nodes - tree.num_ghosts)


@guarded
def nodes_under(cache: PrefixCache, key: CacheKey) -> frozenset[int]:
    """Ids of the nodes on the path of `key` and below it.

    Cost: a memcmp per child of each node on the path, and a visit to each node below.
    """
    tree = cache._tree  # noqa: SLF001
    atoms, ids = key.atoms, set[int]()
    paths = [(tree.roots.get(key.namespace, 0), 0)]
    while paths:
        node, position = paths.pop()
        for child in tree.children(node) if node else ():
            edge = tree.edge(child)
            if edge.startswith(atoms[position:]):
                ids.update(tree.nodes(child))
            elif atoms.startswith(edge, position):
                ids.add(child)
                paths.append((child, position + len(edge)))
    return frozenset(ids)


@guarded
def count_pages(cache: PrefixCache, predicate: Callable[[Node], bool]) -> int:
    """Count the cached pages of nodes that satisfy `predicate`. Cost: a visit to every node."""
    tree = cache._tree  # noqa: SLF001
    return sum(
        tree.owned[node]
        for node in tree.nodes()
        if tree.resident[node] and predicate(tree.node(node))
    )


@guarded
def pages_by_use(cache: PrefixCache) -> list[int]:
    """Cached pages: last used first, each before those that follow it; of ended sessions behind all others.

    Cost: a visit to every node, and a sort.
    """
    tree = cache._tree  # noqa: SLF001
    nodes = [node for node in tree.nodes() if tree.owned[node] and not tree.leader[node]]
    nodes.sort(
        key=lambda node: (
            tree.session[node] == SESSION_ENDED,
            -tree.last_access[node],
            tree.start[node],
        )
    )
    return [page for node in nodes for page in Pages(tree.pages[node])[-tree.owned[node] :]]


def time_before(cache: PrefixCache, age_s: float) -> float:
    """The cache's clock `age_s` seconds ago, to compare with `Node.used_s`."""
    return cache._store.clock() - age_s  # noqa: SLF001
