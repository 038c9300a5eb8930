"""Looking over the whole tree: for people who operate a cache, never on a request's way."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.types import Node

MAX_SIBLINGS = 1024  # of one node that a survey looks at, newest first
PREVIEW_ATOMS = 32


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node as a survey tells it."""

    id: int
    parent: int  # 0 below a root
    level: int  # nodes above it
    namespace: bytes
    start_token: int  # tokens above it
    num_tokens: int  # of its pages
    num_pages: int
    hits: int
    pins: int
    is_pending: bool
    num_children: int
    age_s: float  # since it was computed
    idle_s: float  # since it was used
    first_atoms: bytes  # packed int32, at most 32
    salt: bytes | None  # the last one on the way to its end


@dataclass(frozen=True, slots=True)
class TreeDump:
    """The nodes with most hits, each after its parent."""

    nodes: tuple[NodeInfo, ...]
    num_nodes: int  # in all


def top_nodes(cache: PrefixCache, max_nodes: int) -> TreeDump:
    """The `max_nodes` nodes that are reached by following the most hits, in the order of a walk.

    Cost: of each node told, and of at most 1,024 of its children.
    """
    tree, store = cache._tree, cache._store  # noqa: SLF001 - a part of the cache's own package
    now_s, size = store.clock(), tree.page_size
    queue = [(-1, root, 0) for root in tree.roots.values()]
    heapq.heapify(queue)
    below: dict[int, list[NodeInfo]] = {}
    num_told = 0
    while queue and num_told < max_nodes:
        _, node, level = heapq.heappop(queue)
        if tree.parent[node]:
            num_told += 1
            above = tree.parent[node]
            is_top = not tree.parent[above]
            found = NodeInfo(
                id=node,
                parent=0 if is_top else above,
                level=level - 1,
                namespace=tree.namespaces[tree.root[node]],
                start_token=tree.start[node] * size,
                num_tokens=tree.resident[node] * size,
                num_pages=tree.resident[node],
                hits=tree.hits[node],
                pins=tree.ref_count[node],
                is_pending=tree.leader[node] != 0,
                num_children=tree.resident_children[node],
                age_s=now_s - tree.created_s[node],
                idle_s=now_s - tree.last_access_s[node],
                first_atoms=tree.edge(node)[: PREVIEW_ATOMS * ATOM_BYTES],
                salt=tree.salt_of(node),
            )
            below.setdefault(found.parent, []).append(found)
        for child in islice(tree.children(node), MAX_SIBLINGS):
            if tree.resident[child]:
                heapq.heappush(queue, (-tree.hits[child], child, level + 1))
    walk: list[NodeInfo] = []
    stack = below.get(0, [])[::-1]
    while stack:
        walk.append(stack.pop())
        stack += below.get(walk[-1].id, [])[::-1]
    return TreeDump(tuple(walk), tree.num_nodes - tree.num_ghosts)


def nodes_under(cache: PrefixCache, key: CacheKey) -> frozenset[int]:
    """Ids of the nodes in which prompts that begin with `key` end or go on, and of those on the way.

    Cost: a memcmp per child of each node on the way, and a visit to each node below.
    """
    tree = cache._tree  # noqa: SLF001
    atoms, found = key.atoms, set[int]()
    ways = [(tree.roots.get(key.namespace, 0), 0)]
    while ways:
        node, position = ways.pop()
        for child in tree.children(node) if node else ():
            edge = tree.edge(child)
            if edge.startswith(atoms[position:]):
                found.update(tree.nodes(child))
            elif atoms.startswith(edge, position):
                found.add(child)
                ways.append((child, position + len(edge)))
    return frozenset(found)


def count_pages(cache: PrefixCache, predicate: Callable[[Node], bool]) -> int:
    """Cached pages of the nodes of which `predicate` is true. Cost: a look at every node."""
    tree = cache._tree  # noqa: SLF001
    return sum(
        tree.resident[node]
        for node in tree.nodes()
        if tree.resident[node] and predicate(tree.node(node))
    )


def time_before(cache: PrefixCache, age_s: float) -> float:
    """The time, on the cache's clock, that is `age_s` ago: to compare with `Node.used_s`."""
    return cache._store.clock() - age_s  # noqa: SLF001
