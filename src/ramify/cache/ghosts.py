"""What was evicted, when and why: the tree remembers it, within a budget, oldest forgotten first."""

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.tree import RadixTree

# why a run of pages lost its place; an index into this tuple is kept by node
REASONS = ("capacity", "asked", "cleared", "predicate", "withdrawn")
CAPACITY, ASKED, CLEARED, PREDICATE, WITHDRAWN = range(len(REASONS))


class Ghosts:
    """Nodes with evicted pages, in the order of their last eviction.

    A node's pages are evicted after all those below it, so the oldest has no children.

    Args:
        max_pages: pages remembered at most; 0 remembers nothing.
        on_forget: told a node and how many of its pages are forgotten, before they are.
    """

    def __init__(
        self, tree: RadixTree, max_pages: int, on_forget: Callable[[int, int], None]
    ) -> None:
        self._tree = tree
        self._on_forget = on_forget
        self.max_pages = max_pages
        # Until it is first evicted, a node that was announced has the reason WITHDRAWN.
        self.reason = tree.column(0, inherited=True)
        self.evicted_s = tree.column(0.0)
        self._after = tree.column(0)
        self._before = tree.column(0)
        self._listed = tree.column(0)
        self._head = self._tail = 0

    def add(self, node: int, reason: int, now_s: float) -> None:
        """Pages of a node were evicted just now."""
        tail = self._tail
        if node != tail:
            if self._listed[node]:
                self.remove(node)
                tail = self._tail
            if tail:
                self._after[tail] = node
                self._before[node] = tail
            else:
                self._head = node
            self._tail = node
            self._listed[node] = 1
        self.reason[node] = reason
        self.evicted_s[node] = now_s

    def never_computed(self, node: int) -> bool:
        """Whether a node is no more than announced yet, or was, and its step failed."""
        tree = self._tree
        waits = tree.leader[node] or not tree.resident[node]
        return bool(waits) and self.reason[node] == WITHDRAWN

    def trim(self) -> None:
        """Forget the oldest until the budget is kept."""
        tree = self._tree
        while tree.num_ghost_pages > self.max_pages:
            node = self._head
            self.remove(node)
            root = tree.root[node]
            self._on_forget(node, tree.length[node] - tree.resident[node])
            tree.forget(node)
            if not tree.first_child[root]:
                tree.drop_empty_root(root)

    def oldest_first(self) -> list[int]:
        """The remembered nodes: for checks."""
        found, node = [], self._head
        while node:
            found.append(node)
            node = self._after[node]
        return found

    def remove(self, node: int) -> None:
        """Take a node off the list: all of its pages are cached again, or it is forgotten."""
        before, after = self._before[node], self._after[node]
        if before:
            self._after[before] = after
        else:
            self._head = after
        if after:
            self._before[after] = before
        else:
            self._tail = before
        self._before[node] = self._after[node] = self._listed[node] = 0
