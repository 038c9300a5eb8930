"""Geometry of the line charts: scales, ticks and paths, which the page's template draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.analysis.report.document import Curve, Curves
from ramify.analysis.report.wording.numbers import count, duration, percent

WIDTH, HEIGHT = 520.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, WIDTH - 118.0, 14.0, HEIGHT - 40.0
CAPACITY_TICKS = tuple(step * 10.0**power for power in range(-1, 16) for step in (1, 2, 5))
LIFETIME_TICKS = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
SHARE_STEPS = (0.02, 0.05, 0.1, 0.2, 0.25)  # of the vertical axis
LABEL_GAP = 13.0  # between names at the ends of lines


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A curve in the coordinates of its chart."""

    name: str
    points: str  # of an SVG polyline
    label_y: float
    last: str  # its last value
    values: tuple[tuple[str, str], ...]  # for the table of the chart


@dataclass(frozen=True, slots=True)
class Marker:
    """The place of a cache on the chart."""

    x: float
    y: float
    label: str
    anchor: str


@dataclass(frozen=True, slots=True)
class LineChart:
    """A chart of hit rates over a logarithmic axis."""

    title: str
    x_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    ceiling_y: float
    ceiling: str
    marker: Marker | None
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = RIGHT
    top: float = TOP
    bottom: float = BOTTOM


@dataclass(frozen=True, slots=True)
class _Scale:
    """Places of values: logarithmic from `low` to `high`, linear from 0 to `top`."""

    low: float
    high: float
    top: float

    def x(self, at: float) -> float:
        low = math.log(self.low)
        share = (math.log(at) - low) / (math.log(self.high) - low)
        return round(LEFT + min(1.0, max(0.0, share)) * (RIGHT - LEFT), 1)

    def y(self, share: float) -> float:
        return round(TOP + (1 - share / self.top) * (BOTTOM - TOP), 1)


def capacity_chart(curves: Curves) -> LineChart | None:
    """Hit rate by capacity in tokens; None without a curve."""
    name, at, share = "you are here", curves.here_tokens, curves.here_share
    if curves.stated_tokens and curves.stated_share is not None:
        name, at, share = "your capacity", curves.stated_tokens, curves.stated_share
    x_title = "capacity in tokens"
    if curves.token_bytes:
        x_title += f" (1 M tokens = {curves.token_bytes / 1000:,.3g} GB of K/V)"
    return _chart(
        ("Hit rate by capacity", x_title),
        curves.by_capacity,
        curves.infinite,
        CAPACITY_TICKS,
        count,
        (at, share, name, " tokens"),
    )


def lifetime_chart(curves: Curves) -> LineChart | None:
    """Hit rate by lifetime, with space for everything; None without a curve."""
    return _chart(
        ("Hit rate by lifetime", "lifetime after the last use"),
        () if curves.by_lifetime is None else (curves.by_lifetime,),
        curves.infinite,
        LIFETIME_TICKS,
        duration,
        (curves.here_lifetime_s, curves.here_share, "you are here", ""),
    )


def _chart(
    titles: tuple[str, str],
    curves: Sequence[Curve],
    ceiling: float,
    ticks: Sequence[float],
    wording: Callable[[float], str],
    marked: tuple[float | None, float | None, str, str],  # place, share, name, unit of the place
) -> LineChart | None:
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    places = [point.at for curve in curves for point in curve.points]
    low, high = min(places), max(places)
    if low == high:
        low, high = low / 2, high * 2
    top = max([ceiling, *(point.share for curve in curves for point in curve.points)])
    step = next((each for each in SHARE_STEPS if top / each <= 5), SHARE_STEPS[-1])
    scale = _Scale(low, high, min(1.0, math.ceil(top / step + 1e-9) * step) or step)
    marker = None
    at, share, name, unit = marked
    if at and share is not None and low <= at <= high:
        x = scale.x(at)
        anchor = "end" if x > (LEFT + RIGHT) / 2 else "start"
        label = f"{name}: {percent(share)} at {wording(at)}{unit}"
        marker = Marker(x, scale.y(share), label, anchor)
    return LineChart(
        *titles,
        x_ticks=_spread([Tick(scale.x(at), wording(at)) for at in ticks if low <= at <= high]),
        y_ticks=tuple(
            Tick(scale.y(at * step), f"{100 * at * step:.0f} %")
            for at in range(round(scale.top / step) + 1)
        ),
        lines=tuple(
            Line(
                name=curve.name,
                points=" ".join(
                    f"{scale.x(each.at)},{scale.y(each.share)}" for each in curve.points
                ),
                label_y=label_y,
                last=percent(curve.points[-1].share),
                values=tuple((wording(each.at), percent(each.share)) for each in curve.points),
            )
            for curve, label_y in zip(curves, _separate(curves, scale), strict=True)
        ),
        ceiling_y=scale.y(ceiling),
        ceiling=f"infinite {percent(ceiling)}",
        marker=marker,
    )


def _spread(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """Drop labels that would touch the label before."""
    shown: list[Tick] = []
    for tick in ticks:
        if not shown or tick.at - shown[-1].at >= 3.5 * len(tick.label + shown[-1].label) + 4:
            shown.append(tick)
    return tuple(shown)


def _separate(curves: Sequence[Curve], scale: _Scale) -> list[float]:
    """Heights of the names at the ends of lines, moved apart."""
    heights = [scale.y(curve.points[-1].share) for curve in curves]
    floor = TOP + 4
    for number in sorted(range(len(curves)), key=heights.__getitem__):
        heights[number] = max(heights[number], floor)
        floor = heights[number] + LABEL_GAP
    return heights
