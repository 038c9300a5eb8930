"""A cache of finite capacity: which pages of earlier prompts LRU still keeps.

Each request refreshes its pages from the leaf to the root, as vLLM, SGLang and Ramify do, so that what
is kept is closed under prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

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
        # When each page can be read, and its size; the least recently used first.
        self._pages: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def use(self, keys: Tokens, page_size: int, num_lookup: int, timing: Timing) -> Resident:
        """Look pages up, then store and refresh all and evict what no longer fits.

        Args:
            keys: [pages] hashes of the prefixes that end with each full page.
            num_lookup: pages of the prompt; the others are those of its answer.
        """
        path = keys.tolist()
        resident = [self._pages[key] for key in takewhile(self._pages.__contains__, path)]
        ready = takewhile(lambda page: timing.is_ready(page[0]), resident[:num_lookup])
        num_ready = sum(1 for _ in ready)
        for at in range(len(path) - 1, -1, -1):
            ready_s = timing.ready_s if at < num_lookup else timing.done_s
            if at < len(resident):
                ready_s = min(ready_s, resident[at][0])
            else:
                self._num_tokens += page_size
            self._pages[path[at]] = ready_s, page_size
            self._pages.move_to_end(path[at])
        while self._num_tokens > self._capacity:
            _, (_, evicted) = self._pages.popitem(last=False)
            self._num_tokens -= evicted
        return Resident(page_size, min(len(resident), num_lookup), num_ready)


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
