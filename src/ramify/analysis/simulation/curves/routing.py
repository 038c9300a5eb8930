"""Who serves a request, and when: replicas with caches of their own, and reordering in the queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import LruCurve, lru_curve
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.errors import ConfigError


def random_routing(
    trace: PageTrace,
    num_replicas: int,
    capacities: Sequence[int],
    *,
    seed: int = 0,
    first_counted: int = 0,
) -> dict[int, float]:
    """LRU's hit rate by capacity of a replica, each request served by a random replica."""
    rng = np.random.default_rng(seed)
    replica = rng.integers(num_replicas, size=len(trace))
    curves: list[LruCurve] = []
    for number in range(num_replicas):
        served = np.flatnonzero(replica == number)
        first = int(np.searchsorted(served, first_counted))
        curves.append(lru_curve(ReuseRuns.of(trace.select(served)), first_counted=first))
    total = sum(curve.total_tokens for curve in curves)
    return {
        capacity: sum(curve.hit_rate(capacity) * curve.total_tokens for curve in curves)
        / max(1, total)
        for capacity in capacities
    }


def perfect_routing(
    curve: LruCurve, num_replicas: int, capacities: Sequence[int]
) -> dict[int, float]:
    """Hit rate by capacity of a replica if routing by prefix makes the replicas a single cache."""
    return {capacity: curve.hit_rate(capacity * num_replicas) for capacity in capacities}


def reorder_by_prefix(trace: PageTrace, window_s: float) -> PageTrace:
    """Serve the requests that arrive within a window in the order of their prefixes.

    A request waits for the end of its window at most. Windows begin at multiples of `window_s`.

    Raises:
        ConfigError: the trace has no times, or the window is not positive.
    """
    if not window_s > 0:
        raise ConfigError(f"reorder={window_s} but a window has more than 0 seconds")
    if not trace.has_times:
        raise ConfigError("reordering needs the times of all requests, and the log lacks some")
    window = np.floor((trace.start_s - trace.start_s[0]) / window_s).astype(np.int64)
    bounds = np.flatnonzero(np.diff(window)) + 1
    order: list[NDArray[np.int64]] = []
    for requests in np.split(np.arange(len(trace)), bounds):
        # big-endian bytes compare as the ids do
        heads = [trace.pages(int(request)).astype(">i4").tobytes() for request in requests]
        order.append(requests[sorted(range(len(heads)), key=heads.__getitem__)])
    return trace.select(np.concatenate(order))
