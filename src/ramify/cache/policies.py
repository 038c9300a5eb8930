"""Eviction policies by name: "auto" adapts to the traffic, the others are fixed rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp2, log2

from ramify.cache.adaptive_policy import HitDensityPolicy
from ramify.cache.eviction_queue import EvictionQueue, Policy, Segment
from ramify.cache.tree import SESSION_ENDED, RadixTree

# pools of pages looked up, after which a use counts half
LFU_HALF_LIFE = 4
# Tokens before a page that double its cost of recomputation: about where attention, which grows with
# them, takes as long as the linear layers of an 8 B model, which do not.
COST_DEPTH = 32768


class Ordered:
    """A rule over columns of the tree: evicts the lowest rank of the lowest segment.

    Args:
        segment: node → segment; None puts all leaves into one.
        rank: node → rank within its segment.
        count: called for each node that a lookup used again.
    """

    def __init__(
        self,
        segment: Callable[[int], int] | None,
        rank: Callable[[int], float],
        count: Callable[[int], None] | None = None,
    ) -> None:
        self._segment_of, self._count = segment, count
        self.rank = rank

    def segment(self, node: int) -> int:
        """See `Policy.segment`."""
        return 0 if self._segment_of is None else self._segment_of(node)

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The leaf of the lowest rank in the lowest segment."""
        return queue.first_of(segments[min(segments)]) if segments else 0

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:  # noqa: ARG002
        """Count the lookups of known nodes, if the rule counts them."""
        if self._count is not None:
            for node in known:
                self._count(node)

    def on_evict(self, node: int) -> None:
        """See `Policy`; changes nothing."""

    def on_forget(self, node: int, num_pages: int) -> None:
        """See `Policy`; changes nothing."""


class Scored:
    """A rule with a score per node, renewed with each use: evicts the lowest score.

    Args:
        rescore: (node, pages looked up, highest score evicted, previous score) → new score.
    """

    def __init__(
        self,
        tree: RadixTree,
        num_pages: int,
        rescore: Callable[[int, int, float, float], float],
    ) -> None:
        self._tree = tree
        self._num_pages = num_pages
        self._rescore = rescore
        self._score = tree.column(0.0, inherited=True)
        self._num_pages_looked_up = 0
        self._floor = 0.0

    def segment(self, node: int) -> int:  # noqa: ARG002
        """See `Policy.segment`: all leaves are in one."""
        return 0

    def rank(self, node: int) -> float:
        """The node's score."""
        return self._score[node]

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The leaf of the lowest score."""
        return queue.first_of(segments[0]) if segments else 0

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """Rescore every node of the path."""
        score = self._score
        self._num_pages_looked_up += min(self._num_pages, num_pages)
        for node in (*known, *new):
            score[node] = self._rescore(node, self._num_pages_looked_up, self._floor, score[node])

    def on_evict(self, node: int) -> None:
        """Raise the floor to the highest score evicted (the inflation of GreedyDual).

        The score of a node whose session has ended is not why it goes.
        """
        if self._tree.session[node] == SESSION_ENDED:
            return
        self._floor = max(self._floor, self._score[node])

    def on_forget(self, node: int, num_pages: int) -> None:
        """See `Policy`; changes nothing."""


def lru(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """Evict the least recently released leaf."""
    return Ordered(None, lambda node: tree.last_access[node])


def fifo(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """Evict the leaf that was computed first."""
    return Ordered(None, lambda node: tree.created_at_lookup[node])


def slru(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """Segmented LRU: evict leaves that were never used again before all others; in both, LRU.

    A lookup of an evicted page that is still a ghost counts as a use.
    """
    uses = tree.column(0, inherited=True)

    def count(node: int) -> None:
        uses[node] = 1

    return Ordered(lambda node: int(uses[node] > 0), lambda node: tree.last_access[node], count)


def priority(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """Evict the lowest priority, then the least recent leaf; see `PrefixCache.set_priority`."""
    return Ordered(None, lambda node: tree.priority[node] * 2**48 + tree.last_access[node])


def lfu(tree: RadixTree, num_pages: int) -> Policy:
    """Evict the least often used leaf; a use counts half after four pools of pages looked up.

    score = log2(sum over uses of 2^(time of use)): ageing changes no order, so that no score has to
    be aged (forward decay; Cormode et al., ICDE 2009). Ghosts keep their score.
    """

    def rescore(_node: int, pages_looked_up: int, _floor: float, before: float) -> float:
        # never 0: that is a node not used yet
        now = 1 + pages_looked_up / (LFU_HALF_LIFE * num_pages)
        return max(before, now) + log2(1 + exp2(-abs(before - now))) if before else now

    return Scored(tree, num_pages, rescore)


def cost(tree: RadixTree, num_pages: int) -> Policy:
    """Evict the leaf that saves the least computation per page (GreedyDual with frequency).

    score = floor + (hits + 1) * (1 + depth / COST_DEPTH): a deep page costs more to recompute, since
    attention reads all tokens before it. Saves work, not tokens: the hit rate may be lower.
    """
    deep = COST_DEPTH / tree.page_size

    def rescore(node: int, _pages_looked_up: int, floor: float, _before: float) -> float:
        middle = tree.start[node] + tree.length[node] / 2
        return floor + (tree.hits[node] + 1) * (1 + middle / deep)

    return Scored(tree, num_pages, rescore)


POLICIES: dict[str, Callable[[RadixTree, int], Policy]] = {
    "auto": HitDensityPolicy,
    "lru": lru,
    "lfu": lfu,
    "slru": slru,
    "fifo": fifo,
    "priority": priority,
    "cost": cost,
}
