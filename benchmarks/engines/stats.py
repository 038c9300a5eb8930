"""Medians, paired ratios and their intervals. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure."""

    mid: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and where it may lie; `level` is the confidence that the bounds really have."""

    mid: float
    low: float
    high: float
    level: float
    count: int


def paired_ratios(slow: Sequence[float], base: Sequence[float]) -> list[float]:
    """How many times longer `slow` took than `base`, pair by pair; surplus ones are left out."""
    return [a / b for a, b in zip(slow, base, strict=False)]


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """The median and its interval by the sign test: nothing is assumed of the noise.

    The bounds are the k-th smallest and largest value, k as large as the level allows. With fewer
    than 6 values no k reaches 95 %: the bounds are then the extremes and `level` says less.
    """
    ordered, count = sorted(values), len(values)
    depth, outside = 1, 2 * 0.5**count
    total = outside
    while depth < (count + 1) // 2:
        total += 2 * comb(count, depth) * 0.5**count
        if 1 - total < level:
            break
        depth, outside = depth + 1, total
    return Interval(
        median(ordered), ordered[depth - 1], ordered[-depth], max(0.0, 1 - outside), count
    )
