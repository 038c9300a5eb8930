"""LRU at every capacity in one pass: Mattson's stack distances over runs of pages.

Each request refreshes its pages from the leaf to the root, so that the root is newest. Then an
ancestor is always newer than its descendants: what LRU keeps is closed under prefixes, and evicting
the least recent leaf is plain LRU. The pages that a request used last are the deep end of its path,
for later requests took the rest from the root on. So the stack is a list of requests with counts, and
a Fenwick tree over requests answers for a whole run of pages at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.curves.reuse import ReuseRuns


@dataclass(frozen=True, slots=True, eq=False)
class LruCurve:
    """Tokens that LRU hits, by capacity."""

    page_size: int
    total_tokens: int
    hit_pages: NDArray[np.int64]  # [largest distance + 1], by capacity in pages

    def hit_rate(self, capacity_tokens: int) -> float:
        """Share of all input tokens that a cache of this capacity hits."""
        num_pages = min(capacity_tokens // self.page_size, len(self.hit_pages) - 1)
        return _share(int(self.hit_pages[num_pages]) * self.page_size, self.total_tokens)

    @property
    def infinite(self) -> float:
        """Hit rate of a cache that evicts nothing."""
        return _share(int(self.hit_pages[-1]) * self.page_size, self.total_tokens)

    @property
    def saturation_tokens(self) -> int:
        """The smallest capacity whose hit rate is `infinite`; 0 if nothing is hit."""
        return (len(self.hit_pages) - 1) * self.page_size

    def points(self, num_points: int = 64) -> list[tuple[int, float]]:
        """(capacity in tokens, hit rate) at capacities spaced by equal factors, for a chart."""
        most = len(self.hit_pages) - 1
        sizes = np.unique(np.geomspace(1, max(most, 1), num_points).astype(np.int64))
        return [
            (int(size) * self.page_size, self.hit_rate(int(size) * self.page_size))
            for size in sizes
        ]


def lru_curve(reuse: ReuseRuns, *, first_counted: int = 0) -> LruCurve:
    """LRU's hits at every capacity.

    Args:
        first_counted: requests before this number fill the cache and are not counted.
    """
    newer = newer_pages(reuse)
    counted = reuse.is_hit & (reuse.request >= first_counted)
    start, length = newer[counted] + 1, reuse.num_pages[counted]
    largest = int((start + length).max()) if len(start) else 1
    edges = np.zeros(largest + 1, np.int64)
    np.add.at(edges, start, 1)
    np.add.at(edges, start + length, -1)
    trace = reuse.trace
    return LruCurve(
        page_size=trace.page_size,
        total_tokens=int(trace.num_tokens[first_counted:].sum()),
        hit_pages=np.cumsum(np.cumsum(edges))[:largest],
    )


def newer_pages(reuse: ReuseRuns) -> NDArray[np.int64]:
    """[runs]: pages used more recently than a run's first page; -1 for a first use.

    Page i of the run has the stack distance `newer + 1 + i`.
    """
    num_requests = len(reuse.trace)
    tree = [0] * (num_requests + 1)  # Fenwick tree of live pages by last user
    total = 0
    newer = np.full(len(reuse.request), -1, np.int64)
    begin = 0
    requests, users = reuse.request.tolist(), reuse.last_user.tolist()
    lengths = reuse.num_pages.tolist()
    num_runs = len(requests)
    while begin < num_runs:
        request = requests[begin]
        end, num_pages = begin, 0
        # The lookup comes first: distances are those before this request refreshes anything.
        while end < num_runs and requests[end] == request:
            user = users[end]
            if user >= 0:
                older, at = 0, user + 1
                while at:
                    older += tree[at]
                    at &= at - 1
                # of the same user, an earlier run was nearer to the root
                newer[end] = total - older
                if end > begin and users[end - 1] == user:
                    newer[end] = newer[end - 1] + lengths[end - 1]
            end += 1
        for run in range(begin, end):
            length, user = lengths[run], users[run]
            num_pages += length
            if user >= 0:
                total -= length
                at = user + 1
                while at <= num_requests:
                    tree[at] -= length
                    at += at & -at
        total += num_pages
        at = request + 1
        while at <= num_requests:
            tree[at] += num_pages
            at += at & -at
        begin = end
    return newer


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
