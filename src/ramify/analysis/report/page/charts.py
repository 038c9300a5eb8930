"""Geometry of the line charts, which the page's template draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.analysis.report.document import Curve, Curves
from ramify.analysis.report.wording.numbers import count, duration, percent

WIDTH, HEIGHT = 520.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, WIDTH - 20.0, 14.0, HEIGHT - 40.0
MAX_TICKS = 6  # labels below the horizontal axis
NUM_SHARES = 5  # lines of the vertical axis


@dataclass(frozen=True, slots=True)
class LineChart:
    """Hit rates over a logarithmic axis, in the coordinates of the SVG."""

    title: str
    x_title: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lines: tuple[tuple[str, str], ...]  # name, points of the polyline
    rows: tuple[tuple[str, str, str], ...]  # of the chart's table: name, place, hit rate
    ceiling_y: float
    ceiling: str
    marker: tuple[float, float] | None  # the place of a cache
    marker_label: str


def capacity_chart(curves: Curves) -> LineChart | None:
    """Hit rate by capacity in tokens; None without a curve."""
    name, at, share = "you are here", curves.here_tokens, curves.here_share
    if curves.stated_tokens and curves.stated_share is not None:
        name, at, share = "your capacity", curves.stated_tokens, curves.stated_share
    titles = ("Hit rate by capacity", "capacity in tokens")
    return _chart(titles, curves.by_capacity, curves.infinite, count, (name, at, share))


def lifetime_chart(curves: Curves) -> LineChart | None:
    """Hit rate by lifetime, with space for everything; None without a curve."""
    lines = () if curves.by_lifetime is None else (curves.by_lifetime,)
    marked = ("you are here", curves.here_lifetime_s, curves.here_share)
    titles = ("Hit rate by lifetime", "lifetime after the last use")
    return _chart(titles, lines, curves.infinite, duration, marked)


def _chart(
    titles: tuple[str, str],
    curves: Sequence[Curve],
    ceiling: float,
    wording: Callable[[float], str],
    marked: tuple[str, float | None, float | None],
) -> LineChart | None:
    points = [point for curve in curves for point in curve.points]
    if not points:
        return None
    positions = sorted({point.at for point in points})
    low, high = (math.log(at) for at in (positions[0], positions[-1]))
    peak = max(ceiling, *(point.share for point in points))
    # Whole per cents at the labelled shares.
    top = 0.2 * math.ceil(5 * peak) if peak > 0.2 else max(0.04, 0.04 * math.ceil(25 * peak))

    def x(at: float) -> float:
        return round(LEFT + (math.log(at) - low) / max(high - low, 1e-9) * (RIGHT - LEFT), 1)

    def y(share: float) -> float:
        return round(TOP + (1 - share / top) * (BOTTOM - TOP), 1)

    name, at, share = marked
    marker, marker_label = None, ""
    if at is not None and share is not None and positions[0] <= at <= positions[-1]:
        marker, marker_label = (x(at), y(share)), f"{name}: {percent(share)} at {wording(at)}"
    labelled = positions[:: -(-len(positions) // MAX_TICKS)]
    shares = [top * step / (NUM_SHARES - 1) for step in range(NUM_SHARES)]
    return LineChart(
        *titles,
        x_ticks=tuple((x(position), wording(position)) for position in labelled),
        y_ticks=tuple((y(level), percent(level)) for level in shares),
        lines=tuple(
            (curve.name, " ".join(f"{x(point.at)},{y(point.share)}" for point in curve.points))
            for curve in curves
        ),
        rows=tuple(
            (curve.name, wording(point.at), percent(point.share))
            for curve in curves
            for point in curve.points
        ),
        ceiling_y=y(ceiling),
        ceiling=f"infinite {percent(ceiling)}",
        marker=marker,
        marker_label=marker_label,
    )
