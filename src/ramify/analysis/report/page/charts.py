"""Geometry of the line charts: scales, ticks and paths, which the page's template draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ramify.analysis.report.document import Curve, Curves
from ramify.analysis.report.wording.numbers import count, duration, percent

WIDTH, HEIGHT = 520.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 118.0, 14.0, 40.0
LIFETIME_TICKS = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
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
    number: int  # of its style
    points: str  # of an SVG polyline
    band: str  # SVG polygon of low and high, empty without
    label_y: float
    last: str  # its last value
    values: tuple[tuple[str, str], ...]  # for the table of the chart


@dataclass(frozen=True, slots=True)
class Marker:
    """The place of the log's own cache."""

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
    ceiling_y: float | None
    ceiling: str
    marker: Marker | None
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def capacity_chart(curves: Curves) -> LineChart | None:
    """Hit rate by capacity in tokens."""
    lines = [curve for curve in curves.by_capacity if curve.points]
    if not lines:
        return None
    marker: tuple[float, float] | None = None
    name = "you are here"
    if curves.stated_tokens and curves.stated_share is not None:
        marker, name = (curves.stated_tokens, curves.stated_share), "your capacity"
    elif curves.here_tokens and curves.here_share is not None:
        marker = (curves.here_tokens, curves.here_share)
    x_title = "capacity in tokens"
    if curves.token_bytes:
        x_title += f" (1 M tokens = {curves.token_bytes / 1000:,.3g} GB of K/V)"
    return _chart(
        "Hit rate by capacity",
        x_title,
        lines,
        curves.infinite,
        marker,
        _powers,
        count,
        " tokens",
        marker_name=name,
    )


def lifetime_chart(curves: Curves) -> LineChart | None:
    """Hit rate by lifetime, with space for everything."""
    if curves.by_lifetime is None or not curves.by_lifetime.points:
        return None
    marker = None
    if curves.here_lifetime_s and curves.here_share is not None:
        marker = (curves.here_lifetime_s, curves.here_share)
    return _chart(
        "Hit rate by lifetime",
        "lifetime after the last use",
        [curves.by_lifetime],
        curves.infinite,
        marker,
        _lifetimes,
        duration,
        "",
    )


def _chart(
    title: str,
    x_title: str,
    curves: Sequence[Curve],
    ceiling: float,
    here: tuple[float, float] | None,
    ticks_of: Callable[[float, float], Sequence[float]],
    wording: Callable[[float], str],
    unit: str,
    *,
    marker_name: str = "you are here",
) -> LineChart:
    places = [point.at for curve in curves for point in curve.points]
    low, high = min(places), max(places)
    if low == high:
        low, high = low / 2, high * 2
    top = max([ceiling, *(point.share for curve in curves for point in curve.points)])
    step = next(each for each in (0.02, 0.05, 0.1, 0.2, 0.25) if top / each <= 5 or each == 0.25)
    y_max = min(1.0, math.ceil(top / step + 1e-9) * step) or step

    def x_of(at: float) -> float:
        share = (math.log(at) - math.log(low)) / (math.log(high) - math.log(low))
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - RIGHT - LEFT), 1)

    def y_of(share: float) -> float:
        return round(TOP + (1 - share / y_max) * (HEIGHT - BOTTOM - TOP), 1)

    lines = []
    for number, curve in enumerate(curves):
        points = [(x_of(point.at), y_of(point.share)) for point in curve.points]
        band = ""
        if all(point.low is not None and point.high is not None for point in curve.points):
            upper = [(x_of(point.at), y_of(point.high or 0.0)) for point in curve.points]
            lower = [(x_of(point.at), y_of(point.low or 0.0)) for point in curve.points]
            band = _joined([*upper, *reversed(lower)])
        lines.append(
            Line(
                name=curve.name,
                number=number,
                points=_joined(points),
                band=band,
                label_y=points[-1][1],
                last=percent(curve.points[-1].share),
                values=tuple((wording(point.at), percent(point.share)) for point in curve.points),
            )
        )
    marker = None
    if here is not None and low <= here[0] <= high:
        x = x_of(here[0])
        anchor = "end" if x > (LEFT + WIDTH - RIGHT) / 2 else "start"
        label = f"{marker_name}: {percent(here[1])} at {wording(here[0])}{unit}"
        marker = Marker(x, y_of(here[1]), label, anchor)
    return LineChart(
        title=title,
        x_title=x_title,
        x_ticks=_spread([Tick(x_of(at), wording(at)) for at in ticks_of(low, high)]),
        y_ticks=tuple(
            Tick(y_of(at * step), f"{100 * at * step:.0f} %")
            for at in range(round(y_max / step) + 1)
        ),
        lines=_separate(lines),
        ceiling_y=y_of(ceiling),
        ceiling=f"infinite {percent(ceiling)}",
        marker=marker,
    )


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _spread(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """Drop labels that would touch the label before."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= 3.5 * (len(tick.label) + len(kept[-1].label)) + 4:
            kept.append(tick)
    return tuple(kept)


def _separate(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Move the names at the ends of lines apart."""
    placed: dict[int, float] = {}
    floor = TOP + 4
    for line in sorted(lines, key=lambda line: line.label_y):
        placed[line.number] = floor = max(line.label_y, floor)
        floor += LABEL_GAP
    return tuple(replace(line, label_y=placed[line.number]) for line in lines)


def _powers(low: float, high: float) -> Sequence[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [
        step * 10.0**power
        for power in range(first, last + 1)
        for step in (1, 2, 5)
        if low <= step * 10.0**power <= high
    ]


def _lifetimes(low: float, high: float) -> Sequence[float]:
    return [at for at in LIFETIME_TICKS if low <= at <= high]
