"""The default eviction policy: evicts the pages of the lowest hit density, learned from the traffic.

Nodes are classed by number of lookups and by the turn of their path in which they appeared. Per class,
the gaps between uses are counted in bins of age, on cached pages and on ghosts. From the counts
follows, for each class and age, the Gittins index of keeping a page: the best ratio, over all times,
of the probability of a hit within that time to the expected time that the page is kept for it. The
leaf of the lowest index is evicted. Within a class only the oldest and the newest leaf are compared:
hazards fall with age as a rule; where they rise (loops, scans), the newest leaf is the one to lose.
Compare LHD (Beckmann, Chen and Cidon, NSDI 2018) and Gittins (1979).

All constants were chosen on generated workloads and the first quarter of one public trace; the
benchmark of policies runs the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log
from typing import Final

from ramify.cache.eviction_queue import EvictionQueue, Segment
from ramify.cache.tree import RadixTree

TURN_CLASSES: Final = 3  # classes: turn 0, 1, 2+ of a path, times ...
LOOKUP_CLASSES: Final = 8  # ... lookups 0, 1, 2, 3-4, 5-8, ... 33+
NUM_CLASSES: Final = TURN_CLASSES * LOOKUP_CLASSES
AGE_STEPS_PER_POOL: Final = 8  # an age step is an eighth of the pool's pages looked up
MAX_AGE: Final = 512  # pools of pages looked up: the end of the last bin
NEAR: Final = 0.7  # weights that smooth hazards over 3 bins each way
NEXT: Final = 0.7**2
FAR: Final = 0.7**3
# pools of pages that a class must have seen to outweigh the mean of all classes
CLASS_WEIGHT: Final = 0.02
# weight of the prior in pools of pages, and its hazard in each bin; alone it is LRU
PRIOR: Final = 0.25
PRIOR_HAZARD: Final = 0.1
# factor for each bucket of lookups beyond the first: a little of SLRU
FREQUENCY_BOOST: Final = 1.5
# pools of pages looked up: half-life of the counts, and of a node's number of lookups
HALF_LIFE: Final = 64
LEARN_EVERY: Final = 16  # requests between the renewal of two classes' indices

NEVER: Final = float("inf")  # the score of a class without leaves


def _edges() -> list[int]:
    """Ages, in age steps, at which bins start: half octaves."""
    edges, edge = [0], 1.0
    while edges[-1] < MAX_AGE * AGE_STEPS_PER_POOL:
        if round(edge) > edges[-1]:
            edges.append(round(edge))
        edge *= 2**0.5
    return edges


EDGES: Final = _edges()
NUM_BINS: Final = len(EDGES) - 1
BIN_AT_EDGE: Final = {EDGES[b]: b for b in range(1, NUM_BINS)}
WIDTHS: Final = [EDGES[b + 1] - EDGES[b] for b in range(NUM_BINS)]
# by age in age steps
BIN_OF: Final = [bisect_right(EDGES, age, 0, NUM_BINS) - 1 for age in range(EDGES[-1])]
DECAY: Final = [0.5 ** (age / (HALF_LIFE * AGE_STEPS_PER_POOL)) for age in range(EDGES[-1])]
OLDEST: Final = EDGES[-1] - 1
# by uses after the first
LOOKUP_CLASS_OF: Final = [
    min(max(1, n if n <= 2 else 1 + (n - 1).bit_length()), LOOKUP_CLASSES - 1) for n in range(64)
]


def _smooth(bins: list[float]) -> list[float]:
    """Add to each bin its three neighbours on either side, with weights NEAR, NEXT, FAR."""
    p = [0.0, 0.0, 0.0, *bins, 0.0, 0.0, 0.0]
    sevens = zip(p, p[1:], p[2:], p[3:], p[4:], p[5:], p[6:], strict=False)
    return [
        here + NEAR * (c + d) + NEXT * (b + e) + FAR * (a + f) for a, b, c, here, d, e, f in sevens
    ]


class HitDensityPolicy:
    """Evicts the leaf of the fewest expected hits per page and time."""

    def __init__(self, tree: RadixTree, num_pages: int) -> None:
        self._tree = tree
        self._num_pages = num_pages
        self._pages_per_age_step = max(1, num_pages // AGE_STEPS_PER_POOL)
        self._state = tree.column(0, inherited=True)  # age step of the last use * 32 + 1 + class
        self._count = tree.column(0.0, inherited=True)  # 1 + uses after the first, decayed
        self._reuses = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]  # pages, by age
        # pages that reached this age
        self._at_risk = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._alive: list[dict[int, int]] = [{} for _ in range(NUM_CLASSES)]  # age step → pages
        self._num_pages_looked_up = 0
        self._age_step = 0
        self._gain = 1.0  # weight of a page now; it grows, so that older counts decay
        self._requests = 0
        self._has_evicted = False  # since the last index was learned
        self._learned = -1  # the class learned last
        self._scores = [NEVER] * NUM_CLASSES  # index of each class's next victim
        self._best = [0] * NUM_CLASSES  # each class's next victim
        self._outdated = set[int]()  # classes whose victim must be chosen again
        self._mean = [0.0] * NUM_BINS
        self._index = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._learn_mean()
        for number in range(NUM_CLASSES):
            self._learn(number)

    # -- the order of leaves ---------------------------------------------------------------

    def segment(self, node: int) -> int:
        """The class of a leaf."""
        return max(1, self._state[node] & 31) - 1

    def rank(self, node: int) -> float:
        """Number of the last access."""
        return self._tree.last_access[node]

    def victim(self, segments: dict[int, Segment], queue: EvictionQueue) -> int:
        """The leaf of the lowest index, among the oldest and the newest leaf of each class."""
        changed, scores, best = queue.changed, self._scores, self._best
        if self._outdated:
            changed |= self._outdated
            self._outdated.clear()
        if changed:
            state, now = self._state, self._age_step
            for number in changed:
                segment = segments.get(number)
                if segment is None:
                    scores[number], best[number] = NEVER, 0
                    continue
                oldest, newest = segment.head, segment.tail
                if segment.num_unordered:
                    oldest = queue.first_of(segment)
                index = self._index[number]
                age = now - (state[oldest] >> 5)
                score = index[BIN_OF[age] if age < OLDEST else -1]
                if newest != oldest and newest:
                    age = now - (state[newest] >> 5)
                    other = index[BIN_OF[age] if age < OLDEST else -1]
                    if other < score:
                        oldest, score = newest, other
                scores[number], best[number] = score, oldest
            changed.clear()
        least = min(scores)
        if scores.count(least) == 1:
            return best[scores.index(least)]
        equal = [node for node, score in zip(best, scores, strict=True) if score == least]
        return min(equal, key=self._tree.last_access.__getitem__)

    # -- what happens to nodes -------------------------------------------------------------

    def on_release(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """Count the gaps since the last use of a request's nodes, and class the nodes again."""
        self._num_pages_looked_up += min(self._num_pages, num_pages)
        now = self._num_pages_looked_up // self._pages_per_age_step
        while self._age_step < now:
            self._age_step += 1
            self._begin_age_step()
        self._requests += 1
        if self._requests % LEARN_EVERY == 0 and self._has_evicted:
            self._learn_next()
            self._has_evicted = False
        length, count, turn = self._tree.length, self._count, 0
        if known:
            turn = self._count_reuses(known)
        for node in new:
            count[node] = 1
            self._count_in(node, turn * LOOKUP_CLASSES, length[node])

    def _count_reuses(self, known: Sequence[int]) -> int:
        """Count the gaps on a path of known nodes; returns the turn that comes next."""
        length, state, count, alive = self._tree.length, self._state, self._count, self._alive
        reuses, at_risk, gain, now = self._reuses, self._at_risk, self._gain, self._age_step
        turn = 0
        for node in known:
            before, pages = state[node], length[node]
            if not before:  # its first user is still running
                count[node] = 1
                self._count_in(node, turn * LOOKUP_CLASSES, pages)
                continue
            age_step, number = before >> 5, (before & 31) - 1
            age = now - age_step
            age = min(age, OLDEST)
            reuses[number][BIN_OF[age]] += gain * pages
            self._count_out(number, age_step, pages)
            count[node] = times = 1 + count[node] * DECAY[age]
            turn = number // LOOKUP_CLASSES
            number = turn * LOOKUP_CLASSES + (
                LOOKUP_CLASS_OF[int(times - 0.5)] if times < 64 else LOOKUP_CLASSES - 1
            )
            state[node] = now << 5 | number + 1
            pages_by_step = alive[number]
            pages_by_step[now] = pages_by_step.get(now, 0) + pages
            at_risk[number][0] += gain * pages
            if turn < TURN_CLASSES - 1:
                turn += 1
        return turn

    def on_evict(self, node: int) -> None:  # noqa: ARG002
        """Keep counting: the node is a ghost now."""
        self._has_evicted = True

    def on_forget(self, node: int, num_pages: int) -> None:
        """Stop counting: a later use of these pages cannot be seen."""
        if state := self._state[node]:
            self._count_out((state & 31) - 1, state >> 5, num_pages)

    def _count_in(self, node: int, number: int, pages: int) -> None:
        now, alive = self._age_step, self._alive[number]
        self._state[node] = now << 5 | number + 1
        alive[now] = alive.get(now, 0) + pages
        self._at_risk[number][0] += self._gain * pages

    def _count_out(self, number: int, age_step: int, pages: int) -> None:
        alive = self._alive[number]
        # After an interrupted call, fewer pages may be counted than there are.
        left = alive.get(age_step, 0) - pages
        if left > 0:
            alive[age_step] = left
        else:
            alive.pop(age_step, None)

    def _begin_age_step(self) -> None:
        """Start an age step: count the pages that reach the start of a bin as at risk in it."""
        self._outdated.update(range(NUM_CLASSES))
        self._gain *= 2 ** (1 / (HALF_LIFE * AGE_STEPS_PER_POOL))
        if self._gain > 1e9:
            for row in (*self._reuses, *self._at_risk):
                row[:] = [count / self._gain for count in row]
            self._gain = 1.0
        now = self._age_step
        begins = {now - edge for edge in BIN_AT_EDGE}
        for number, alive in enumerate(self._alive):
            if alive:
                at_risk = self._at_risk[number]
                for step in begins & alive.keys():  # iterates over the smaller set
                    at_risk[BIN_AT_EDGE[now - step]] += self._gain * alive[step]

    # -- learning --------------------------------------------------------------------------

    def _learn_next(self) -> None:
        """Learn the index of the next class in use; after the last class, the mean of all."""
        number = self._learned + 1
        while number < NUM_CLASSES and not self._alive[number]:
            number += 1
        if number < NUM_CLASSES:
            self._learn(number)
            self._learned = number
        else:
            self._learn_mean()
            self._learned = -1

    @staticmethod
    def _smoothed_counts(
        reuses: list[float], at_risk: list[float]
    ) -> tuple[list[float], list[float]]:
        """(reuses, pages × age steps at risk) per bin, smoothed."""
        exposures = []
        for width, count, reused in zip(WIDTHS, at_risk, reuses, strict=True):
            # A reuse happens half-way through its bin on average. Pages older than the last bin were
            # never at risk in it.
            exposures.append(width * max(count - 0.5 * reused, 0.5 * reused))
        return _smooth(reuses), _smooth(exposures)

    def _learn_mean(self) -> None:
        """Learn the rate of reuse by age over all classes, the prior of a class with little data."""
        reuses, exposures = self._smoothed_counts(
            [sum(bins) for bins in zip(*self._reuses, strict=True)],
            [sum(bins) for bins in zip(*self._at_risk, strict=True)],
        )
        weight = PRIOR * self._num_pages * self._gain
        prior = -log(1 - PRIOR_HAZARD)
        self._mean = [
            (reused + weight * prior) / (exposed + weight * width)
            for reused, exposed, width in zip(reuses, exposures, WIDTHS, strict=True)
        ]

    def _learn(self, number: int) -> None:
        """Learn a class's index by age: the best ratio of hit probability to expected time kept.

        Goes from the oldest bin down and joins each bin with the stretches ahead of it while that
        raises the ratio: O(bins), since every stretch is joined once.
        """
        reuses, exposures = self._smoothed_counts(self._reuses[number], self._at_risk[number])
        own = CLASS_WEIGHT * self._num_pages * self._gain
        lift = FREQUENCY_BOOST ** (number % LOOKUP_CLASSES - 1)
        hazards = []
        for b, width in enumerate(WIDTHS):
            weight = own * width
            rate = (reuses[b] + weight * lift * self._mean[b]) / (exposures[b] + weight)
            hazards.append(1 - exp(-rate * width))
        index, ahead = self._index[number], list[tuple[float, float, float]]()
        for b in reversed(range(NUM_BINS)):
            stays = 1 - hazards[b]
            hits, kept = hazards[b], (1 - 0.5 * hazards[b]) * WIDTHS[b]
            while ahead and ahead[-1][0] * kept > hits * ahead[-1][1]:  # keeping it longer pays
                more_hits, more_kept, stay_on = ahead.pop()
                hits, kept, stays = (
                    hits + stays * more_hits,
                    kept + stays * more_kept,
                    stays * stay_on,
                )
            ahead.append((hits, kept, stays))
            index[b] = hits / kept
        self._outdated.add(number)
