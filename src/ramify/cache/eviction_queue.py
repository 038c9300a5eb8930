"""Order of eviction: the `Policy` protocol, and the queue of evictable leaves."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, Protocol

from ramify.cache.tree import SESSION_ENDED, RadixTree

# Tickets of nodes that are in no heap.
NOT_QUEUED: Final = 0
IN_SEGMENT: Final = -1
GOES_FIRST: Final = -2


class Policy(Protocol):
    """Puts evictable leaves into segments, and ranks them within.

    The segment and rank of a queued leaf never change. They may change while a lease holds the node:
    when the lease is released (recency, and `on_release`) and in `PrefixCache.set_priority`.
    """

    def segment(self, node: int) -> int:
        """The segment of a leaf."""

    def rank(self, node: int) -> float:
        """The rank of a leaf in its segment; the lowest is evicted first."""

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The leaf to evict next, given the segments that are not empty; 0 if there are none."""

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """A lease of `num_pages` pages is being released; its nodes are not queued yet.

        `known` are the nodes of its path that were cached or ghosts at its lookup; `new` are the nodes
        that its request added. Both are in order from the root.
        """

    def on_evict(self, node: int) -> None:
        """Pages of this leaf are being evicted."""

    def on_forget(self, node: int, num_pages: int) -> None:
        """`num_pages` evicted pages of a node stop being ghosts."""


class Segment:
    """Leaves of a segment by rank: a linked list, and a heap for leaves that belong inside it."""

    __slots__ = ("head", "num_unordered", "tail", "unordered")

    def __init__(self) -> None:
        self.head = self.tail = 0
        self.unordered: list[tuple[float, int, int]] = []  # rank, ticket, node
        self.num_unordered = 0  # entries of the heap that are not stale


class EvictionQueue:
    """Evictable leaves in the order of a policy: O(1) at either end, O(log n) in between.

    Leaves of ended sessions come before all others, in the order in which they came.

    With LRU nearly all leaves are pushed at an end: the leaf just released is the newest, and a
    parent that has become a leaf is about as old as its last child. The linked lists are columns of
    numbers, so that the garbage collector has nothing to traverse.
    """

    def __init__(self, tree: RadixTree, policy: Policy) -> None:
        self._policy = policy
        self._segments: dict[int, Segment] = {}
        self.changed = set[int]()  # segments that changed; a policy clears it
        self._session = tree.session
        self._ended = Segment()  # leaves of ended sessions, in a list
        self.ticket = tree.column(NOT_QUEUED)
        self._after = tree.column(0)
        self._before = tree.column(0)
        self._segment_of = tree.column(0)
        self._tickets = count(1)
        self.num_queued = 0

    def push(self, node: int) -> None:
        """Insert a leaf that has become evictable."""
        if self._session[node] == SESSION_ENDED:
            self._push_first(node)
            return
        policy = self._policy
        number, rank = policy.segment(node), policy.rank(node)
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = Segment()
        self.changed.add(number)
        self._segment_of[node] = number
        self.ticket[node] = IN_SEGMENT
        self.num_queued += 1
        head, tail = segment.head, segment.tail
        if not tail:
            segment.head = segment.tail = node
        elif rank >= policy.rank(tail):
            self._before[node], self._after[tail] = tail, node
            segment.tail = node
        elif rank <= policy.rank(head):
            self._after[node], self._before[head] = head, node
            segment.head = node
        else:
            self._push_unordered(segment, rank, node)

    def _push_first(self, node: int) -> None:
        segment, tail = self._ended, self._ended.tail
        self.ticket[node] = GOES_FIRST
        self.num_queued += 1
        if tail:
            self._before[node], self._after[tail] = tail, node
        else:
            segment.head = node
        segment.tail = node

    def _push_unordered(self, segment: Segment, rank: float, node: int) -> None:
        self.ticket[node] = ticket = next(self._tickets)
        if len(segment.unordered) > 2 * segment.num_unordered + 64:
            segment.unordered = [
                entry for entry in segment.unordered if self.ticket[entry[2]] == entry[1]
            ]
            heapq.heapify(segment.unordered)
        heapq.heappush(segment.unordered, (rank, ticket, node))
        segment.num_unordered += 1

    def remove(self, node: int) -> None:
        """Remove a node that is pinned, evicted or no longer a leaf."""
        ticket, number = self.ticket[node], self._segment_of[node]
        self.ticket[node] = NOT_QUEUED
        self.num_queued -= 1
        if ticket == GOES_FIRST:
            self._unlink(node, self._ended)
            return
        segment = self._segments[number]
        self.changed.add(number)
        if ticket == IN_SEGMENT:
            self._unlink(node, segment)
        else:
            segment.num_unordered -= 1
        if not segment.head and not segment.num_unordered:
            del self._segments[number]

    def _unlink(self, node: int, segment: Segment) -> None:
        """Take a node out of a segment's list."""
        before, after = self._before[node], self._after[node]
        if before:
            self._after[before] = after
            self._before[node] = 0
        else:
            segment.head = after
        if after:
            self._before[after] = before
            self._after[node] = 0
        else:
            segment.tail = before

    def first(self) -> int:
        """The leaf to evict next, which stays in the queue; 0 when nothing is evictable."""
        return self._ended.head or self._policy.victim(self._segments, self)

    def first_of(self, segment: Segment) -> int:
        """The leaf of the lowest rank in a segment."""
        if not segment.num_unordered:
            return segment.head
        heap = segment.unordered
        while self.ticket[heap[0][2]] != heap[0][1]:
            heapq.heappop(heap)
        if not segment.head or heap[0][0] < self._policy.rank(segment.head):
            return heap[0][2]
        return segment.head

    def nodes(self) -> Iterable[int]:
        """All nodes in the queue, in no particular order."""
        for segment in (self._ended, *self._segments.values()):
            node = segment.head
            while node:
                yield node
                node = self._after[node]
            for _, ticket, node in segment.unordered:
                if self.ticket[node] == ticket:
                    yield node
