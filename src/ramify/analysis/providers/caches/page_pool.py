"""A cache of finite capacity: which pages of earlier prompts LRU still keeps.

Each request refreshes its pages from the leaf to the root, as vLLM, SGLang and Ramify do, so that what
is kept is closed under prefixes. The pages that a request used last are then one range at the deep end
of its path: later requests took those before it, eviction takes those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.prefix_table import PrefixTable, Slots
from ramify.analysis.providers.prompts import Timing
from ramify.analysis.records import LoggedRequest
from ramify.analysis.tokens import Tokens

MIN_PAGE = 16  # tokens; engines with smaller pages are counted in pages of this size


@dataclass(frozen=True, slots=True)
class Resident:
    """Leading pages of a prompt that are kept when it is looked up."""

    page_size: int
    num_kept: int
    num_ready: int  # of those, written by requests that have begun to answer

    def clip(self, num_shared: int) -> int:
        """Tokens of a shared prefix that can be read."""
        return self._clip(num_shared, self.num_ready)

    def clip_if_ready(self, num_shared: int) -> int:
        """The same if pages of requests in flight could be read."""
        return self._clip(num_shared, self.num_kept)

    def _clip(self, num_shared: int, num_pages: int) -> int:
        is_cut = num_pages < num_shared // self.page_size
        return num_pages * self.page_size if is_cut else num_shared


class PagePool:
    """The pages of one cache; prompts come in the order of their starts.

    Args:
        capacity_tokens: at least 1.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity, self._num_tokens = capacity_tokens, 0
        self._table = PrefixTable()  # `writer`: the last user of a page
        # Of each user, the pages that it used last: [start, end) of its path.
        self._start: list[int] = []
        self._end: list[int] = []
        self._page_size: list[int] = []
        self._oldest = 0

    def use(self, keys: Tokens, page_size: int, num_lookup: int, timing: Timing) -> Resident:
        """Look pages up, then store and refresh all and evict what no longer fits.

        Args:
            keys: [pages] hashes of the prefixes that end with each full page.
            num_lookup: pages of the prompt; the others are those of its answer.
        """
        table = self._table
        slots = table.find(keys)
        is_new = slots < 0
        num_known = len(keys) if not is_new.any() else int(is_new.argmax())
        runs = self._runs(slots[:num_known])
        num_kept = self._num_kept(runs)
        ready_s = np.full(len(keys), timing.ready_s)
        ready_s[num_lookup:] = timing.done_s
        kept = slots[:num_kept]
        num_ready = _num_leading(table.ready_s[kept[:num_lookup]], timing)
        ready_s[:num_kept] = np.minimum(ready_s[:num_kept], table.ready_s[kept])
        self._take_over(runs)
        if is_new.any():
            table.insert(keys[is_new])
            slots = table.find(keys)  # an insertion may move the others
        table.writer[slots], table.ready_s[slots] = len(self._start), ready_s
        self._start.append(0)
        self._end.append(len(keys))
        self._page_size.append(page_size)
        self._num_tokens += len(keys) * page_size
        self._evict()
        return Resident(page_size, min(num_kept, num_lookup), num_ready)

    def _runs(self, slots: Slots) -> list[tuple[int, int, int]]:
        """(user, first page, page after the last) of neighbouring pages with one last user."""
        users = self._table.writer[slots]
        edges = [0, *(np.flatnonzero(users[1:] != users[:-1]) + 1).tolist(), len(users)]
        return [
            (int(users[first]), first, after) for first, after in pairwise(edges) if after > first
        ]

    def _num_kept(self, runs: list[tuple[int, int, int]]) -> int:
        num_kept = 0
        for user, first, after in runs:
            num_kept = max(first, min(after, self._end[user]))
            if num_kept < after:
                break
        return num_kept

    def _take_over(self, runs: list[tuple[int, int, int]]) -> None:
        """Pages that another request uses now are no longer those of their last user."""
        for user, _, after in runs:
            before = max(0, self._end[user] - self._start[user])
            self._start[user] = max(self._start[user], after)
            left = max(0, self._end[user] - self._start[user])
            self._num_tokens -= (before - left) * self._page_size[user]

    def _evict(self) -> None:
        """The deepest pages of the least recent request first."""
        while self._num_tokens > self._capacity:
            user, page_size = self._oldest, self._page_size[self._oldest]
            num_pages = self._end[user] - self._start[user]
            if num_pages <= 0:
                self._oldest += 1
                continue
            over = -(-(self._num_tokens - self._capacity) // page_size)
            num_evicted = min(over, num_pages)
            self._end[user] -= num_evicted
            self._num_tokens -= num_evicted * page_size


class ReplicaPools:
    """A pool for each replica that the log names; all requests without one share a pool.

    Args:
        capacity_tokens: of each replica.
        num_merged: replicas whose pools are one, as under routing by prefix; 0: each has its own.
    """

    def __init__(self, capacity_tokens: int, num_merged: int = 0) -> None:
        self._capacity, self._num_merged = capacity_tokens, num_merged
        self._pools: dict[str | None, PagePool] = {}

    def pool_of(self, info: LoggedRequest) -> PagePool:
        """The pool of the replica that answered."""
        name = None if self._num_merged else info.replica
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = PagePool(self._capacity * max(1, self._num_merged))
        return pool


def _num_leading(ready_s: NDArray[np.float64], timing: Timing) -> int:
    """Pages before the first that is not ready."""
    if timing.lookup_s is None:
        return len(ready_s)
    is_late = ready_s > timing.lookup_s
    return int(is_late.argmax()) if is_late.any() else len(ready_s)
