"""The order in which cached pages go: what a policy decides, and the queue that keeps its order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

from ramify.cache.tree import RadixTree


class Policy(Protocol):
    """Puts evictable leaves in lanes, in each of which the lowest key goes first.

    A node's lane and key may change only in `used`, which is never called for a queued leaf.
    """

    def lane(self, node: int) -> int:
        """The lane of a leaf."""

    def key(self, node: int) -> float:
        """Its place in the lane."""

    def choose(self, lanes: dict[int, Lane], queue: EvictionQueue) -> int:
        """The next victim, given the lanes that are not empty; 0 if there are none."""

    def used(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """A request of `num_pages` pages has ended.

        `known` are the nodes of its path that were there, or remembered, before it looked them up;
        `new` are those that are its own; both from the root on.
        """

    def evicted(self, node: int) -> None:
        """Pages of a leaf are being evicted."""

    def forgotten(self, node: int, num_pages: int) -> None:
        """Evicted pages of a node are not remembered any longer."""


class Lane:
    """Leaves in ascending order: a linked list, and a heap for those that would cut in."""

    __slots__ = ("head", "num_spilled", "spill", "tail")

    def __init__(self) -> None:
        self.head = self.tail = 0
        self.spill: list[tuple[float, int, int]] = []  # key, ticket, node
        self.num_spilled = 0  # entries of the heap that still count


class EvictionQueue:
    """Evictable leaves in the order of a policy: O(1) at either end, O(log n) in between.

    Under recency nearly all leaves come at an end: the one just released is the newest, a parent
    that has become a leaf is about as old as its last child. Linked lists in columns also give the
    garbage collector nothing to do.
    """

    def __init__(self, tree: RadixTree, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[int, Lane] = {}
        self.changed = set[int]()  # lanes that came, went or changed, until a policy clears it
        self.place = tree.column(0)  # 0: not here, -1: in a list, else the ticket in a heap
        self._after = tree.column(0)
        self._before = tree.column(0)
        self._lane = tree.column(0)
        self._tickets = count(1)
        self.num_queued = 0

    def offer(self, node: int) -> None:
        """Put in a leaf that has become evictable."""
        policy = self._policy
        number, key = policy.lane(node), policy.key(node)
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = Lane()
        self.changed.add(number)
        self._lane[node] = number
        self.place[node] = -1
        self.num_queued += 1
        head, tail = lane.head, lane.tail
        if not tail:
            lane.head = lane.tail = node
        elif key >= policy.key(tail):
            self._before[node], self._after[tail] = tail, node
            lane.tail = node
        elif key <= policy.key(head):
            self._after[node], self._before[head] = head, node
            lane.head = node
        else:
            self._spill(lane, key, node)

    def _spill(self, lane: Lane, key: float, node: int) -> None:
        self.place[node] = ticket = next(self._tickets)
        if len(lane.spill) > 2 * lane.num_spilled + 64:
            lane.spill = [entry for entry in lane.spill if self.place[entry[2]] == entry[1]]
            heapq.heapify(lane.spill)
        heapq.heappush(lane.spill, (key, ticket, node))
        lane.num_spilled += 1

    def remove(self, node: int) -> None:
        """Take out a node that is pinned, evicted or no leaf any more."""
        place, number = self.place[node], self._lane[node]
        lane = self._lanes[number]
        self.changed.add(number)
        self.place[node] = 0
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
            lane.num_spilled -= 1
        if not lane.head and not lane.num_spilled:
            del self._lanes[number]

    def first(self) -> int:
        """The next victim, which stays in the queue; 0 when nothing is evictable."""
        return self._policy.choose(self._lanes, self)

    def first_of(self, lane: Lane) -> int:
        """The leaf of a lane with the lowest key."""
        if not lane.num_spilled:
            return lane.head
        spill = lane.spill
        while self.place[spill[0][2]] != spill[0][1]:
            heapq.heappop(spill)
        if not lane.head or spill[0][0] < self._policy.key(lane.head):
            return spill[0][2]
        return lane.head

    def nodes(self) -> Iterable[int]:
        """All nodes in the queue, in no order."""
        for lane in self._lanes.values():
            node = lane.head
            while node:
                yield node
                node = self._after[node]
            yield from (node for _, ticket, node in lane.spill if self.place[node] == ticket)
