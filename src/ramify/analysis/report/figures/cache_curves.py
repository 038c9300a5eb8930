"""Hit rates by capacity and lifetime for the charts, and the place of the log's own cache on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ramify.analysis.corpus import Corpus
from ramify.analysis.progress import Progress
from ramify.analysis.report.document import Curve, CurvePoint, Curves
from ramify.analysis.simulation.capacities import fitted_capacities
from ramify.analysis.simulation.run import SimulationOptions, simulate_trace
from ramify.analysis.simulation.sources import corpus_trace
from ramify.errors import LogError

LIFETIMES_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0, 86_400.0)
NUM_CAPACITIES = 6
KNEE_GAIN = 0.01  # what doubling buys beyond the knee, at most


def cache_curves(
    corpus: Corpus,
    here_share: float | None,
    *,
    stated_tokens: int | None = None,
    policies: Sequence[str] = (),
    progress: Progress | None = None,
) -> Curves | None:
    """The curves of a log; None without prompts.

    Args:
        corpus: the requests.
        here_share: hit rate of the log's own cache.
        stated_tokens: capacity to mark, if the user gave one.
        policies: eviction policies that `PrefixCache` replays; LRU is exact without a replay.
        progress: gets part, requests done and requests in all.

    Raises:
        ConfigError: the stated capacity is less than a page.
        KeyboardInterrupt: the simulation was interrupted.
    """
    try:
        source = corpus_trace(corpus)
    except LogError:
        return None
    trace = source.trace
    footprint = max(len(trace.page_ids), 1) * trace.page_size
    options = SimulationOptions(
        capacities=fitted_capacities(footprint, trace.page_size, NUM_CAPACITIES)
        + (() if stated_tokens is None else (stated_tokens,)),
        policies=tuple(policies),
        lifetimes_s=LIFETIMES_S,
    )
    result = simulate_trace(source, options, progress=progress)
    if result.is_partial:
        raise KeyboardInterrupt  # half of the curves would look like all
    points = [(at, share) for at, share in result.lru_points if at > 0]
    if not points:
        points = sorted(result.one_pass_lru.items())
    top = points[-1][0]
    capacities = [at for at in sorted(result.belady) if at <= top] or [min(result.belady)]
    lines = [
        Curve("LRU", tuple(CurvePoint(at, share) for at, share in points)),
        *(
            Curve(name, tuple(CurvePoint(at, rates[at]) for at in capacities if at in rates))
            for name, rates in result.curve.items()
        ),
        Curve("Belady", tuple(CurvePoint(at, result.belady[at]) for at in capacities)),
    ]
    lifetimes = [CurvePoint(at, share) for at, share in sorted(result.ttl.items())]
    return Curves(
        by_capacity=tuple(lines),
        by_lifetime=Curve("by lifetime", tuple(lifetimes)) if lifetimes else None,
        infinite=result.infinite,
        page_size=trace.page_size,
        here_share=here_share,
        here_tokens=_place(points, here_share),
        here_lifetime_s=_place([(point.at, point.share) for point in lifetimes], here_share),
        knee_tokens=_knee(points),
        stated_tokens=stated_tokens,
        stated_share=None if stated_tokens is None else result.one_pass_lru[stated_tokens],
    )


def _place(points: Sequence[tuple[float, float]], share: float | None) -> float | None:
    """Where a rising curve reaches a share, between its points on a logarithmic axis.

    A cache that nothing was read from has no place on it.
    """
    if not share:
        return None
    before: tuple[float, float] | None = None
    for at, value in points:
        if value >= share:
            if before is None or value == before[1]:
                return at
            part = (share - before[1]) / (value - before[1])
            return math.exp(math.log(before[0]) + part * math.log(at / before[0]))
        before = (at, value)
    return None


def _knee(points: Sequence[tuple[float, float]]) -> float | None:
    """The least capacity after which no doubling adds more than `KNEE_GAIN`."""
    for at, share in points:
        later = [value for place, value in points if place <= 2 * at]
        if points[-1][1] - share <= 2 * KNEE_GAIN and later[-1] - share <= KNEE_GAIN:
            return at
    return None
