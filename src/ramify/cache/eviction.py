"""Which cached pages go first: policies in a table, and the queue that keeps their order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ramify.cache.tree import RadixTree
from ramify.errors import ConfigError

SLRU_HITS = 2  # lookups after which a page is in the protected segment
NodeNumber = Callable[[RadixTree, int], float]


@dataclass(frozen=True, slots=True)
class Policy:
    """The lowest lane goes first; inside a lane, the lowest key."""

    lane: Callable[[RadixTree, int], int]
    key: NodeNumber


def _recency(tree: RadixTree, node: int) -> float:
    return tree.last_access[node]


def _one_lane(tree: RadixTree, node: int) -> int:
    return 0


POLICIES: dict[str, Policy] = {
    "auto": Policy(_one_lane, _recency),
    "lru": Policy(_one_lane, _recency),
    "fifo": Policy(_one_lane, lambda tree, node: tree.created[node]),
    "slru": Policy(lambda tree, node: min(tree.hits[node], SLRU_HITS), _recency),
    "priority": Policy(lambda tree, node: tree.priority[node], _recency),
}


class _Lane:
    """Leaves of one lane: a linked list in ascending order, and a heap for what would cut in."""

    __slots__ = ("head", "num_spilled", "spill", "tail")

    def __init__(self) -> None:
        self.head = self.tail = 0
        self.spill: list[tuple[float, int, int]] = []  # key, ticket, node
        self.num_spilled = 0  # entries of the heap that still count


class EvictionQueue:
    """Evictable leaves in the order of a policy: O(1) at either end, O(log n) in between.

    The order is fixed while a node is in the queue; it is taken out when it is pinned and offered
    again when it is not any more.
    """

    def __init__(self, tree: RadixTree, policy: Policy) -> None:
        self._tree = tree
        self._lane_of, self._key = policy.lane, policy.key
        self._lanes: dict[int, _Lane] = {}
        self.place = tree.column("q")  # 0: not here, -1: in a list, else the ticket in a heap
        self._after = tree.column("i")
        self._before = tree.column("i")
        self._lane = tree.column("i")
        self._tickets = count(1)
        self.num_queued = 0

    def offer(self, node: int) -> None:
        """Put in a leaf that has become evictable."""
        number, key = self._lane_of(self._tree, node), self._key(self._tree, node)
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane()
        self._lane[node] = number
        self.place[node] = -1
        self.num_queued += 1
        if not lane.tail:
            lane.head = lane.tail = node
        elif key >= self._key(self._tree, lane.tail):
            self._before[node], self._after[lane.tail] = lane.tail, node
            lane.tail = node
        elif key <= self._key(self._tree, lane.head):
            self._after[node], self._before[lane.head] = lane.head, node
            lane.head = node
        else:
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
        if not lane.head and not lane.num_spilled and number:
            del self._lanes[number]

    def first(self) -> int:
        """The next victim, which stays in the queue; 0 when nothing is evictable."""
        for number in sorted(self._lanes) if len(self._lanes) > 1 else self._lanes:
            if node := self._first_of(self._lanes[number]):
                return node
        return 0

    def _first_of(self, lane: _Lane) -> int:
        spill = lane.spill
        while spill and self.place[spill[0][2]] != spill[0][1]:
            heapq.heappop(spill)
        if spill and (not lane.head or spill[0][0] < self._key(self._tree, lane.head)):
            return spill[0][2]
        return lane.head

    def nodes(self) -> list[int]:
        """All nodes in the queue, in no order: for checks."""
        found = []
        for lane in self._lanes.values():
            node = lane.head
            while node:
                found.append(node)
                node = self._after[node]
            found += [node for _, ticket, node in lane.spill if self.place[node] == ticket]
        return found
