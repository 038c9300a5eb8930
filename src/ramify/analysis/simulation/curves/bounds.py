"""Bounds of the hit rate: the best policy of a capacity (MIN), and lifetimes without a capacity."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np

from ramify.analysis.simulation.curves.reuse import ReuseRuns


def belady(reuse: ReuseRuns, capacity_tokens: int, *, first_counted: int = 0) -> float:
    """Hit rate of evicting what is used again last (Belady's MIN): no policy has a higher.

    An ancestor is used again no later than its descendants, so that what is evicted is always a leaf.
    Cached pages are counted by the request that uses them next: which page of equals goes does not
    matter. A request's pages may be dropped as soon as it is served.
    """
    trace = reuse.trace
    capacity = capacity_tokens // trace.page_size
    is_reuse = reuse.last_user >= 0
    # Runs by the request that used them last: what that request's pages are used for next.
    users, nexts, lengths = (
        column[is_reuse] for column in (reuse.last_user, reuse.request, reuse.num_pages)
    )
    order = np.argsort(users, kind="stable")
    bounds = np.searchsorted(users[order], np.arange(len(trace) + 1)).tolist()
    next_users, counts = nexts[order].tolist(), lengths[order].tolist()
    lookups = trace.num_lookup_pages.tolist()
    cached: dict[int, int] = {}  # pages by the request that uses them next
    farthest: list[int] = []  # heap of the same requests, negative
    total = num_hits = 0
    for request in range(len(trace)):
        held = cached.pop(request, 0)
        total -= held
        if request >= first_counted:
            num_hits += min(held, lookups[request])
        for run in range(bounds[request], bounds[request + 1]):
            user, count = next_users[run], counts[run]
            if user not in cached:
                heappush(farthest, -user)
                cached[user] = 0
            cached[user] += count
            total += count
        while total > capacity:
            user = -farthest[0]
            held = cached.get(user, 0)
            if not held:  # used or evicted by now
                heappop(farthest)
                continue
            num_evicted = min(held, total - capacity)
            total -= num_evicted
            if num_evicted == held:
                del cached[user]
                heappop(farthest)
            else:
                cached[user] = held - num_evicted
    tokens = int(trace.num_tokens[first_counted:].sum())
    return num_hits * trace.page_size / tokens if tokens else 0.0


def ttl_curve(
    reuse: ReuseRuns, lifetimes_s: Iterable[float], *, first_counted: int = 0
) -> dict[float, float]:
    """Hit rate by lifetime of a cache without a limit of size; each use restarts the lifetime."""
    trace = reuse.trace
    counted = reuse.is_hit & (reuse.request >= first_counted)
    gaps = trace.start_s[reuse.request[counted]] - trace.start_s[reuse.last_user[counted]]
    pages = reuse.num_pages[counted]
    tokens = int(trace.num_tokens[first_counted:].sum())
    return {
        lifetime: int(pages[gaps <= lifetime].sum()) * trace.page_size / max(1, tokens)
        for lifetime in lifetimes_s
    }
