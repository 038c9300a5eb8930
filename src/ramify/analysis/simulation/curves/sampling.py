"""LRU's curve from a sample of the pages, for traces that are too long for all of them.

Pages are sampled by a hash of their id (SHARDS, Waldspurger et al., FAST 2015): a page is in the
sample with all its uses or with none. Prompts share a few roots that make up much of all references,
so plain sampling is wrong by tens of points. Pages used often are therefore counted exactly, the
others are sampled, and the sample is scaled to the number of references that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import newer_weights
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.tokens import spread_ids
from ramify.errors import ConfigError

HOT_USES = 500  # a page with this number of uses or more is counted exactly


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over seeds, and the standard deviation of a single seed."""

    mean: float
    deviation: float


def sampled_lru(
    trace: PageTrace,
    rate: float,
    capacities: Sequence[int],
    *,
    num_seeds: int = 8,
    first_counted: int = 0,
    hot_uses: int = HOT_USES,
) -> dict[int, Estimate]:
    """LRU's hit rate by capacity, estimated from a share of the pages.

    Args:
        rate: share of the pages, more than 0 and at most 1.
        num_seeds: samples; at least 2, for the deviation.

    Raises:
        ConfigError: rate or number of seeds are not possible.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"sample={rate} but it must be a share above 0 and up to 1")
    if num_seeds < 2:
        raise ConfigError(f"seeds={num_seeds} but error bars need at least 2")
    uses = np.bincount(trace.page_ids, minlength=trace.num_ids)
    is_hot = uses >= hot_uses
    seeds = spread_ids(np.arange(1, num_seeds + 1))
    rates = np.array(
        [_estimate(trace, rate, capacities, is_hot, int(seed), first_counted) for seed in seeds]
    )
    return {
        capacity: Estimate(float(column.mean()), float(column.std(ddof=1)))
        for capacity, column in zip(capacities, rates.T, strict=True)
    }


def _estimate(
    trace: PageTrace,
    rate: float,
    capacities: Sequence[int],
    is_hot: NDArray[np.bool_],
    seed: int,
    first_counted: int,
) -> list[float]:
    """Hit rates of one sample."""
    ids = np.arange(trace.num_ids, dtype=np.uint64) ^ np.uint64(seed)
    is_sampled = is_hot | (spread_ids(ids) < np.uint64(min(rate * 2**64, 2**64 - 1)))
    kept = _keep_pages(trace, is_sampled)
    runs = _split_at_hot(ReuseRuns.of(kept), is_hot)
    weight = np.where(runs.is_hot, 1.0, 1 / rate)
    newer = newer_weights(runs.reuse, (weight * runs.reuse.num_pages).tolist())
    counted = runs.reuse.is_hit & (runs.reuse.request >= first_counted)
    is_counted_use = _lookup_uses(trace, first_counted)
    num_cold = int((is_counted_use & ~is_hot[trace.page_ids]).sum())
    cold_uses = runs.reuse.is_lookup & ~runs.is_hot & (runs.reuse.request >= first_counted)
    num_sampled = int(runs.reuse.num_pages[cold_uses].sum())
    scale = num_cold / num_sampled if num_sampled else 0.0
    tokens = int(trace.num_tokens[first_counted:].sum())
    rates = []
    for capacity in capacities:
        room = capacity / trace.page_size - newer[counted]
        pages = np.clip(np.floor(room / weight[counted]), 0, runs.reuse.num_pages[counted])
        hot = runs.is_hot[counted]
        hits = pages[hot].sum() + scale * pages[~hot].sum()
        rates.append(float(hits) * trace.page_size / max(1, tokens))
    return rates


@dataclass(frozen=True, slots=True, eq=False)
class _SplitRuns:
    reuse: ReuseRuns
    is_hot: NDArray[np.bool_]  # [runs]


def _split_at_hot(reuse: ReuseRuns, is_hot: NDArray[np.bool_]) -> _SplitRuns:
    """Runs cut between hot and other pages; a page has no more uses than the page above it."""
    edges = np.concatenate([[0], np.cumsum(reuse.num_pages, dtype=np.int64)])
    hot_before = np.concatenate([[0], np.cumsum(is_hot[reuse.trace.page_ids])])
    num_hot = (hot_before[edges[1:]] - hot_before[edges[:-1]]).astype(np.int32)
    lengths = np.stack([num_hot, reuse.num_pages - num_hot], axis=1).reshape(-1)
    keep = lengths > 0
    split = ReuseRuns(
        trace=reuse.trace,
        request=reuse.request.repeat(2)[keep],
        last_user=reuse.last_user.repeat(2)[keep],
        num_pages=lengths[keep],
        is_lookup=reuse.is_lookup.repeat(2)[keep],
    )
    return _SplitRuns(split, np.tile([True, False], len(num_hot))[keep])


def _keep_pages(trace: PageTrace, is_sampled: NDArray[np.bool_]) -> PageTrace:
    """The trace with the sampled pages only."""
    keep = is_sampled[trace.page_ids]
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    offsets = kept_before[trace.offsets]
    lookups = kept_before[trace.offsets[:-1] + trace.num_lookup_pages] - offsets[:-1]
    return PageTrace(
        page_size=trace.page_size,
        num_ids=trace.num_ids,
        page_ids=trace.page_ids[keep],
        offsets=offsets,
        num_lookup_pages=lookups.astype(np.int32),
        num_tokens=trace.num_tokens,
        num_output=trace.num_output,
        start_s=trace.start_s,
    )


def _lookup_uses(trace: PageTrace, first_counted: int) -> NDArray[np.bool_]:
    """[pages]: looked up by a request that is counted."""
    lengths = np.diff(trace.offsets)
    depth = np.arange(len(trace.page_ids)) - np.repeat(trace.offsets[:-1], lengths)
    is_lookup = depth < np.repeat(trace.num_lookup_pages, lengths)
    is_lookup[: trace.offsets[first_counted]] = False
    return is_lookup
