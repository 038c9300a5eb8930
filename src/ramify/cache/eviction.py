"""Which cached pages go first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from ramify.cache.tree import Node
from ramify.errors import ConfigError

SortKey = tuple[int, ...]

# name → node's sort key, smallest evicted first; the page depth breaks ties, deepest first
POLICIES: dict[str, Callable[[Node], SortKey]] = {
    "lru": lambda node: (node.last_access, -node.depth),
}


class EvictionQueue:
    """Evictable leaves in the order of a policy: O(log n) per offer and per victim.

    A node may be offered any number of times; an entry counts only while the node's sort key is
    still the one it was offered with, which `pop` finds out. Stale entries are swept when they
    outnumber the live ones, so that the queue is bounded by the number of nodes.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"unknown eviction policy {policy!r}; one of {sorted(POLICIES)}")
        self.policy = policy
        self._sort_key = POLICIES[policy]
        self._heap: list[tuple[SortKey, int, Node]] = []
        self._order = count()

    def offer(self, node: Node, num_nodes: int) -> None:
        """Tell that `node` may have become evictable; others are ignored."""
        if not evictable_leaf(node):
            return
        if len(self._heap) > 2 * num_nodes + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._sort_key(node), next(self._order), node))

    def pop(self) -> Node | None:
        """The next victim, taken off the queue; None when nothing is evictable."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                return entry[2]
        return None

    def _is_live(self, entry: tuple[SortKey, int, Node]) -> bool:
        node = entry[2]
        return evictable_leaf(node) and entry[0] == self._sort_key(node)


def evictable_leaf(node: Node) -> bool:
    """Whether a node can be evicted now: a ready leaf in the tree that nobody has pinned."""
    parent = node.parent
    return (
        node.pins == 0
        and not node.children
        and not node.holder
        and parent is not None
        and bool(node.pages)
    )
