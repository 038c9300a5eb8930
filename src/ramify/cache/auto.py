"""The default eviction policy: learns from the traffic which pages bring the most hits for their room.

Nodes are put in classes by how often they were looked up and in which turn of their path they came.
For every class the gaps between uses are counted as they happen, on cached and on remembered pages,
in bins of age. From them follows, for each class and age, the best ratio of the probability of a
hit within some time to the expected time that the page is kept for it, over all times: the Gittins
index of keeping it. The leaf with the lowest index goes. Inside a class only the oldest and the
newest leaf are looked at: hazards fall with age as a rule, and where they do not (loops, scans),
the newest is the one to lose. (Compare LHD: Beckmann, Chen and Cidon, NSDI 2018, and Gittins 1979.)

All constants were chosen on generated workloads and the first quarter of one public trace; the
benchmark of policies has the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log

from ramify.cache.eviction import EvictionQueue, Lane
from ramify.cache.tree import RadixTree

TURNS, LOOKUPS = 3, 8  # classes: turn 0, 1, 2+ of a path x lookups 0, 1, 2, 3-4, 5-8, ... 33+
NUM_CLASSES = TURNS * LOOKUPS
SLOTS = 8  # age is counted in slots of an eighth of the pool's pages looked up
MAX_AGE = 512  # pools of pages looked up; where the last bin ends
SMOOTH, FADE = 3, 0.7  # hazards are smoothed over 3 bins to each side, with weights 0.7 ** distance
OWN = 0.02  # pools of pages that a class must have seen to outweigh the mean of all classes
PRIOR, PRIOR_HAZARD = 0.25, 0.1  # pools of pages of a prior: a tenth in each bin, which is LRU
LIFT = 1.5  # times this for each bucket of lookups beyond the first: a little of SLRU
HALF_LIFE = 64  # pools of pages looked up, for what is learned and for a node's count of lookups
LEARN_EVERY = 16  # requests from one class's new index to the next one's


def _edges() -> list[int]:
    """Ages in slots at which bins begin: half octaves."""
    edges, at = [0], 1.0
    while edges[-1] < MAX_AGE * SLOTS:
        if round(at) > edges[-1]:
            edges.append(round(at))
        at *= 2**0.5
    return edges


EDGES = _edges()
NUM_BINS = len(EDGES) - 1
WIDTHS = [EDGES[b + 1] - EDGES[b] for b in range(NUM_BINS)]
WEIGHTS = [
    [(b + d, FADE ** abs(d)) for d in range(-SMOOTH, SMOOTH + 1) if 0 <= b + d < NUM_BINS]
    for b in range(NUM_BINS)
]


class AutoPolicy:
    """Evicts the leaf with the least expected hits for its room and time.

    Args:
        tree: whose nodes are classed.
        num_pages: of the pool.
    """

    def __init__(self, tree: RadixTree, num_pages: int) -> None:
        self._tree = tree
        self._num_pages = num_pages
        self._slot_pages = max(1, num_pages // SLOTS)
        self._class = tree.column("b", inherited=True)  # 1 + number; 0: not used yet
        self._slot = tree.column("q", inherited=True)  # of the last use
        self._turn = tree.column("b", inherited=True)
        self._count = tree.column("d", inherited=True)  # 1 + uses since the first one, fading
        self._reuses = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES + 1)]  # pages; the last: all
        self._at_risk = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES + 1)]
        self._alive: list[dict[int, int]] = [{} for _ in range(NUM_CLASSES)]  # slot → pages
        self._clock = 0  # pages looked up
        self._now = 0  # slots
        self._gain = 1.0  # what a page counts now; it grows, so that what was counted fades
        self._requests = 0
        self._learned = -1  # the class learned last
        self._version = 0  # of the indices and of `_now`
        self._mean = [0.0] * NUM_BINS
        self._index = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._learn_mean()
        for number in range(NUM_CLASSES):
            self._learn(number)

    # -- the order of leaves ---------------------------------------------------------------

    def lane(self, node: int) -> int:
        """Its class."""
        return max(0, self._class[node] - 1)

    def key(self, node: int) -> float:
        """Recency."""
        return self._tree.last_access[node]

    def choose(self, lanes: dict[int, Lane], queue: EvictionQueue) -> int:
        """The oldest or newest leaf of a class, whichever has the least index."""
        version, least, found = self._version, float("inf"), 0
        for number, lane in lanes.items():
            if lane.version != version:
                lane.version = version
                index, oldest, newest = self._index[number], queue.first_of(lane), lane.tail
                lane.best, lane.score = oldest, index[self._bin(self._slot[oldest])]
                if newest and newest != oldest:
                    score = index[self._bin(self._slot[newest])]
                    if score < lane.score:
                        lane.best, lane.score = newest, score
            if lane.score < least or (
                lane.score == least
                and self._tree.last_access[lane.best] < self._tree.last_access[found]
            ):
                least, found = lane.score, lane.best
        return found

    def _bin(self, slot: int) -> int:
        age = self._now - slot
        return bisect_right(EDGES, age, 0, NUM_BINS) - 1

    # -- what happens to nodes -------------------------------------------------------------

    def used(self, new: Sequence[int], known: Sequence[int], num_pages: int) -> None:
        """A request of `num_pages` pages has ended: count the gaps, and class its nodes anew."""
        self._clock += min(num_pages, self._num_pages)
        now = self._clock // self._slot_pages
        while self._now < now:
            self._now += 1
            self._begin_slot()
        self._requests += 1
        if self._requests % LEARN_EVERY == 0:
            self._learn_next()
        tree, classes, gain = self._tree, self._class, self._gain
        total_reuses, slots, half_life = self._reuses[-1], self._slot, HALF_LIFE * SLOTS
        for node in known:
            number = classes[node] - 1
            if number < 0:  # its first user is not done yet
                self._count[node] = 1
                self._enter(node, 0)
                continue
            slot, weight = slots[node], gain * tree.length[node]
            bin_ = self._bin(slot)
            self._reuses[number][bin_] += weight
            total_reuses[bin_] += weight
            self._leave(number, slot, tree.length[node])
            self._count[node] = times = 1 + self._count[node] * 0.5 ** (
                (self._now - slot) / half_life
            )
            self._enter(node, max(1, int(times - 0.5)))
        turn = min(self._turn[known[-1]] + 1, TURNS - 1) if known else 0
        for node in new:
            self._turn[node] = turn
            self._count[node] = 1
            self._enter(node, 0)

    def evicted(self, node: int) -> None:
        """It is remembered, and goes on being counted."""

    def forgotten(self, node: int, num_pages: int) -> None:
        """Whether these pages would have been used again will not be known."""
        if self._class[node]:
            self._leave(self._class[node] - 1, self._slot[node], num_pages)

    def _enter(self, node: int, times: int) -> None:
        bucket = times if times <= 2 else min(1 + (times - 1).bit_length(), LOOKUPS - 1)
        number, now, pages = self._turn[node] * LOOKUPS + bucket, self._now, self._tree.length[node]
        self._class[node] = number + 1
        self._slot[node] = now
        alive = self._alive[number]
        alive[now] = alive.get(now, 0) + pages
        weight = self._gain * pages
        self._at_risk[number][0] += weight
        self._at_risk[-1][0] += weight

    def _leave(self, number: int, slot: int, pages: int) -> None:
        alive = self._alive[number]
        left = alive[slot] - pages
        if left:
            alive[slot] = left
        else:
            del alive[slot]

    def _begin_slot(self) -> None:
        """A slot has passed: pages whose age comes to the beginning of a bin are at risk in it."""
        self._version += 1
        self._gain *= 2 ** (1 / (HALF_LIFE * SLOTS))
        if self._gain > 1e9:
            for row in (*self._reuses, *self._at_risk):
                row[:] = [each / self._gain for each in row]
            self._gain = 1.0
        total = self._at_risk[-1]
        for number, alive in enumerate(self._alive):
            if alive:
                at_risk = self._at_risk[number]
                for bin_ in range(1, NUM_BINS):
                    pages = alive.get(self._now - EDGES[bin_])
                    if pages:
                        at_risk[bin_] += self._gain * pages
                        total[bin_] += self._gain * pages

    # -- learning --------------------------------------------------------------------------

    def _learn_next(self) -> None:
        """Renew the index of the next class in use; before the first one, the mean of all."""
        number = self._learned + 1
        while number < NUM_CLASSES and not self._alive[number]:
            number += 1
        if number < NUM_CLASSES:
            self._learn(number)
            self._learned = number
        else:
            self._learn_mean()
            self._learned = -1

    def _smoothed(self, number: int) -> tuple[list[float], list[float]]:
        """Reuses in each bin, and page-slots in which they could have been; smoothed."""
        reuses, exposures = self._reuses[number], []
        for width, each, reused in zip(WIDTHS, self._at_risk[number], reuses, strict=True):
            exposures.append(width * (each - 0.5 * reused))  # reused half-way, on the average
        return (
            [sum([reuses[b] * weight for b, weight in row]) for row in WEIGHTS],
            [sum([exposures[b] * weight for b, weight in row]) for row in WEIGHTS],
        )

    def _learn_mean(self) -> None:
        """The rate of reuse by age over all classes: what a class with little data looks like."""
        reuses, exposures = self._smoothed(-1)
        weight = PRIOR * self._num_pages * self._gain
        prior = -log(1 - PRIOR_HAZARD)
        self._mean = [
            (reused + weight * prior) / (exposed + weight * width)
            for reused, exposed, width in zip(reuses, exposures, WIDTHS, strict=True)
        ]

    def _learn(self, number: int) -> None:
        """A class's index by age: the best ratio of probable hits to expected time kept.

        Cost: O(bins²), about 50 µs.
        """
        reuses, exposures = self._smoothed(number)
        own = OWN * self._num_pages * self._gain
        lift = LIFT ** (number % LOOKUPS - 1)
        hazards = []
        for b, width in enumerate(WIDTHS):
            weight = own * width
            rate = (reuses[b] + weight * lift * self._mean[b]) / (exposures[b] + weight)
            hazards.append(1 - exp(-rate * width))
        index = self._index[number]
        for b in range(NUM_BINS):
            stays, kept, hits, best = 1.0, 0.0, 0.0, 0.0
            for later in range(b, NUM_BINS):
                hit = stays * hazards[later]
                hits += hit
                kept += (stays - 0.5 * hit) * WIDTHS[later]
                stays -= hit
                if hits > best * kept:
                    best = hits / kept
            index[b] = best
        self._version += 1
