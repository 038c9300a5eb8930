"""Whether one version is slower than another: the verdict of perf.py. Plain Python.

Pairs are of the same work, done by both versions right after each other. A figure is *slower* when
the median of its paired ratios is beyond `LIMIT` and the interval of the median lies above 1: the
first so that what nobody would notice does not fail, the second so that noise does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.stats import Interval, median_interval

LIMIT = 1.05  # half-way between nothing and the 10 % that must be found
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Verdict:
    """The interval of a figure's ratios in a cell, and whether it is slower."""

    cell: str
    figure: str
    ratio: Interval  # now / baseline; above 1 is slower

    @property
    def suspect(self) -> bool:
        """The median is beyond the limit, maybe by chance: measure more pairs."""
        return self.ratio.mid > LIMIT

    @property
    def slower(self) -> bool:
        """The median is beyond the limit and the interval lies above 1."""
        return self.suspect and self.ratio.low > 1.0

    @property
    def faster(self) -> bool:
        """Faster by more than the limit, so that an equal slowdown would go unnoticed."""
        return self.ratio.mid < 1.0 / LIMIT and self.ratio.high < 1.0


Samples = Mapping[str, Sequence[float]]  # figure → values by pair, larger is slower


def judge(cell: str, now: Samples, base: Samples) -> list[Verdict]:
    """Return a verdict on every figure of a cell."""
    return [
        Verdict(
            cell,
            figure,
            median_interval([a / b for a, b in zip(now[figure], base[figure], strict=True)], LEVEL),
        )
        for figure in now
    ]


def hidden(verdicts: Sequence[Verdict]) -> float:
    """Return the largest slowdown factor that an outdated baseline would hide; 1 if none."""
    return max((1.0 / verdict.ratio.mid for verdict in verdicts if verdict.faster), default=1.0)


def mismatches(stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe each difference that makes a stored baseline incomparable; empty if none."""
    return [
        f"{name}: the baseline has {stored.get(name)!r}, here it is {here.get(name)!r}"
        for name in here
        if stored.get(name) != here.get(name)
    ]
