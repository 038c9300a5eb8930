"""Cost of the cache when nothing is shared: time inside it, and cache on against cache off."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from engines.contract import Setup
from engines.models import MODELS, TITLES
from engines.registry import ENTRIES, OURS, WATCHED
from engines.run import Cell, Group, ratios
from engines.stats import median_interval
from engines.stopwatch import PARTS
from engines.workloads import WORKLOADS


def overhead(args: argparse.Namespace, setup: Setup, model: str) -> dict[str, Any]:
    """Run W4 with cache on, off, and on with a stopwatch; prints a table, returns the figures."""
    group = Group(
        [ENTRIES[OURS], ENTRIES["ramify-off"], WATCHED],
        setup,
        args.peers,
        limit_s=args.limit,
        long_s=float("inf"),
        vocab=MODELS[model]["vocab_size"],
    )
    if group.absent:
        group.end()
        raise SystemExit("; ".join(f"{name}: {why}" for name, why in group.absent.items()))
    try:
        cells = group.measure([WORKLOADS["W4"]], args.pairs, lambda: None)["W4"]
    finally:
        group.end()
    on, off, watched = cells
    for cell in cells:
        if cell.failed:
            raise SystemExit(f"{cell.entry.title}: {cell.failed}")
    interval = median_interval(ratios(on, off))
    shares = {part: _share(watched, part) for part in (*PARTS, "other")}
    steps = median(sample["facts"]["steps"] for sample in watched.samples)
    print(f"\n### Overhead, {TITLES[model]}, {setup.dtype}, {WORKLOADS['W4'].title}\n")
    print(
        "| inside cache and planner | scheduler | other Python of the step | forward and sampling |"
    )
    print("|---:|---:|---:|---:|")
    print(
        f"| {inside(watched):.2%} ({shares['cache']:.2%} + {shares['planner']:.2%}) "
        f"| {shares['scheduler']:.2%} | {shares['other']:.2%} | {shares['execute']:.2%} |\n"
    )
    print(
        f"{steps:.0f} steps; medians of {args.pairs}. Cache on / cache off, end to end: median "
        f"{interval.mid:.4f}, {interval.level:.0%} interval {interval.low:.4f}–{interval.high:.4f} "
        f"({interval.count} interleaved pairs, {on.total().mid:.2f} s and {off.total().mid:.2f} s)."
    )
    return {
        "model": model,
        "dtype": setup.dtype,
        "shares": shares,
        "on_s": on.totals,
        "off_s": off.totals,
        "ratio": [interval.mid, interval.low, interval.high, interval.level],
    }


def inside(watched: Cell) -> float:
    """Share of the wall time spent inside cache and planner."""
    return float(
        median(
            (sample["facts"]["cache_s"] + sample["facts"]["planner_s"]) / sample["total_s"]
            for sample in watched.samples
        )
    )


def _share(cell: Cell, part: str) -> float:
    return float(
        median(sample["facts"][f"{part}_s"] / sample["total_s"] for sample in cell.samples)
    )
