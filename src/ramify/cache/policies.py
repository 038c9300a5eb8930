"""Eviction policies by name. All but "auto" are fixed rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp2, log2

from ramify.cache.adaptive_policy import HitDensityPolicy
from ramify.cache.eviction_queue import EvictionQueue, Policy, Segment
from ramify.cache.tree import RadixTree

LFU_HALF_LIFE = 4  # pools of pages looked up, after which a use counts half
COST_DEPTH = 32768  # tokens before a page that double its cost: about where attention, which grows
# with them, takes as long as the linear layers of an 8 B model, which do not


class Ordered:
    """A rule that reads the tree: the lowest of a few lanes goes first, in it the lowest key."""

    def __init__(
        self,
        segment: Callable[[int], int] | None,
        rank: Callable[[int], float],
        count: Callable[[int], None] | None = None,
    ) -> None:
        self._segment_of, self._count = segment, count
        self.rank = rank

    def segment(self, node: int) -> int:
        """One lane for all, unless the rule has several."""
        return 0 if self._segment_of is None else self._segment_of(node)

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The first leaf of the lowest lane."""
        return queue.first_of(segments[min(segments)]) if segments else 0

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:  # noqa: ARG002
        """Count the lookups of what was known, for a rule that wants them."""
        if self._count is not None:
            for node in known:
                self._count(node)

    def on_evict(self, node: int) -> None:
        """Nothing to learn."""

    def on_forget(self, node: int, num_pages: int) -> None:
        """Nothing to learn."""


class Scored:
    """A rule that keeps a score by node, renewed with each use: the lowest goes first.

    Args:
        tree: whose nodes are scored.
        num_pages: of the pool.
        rescore: (node, pages looked up so far, highest score evicted so far, score before) → score.
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
        """One lane for all."""
        return 0

    def rank(self, node: int) -> float:
        """The score."""
        return self._score[node]

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The lowest score."""
        return queue.first_of(segments[0]) if segments else 0

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """Give every node of the path a new score."""
        score = self._score
        self._num_pages_looked_up += min(self._num_pages, num_pages)
        for node in (*known, *new):
            score[node] = self._rescore(node, self._num_pages_looked_up, self._floor, score[node])

    def on_evict(self, node: int) -> None:
        """Remember how high the scores are that go."""
        self._floor = max(self._floor, self._score[node])

    def on_forget(self, node: int, num_pages: int) -> None:
        """Nothing to learn."""


def lru(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """The least recently released goes first."""
    return Ordered(None, lambda node: tree.last_access[node])


def fifo(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """What was computed first goes first."""
    return Ordered(None, lambda node: tree.created_at_lookup[node])


def slru(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """What was never looked up again goes first, then the rest; in both, the least recent.

    A lookup counts, too, if what it wanted had been evicted and is remembered.
    """
    uses = tree.column(0, inherited=True)

    def count(node: int) -> None:
        uses[node] = 1

    return Ordered(lambda node: int(uses[node] > 0), lambda node: tree.last_access[node], count)


def priority(tree: RadixTree, num_pages: int) -> Policy:  # noqa: ARG001
    """The lowest priority goes first, in it the least recent; see `PrefixCache.set_priority`."""
    return Ordered(None, lambda node: tree.priority[node] * 2**48 + tree.last_access[node])


def lfu(tree: RadixTree, num_pages: int) -> Policy:
    """The least often used goes first; a use counts half after four pools of pages looked up.

    The score is the logarithm of a sum of 2^(time of use), so that ageing changes no order and
    nothing has to be aged (forward decay; Cormode et al., ICDE 2009). Ghosts keep theirs.
    """

    def rescore(_node: int, clock: int, _floor: float, before: float) -> float:
        now = 1 + clock / (LFU_HALF_LIFE * num_pages)  # never 0, which is a node not used yet
        return max(before, now) + log2(1 + exp2(-abs(before - now))) if before else now

    return Scored(tree, num_pages, rescore)


def cost(tree: RadixTree, num_pages: int) -> Policy:
    """What saves the least computation per page goes first (GreedyDual with frequency).

    A page costs the more to recompute the more tokens lie before it, since attention reads them.
    It saves computed work, not tokens: its hit rate may be lower.
    """
    deep = COST_DEPTH / tree.page_size

    def rescore(node: int, _clock: int, floor: float, _before: float) -> float:
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
