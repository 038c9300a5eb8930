"""Ghosts: evicted pages whose nodes stay in the tree, with time and reason, within a budget."""

from __future__ import annotations

from collections.abc import Callable

from ramify.cache.tree import RadixTree

# Reasons of eviction; a column holds the index of each node's.
REASONS = ("capacity", "session_ended", "asked", "cleared", "predicate", "window", "withdrawn")
CAPACITY, ENDED, ASKED, CLEARED, PREDICATE, WINDOW, WITHDRAWN = range(len(REASONS))


class Ghosts:
    """Nodes with evicted pages, by time of their last eviction.

    A node's pages are evicted after all pages below it, so the oldest ghost has no children.

    Args:
        max_pages: budget of ghost pages; the oldest are forgotten. 0 keeps none.
        on_forget: called with a node and its number of ghost pages, before they are forgotten.
    """

    def __init__(
        self, tree: RadixTree, max_pages: int, on_forget: Callable[[int, int], None]
    ) -> None:
        self._tree = tree
        self._on_forget = on_forget
        self.max_pages = max_pages
        # A node that was announced has the reason WITHDRAWN until its first eviction.
        self.reason = tree.column(0, inherited=True)
        self.evicted_s = tree.column(0.0, inherited=True)
        self._after = tree.column(0)
        self._before = tree.column(0)
        self._listed = tree.column(0)
        self._head = self._tail = 0

    def add(self, node: int, reason: int, now_s: float) -> None:
        """Record that pages of a node were evicted now."""
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
        """Whether a node is announced and not yet computed, or its step failed."""
        tree = self._tree
        is_empty = tree.leader[node] or not tree.resident[node]
        return bool(is_empty) and self.reason[node] == WITHDRAWN

    def trim(self) -> None:
        """Forget the oldest ghosts until the budget holds."""
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
        """The nodes with ghosts, oldest first; for checks."""
        nodes, node = [], self._head
        while node:
            nodes.append(node)
            node = self._after[node]
        return nodes

    def remove(self, node: int) -> None:
        """Unlink a node whose pages are all cached again, or which is forgotten."""
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
