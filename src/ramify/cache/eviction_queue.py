"""The order in which cached pages go: what a policy decides, and the queue that keeps its order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

from ramify.cache.tree import RadixTree


class Policy(Protocol):
    """Puts evictable leaves in lanes, in each of which the lowest key goes first.

    A node's lane and key may change only in `on_release`, which is never called for a queued leaf.
    """

    def segment(self, node: int) -> int:
        """The lane of a leaf."""

    def rank(self, node: int) -> float:
        """Its place in the lane."""

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The next victim, given the lanes that are not empty; 0 if there are none."""

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """A request of `num_pages` pages has ended.

        `known` are the nodes of its path that were there, or remembered, before it looked them up;
        `new` are those that are its own; both from the root on.
        """

    def on_evict(self, node: int) -> None:
        """Pages of a leaf are being evicted."""

    def on_forget(self, node: int, num_pages: int) -> None:
        """Evicted pages of a node are not remembered any longer."""


class Segment:
    """Leaves in ascending order: a linked list, and a heap for those that would cut in."""

    __slots__ = ("head", "num_unordered", "tail", "unordered")

    def __init__(self) -> None:
        self.head = self.tail = 0
        self.unordered: list[tuple[float, int, int]] = []  # key, ticket, node
        self.num_unordered = 0  # entries of the heap that still count


class EvictionQueue:
    """Evictable leaves in the order of a policy: O(1) at either end, O(log n) in between.

    Under recency nearly all leaves come at an end: the one just released is the newest, a parent
    that has become a leaf is about as old as its last child. Linked lists in columns also give the
    garbage collector nothing to do.
    """

    def __init__(self, tree: RadixTree, policy: Policy) -> None:
        self._policy = policy
        self._segments: dict[int, Segment] = {}
        self.changed = set[int]()  # lanes that came, went or changed, until a policy clears it
        self.ticket = tree.column(0)  # 0: not here, -1: in a list, else the ticket in a heap
        self._after = tree.column(0)
        self._before = tree.column(0)
        self._segment_of = tree.column(0)
        self._tickets = count(1)
        self.num_queued = 0

    def push(self, node: int) -> None:
        """Put in a leaf that has become evictable."""
        policy = self._policy
        number, key = policy.segment(node), policy.rank(node)
        lane = self._segments.get(number)
        if lane is None:
            lane = self._segments[number] = Segment()
        self.changed.add(number)
        self._segment_of[node] = number
        self.ticket[node] = -1
        self.num_queued += 1
        head, tail = lane.head, lane.tail
        if not tail:
            lane.head = lane.tail = node
        elif key >= policy.rank(tail):
            self._before[node], self._after[tail] = tail, node
            lane.tail = node
        elif key <= policy.rank(head):
            self._after[node], self._before[head] = head, node
            lane.head = node
        else:
            self._push_unordered(lane, key, node)

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
        """Take out a node that is pinned, evicted or no leaf any more."""
        place, number = self.ticket[node], self._segment_of[node]
        lane = self._segments[number]
        self.changed.add(number)
        self.ticket[node] = 0
        self.num_queued -= 1
        if place == -1:
            before, after = self._before[node], self._after[node]
            if before:
                self._after[before] = after
                self._before[node] = 0
            else:
                lane.head = after
            if after:
                self._before[after] = before
                self._after[node] = 0
            else:
                lane.tail = before
        else:
            lane.num_unordered -= 1
        if not lane.head and not lane.num_unordered:
            del self._segments[number]

    def first(self) -> int:
        """The next victim, which stays in the queue; 0 when nothing is evictable."""
        return self._policy.victim(self._segments, self)

    def first_of(self, segment: Segment) -> int:
        """The leaf of a lane with the lowest key."""
        if not segment.num_unordered:
            return segment.head
        spill = segment.unordered
        while self.ticket[spill[0][2]] != spill[0][1]:
            heapq.heappop(spill)
        if not segment.head or spill[0][0] < self._policy.rank(segment.head):
            return spill[0][2]
        return segment.head

    def nodes(self) -> Iterable[int]:
        """All nodes in the queue, in no order."""
        for lane in self._segments.values():
            node = lane.head
            while node:
                yield node
                node = self._after[node]
            yield from (node for _, ticket, node in lane.unordered if self.ticket[node] == ticket)
