"""Replicas with a cache each, behind routing that knows no prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import lru_curve
from ramify.analysis.simulation.page_trace import PageTrace


def random_routing(
    trace: PageTrace,
    num_replicas: int,
    capacities: Sequence[int],
    *,
    num_seeds: int,
    first_counted: int = 0,
) -> NDArray[np.float64]:
    """LRU's hit rate if a random replica serves each request: [num_seeds, capacities]."""
    hits = np.zeros((num_seeds, len(capacities)))
    tokens = np.zeros((num_seeds, 1))
    for seed in range(num_seeds):
        replica = np.random.default_rng(seed).integers(num_replicas, size=len(trace))
        for number in range(num_replicas):
            served = np.flatnonzero(replica == number)
            first = int(np.searchsorted(served, first_counted))
            curve = lru_curve(ReuseRuns.of(trace.select(served)), first_counted=first)
            hits[seed] += [curve.hit_rate(size) * curve.total_tokens for size in capacities]
            tokens[seed] += curve.total_tokens
    return hits / np.maximum(tokens, 1)
