"""What a cache of stated capacity saves on the requests of a tree, by a stated cost."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.sharing.request_tree import RequestTree
from ramify.analysis.simulation.curves.reuse import FIRST_USE, ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import newer_pages
from ramify.analysis.simulation.page_trace import PageTrace


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Cost of prefill in units of a token's linear layers.

    A token at position p costs `1 + p / attention_tokens`: attention reads all tokens before it.
    """

    attention_tokens: float = float("inf")  # tokens before a token that double its cost

    def of(self, num_cached: NDArray[np.int64], num_new: NDArray[np.int64]) -> float:
        """Cost of computing `num_new` tokens after `num_cached`, summed over requests."""
        new = num_new.astype(np.float64)
        read = new * (num_cached + new / 2)
        return float((new + read / self.attention_tokens).sum())


@dataclass(frozen=True, slots=True)
class CacheSaving:
    """Tokens and cost with a cache, beside those without."""

    capacity_tokens: int | None  # None: nothing is evicted
    total_tokens: int
    computed_tokens: int
    speedup: float  # cost without a cache over cost with it; tokens over tokens by default

    @property
    def hit_rate(self) -> float:
        """Share of all tokens that are hits."""
        return 1 - self.computed_tokens / self.total_tokens if self.total_tokens else 0.0


def measure_saving(
    tree: RequestTree, capacity_tokens: int | None, cost: PrefillCost
) -> CacheSaving:
    """Serve the tree's requests in order of insertion by an LRU cache of whole blocks."""
    reuse = reuse_of(tree)
    capacity = None if capacity_tokens is None else capacity_tokens // tree.block_size
    num_hit = hits_by_request(reuse, capacity) * tree.block_size
    num_tokens = reuse.trace.num_tokens
    before = cost.of(np.zeros_like(num_tokens), num_tokens)
    after = cost.of(num_hit, num_tokens - num_hit)
    return CacheSaving(
        capacity_tokens=capacity_tokens,
        total_tokens=int(num_tokens.sum()),
        computed_tokens=int((num_tokens - num_hit).sum()),
        speedup=before / after if after else 1.0,
    )


def reuse_of(tree: RequestTree) -> ReuseRuns:
    """For each request the runs of blocks that the same earlier request used last."""
    last_user: dict[int, int] = {}
    requests, users, lengths = array("i"), array("i"), array("i")
    num_tokens, num_blocks = array("q"), array("q")
    for request, (path, tokens) in enumerate(tree.paths()):
        first = len(users)
        for node, length in path:
            user = last_user.get(node, FIRST_USE)
            if len(users) > first and users[-1] == user:
                lengths[-1] += length
            else:
                requests.append(request)
                users.append(user)
                lengths.append(length)
            last_user[node] = request
        num_tokens.append(tokens)
        num_blocks.append(sum(lengths[first:]))
    trace = PageTrace(
        page_size=tree.block_size,
        num_ids=0,
        page_ids=np.zeros(0, np.int32),
        offsets=np.concatenate([[0], np.cumsum(num_blocks, dtype=np.int64)]),
        num_lookup_pages=np.array(num_blocks, np.int32),
        num_tokens=np.array(num_tokens, np.int64),
        num_output=np.full(len(num_tokens), -1, np.int64),
        start_s=np.full(len(num_tokens), np.nan),
        session=np.full(len(num_tokens), -1, np.int32),
    )
    return ReuseRuns(
        trace,
        np.array(requests, np.int32),
        np.array(users, np.int32),
        np.array(lengths, np.int32),
        np.ones(len(users), np.bool_),
    )


def hits_by_request(reuse: ReuseRuns, capacity: int | None) -> NDArray[np.int64]:
    """[requests]: pages that LRU hits with a capacity in pages; None: without eviction."""
    is_hit = reuse.is_hit
    num_pages = reuse.num_pages[is_hit].astype(np.int64)
    if capacity is not None:
        num_pages = np.clip(capacity - newer_pages(reuse)[is_hit], 0, num_pages)
    hits = np.bincount(reuse.request[is_hit], num_pages, minlength=len(reuse.trace))
    return hits.astype(np.int64)
