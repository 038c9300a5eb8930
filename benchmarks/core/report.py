"""Format benchmark results as Markdown tables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from machine import commit, cpu_model

from core.contract import Entry
from core.policies import CAPACITIES, HitRates
from core.run import Cell
from core.workloads import Workload


def setting(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the command, commit, machine and versions of a benchmark run."""
    return {
        "command": f'make bench-core ARGS="{" ".join(sys.argv[1:])}"',
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def speed_table(workload: Workload, cells: Sequence[Cell], base: Cell | None) -> str:
    """Format one workload: a row per core, ours first, absent cores included."""
    sizes = next((cell.shape for cell in cells if cell.shape), {})
    served = (
        f"{sizes.get('requests', 0):,} requests, {sizes.get('prompt_tokens', 0):,} prompt and "
        f"{sizes.get('output_tokens', 0):,} output tokens, pool of {workload.num_tokens:,} tokens"
    )
    head = (
        "| | µs per request: median (min–max) | × Ramify (fastest runs) | match + alloc + insert µs | p99 µs "
        "| hit rate | peak MB |"
    )
    lines = [
        f"### {workload.title}",
        "",
        served,
        "",
        head,
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        if cell.failed or not cell.samples:
            lines.append(f"| {cell.entry.title} | {cell.failed or 'not run'} | | | | | |")
            continue
        totals = cell.totals()
        steps = " + ".join(
            f"{cell.mid(name):.1f}" for name in ("match_us", "alloc_us", "insert_us")
        )
        ratio = ""
        if base is not None:
            ratio = f"{cell.ratio(base):.2f} ({cell.fastest_ratio(base):.2f})"
        peak = "" if cell.peak_mb is None else f"{cell.peak_mb:,.0f}"
        lines.append(
            f"| {cell.entry.title} | {cell.mid('total_us'):,.1f} ({min(totals):,.1f}–"
            f"{max(totals):,.1f}) | {ratio} | {steps} | {cell.mid('p99_us'):,.0f} "
            f"| {cell.hit_rate:.2%} | {peak} |"
        )
    return "\n".join(lines)


def absences(entries: Mapping[str, tuple[Entry, str]]) -> str:
    """List the reasons why cores have no row."""
    return "\n".join(f"- {entry.title}: absent: {reason}" for entry, reason in entries.values())


COLUMNS: dict[str, tuple[str, dict[str, str]]] = {
    "grow": (
        "As the tree grows: µs of one call (medians)",
        {
            "shape": "tree", "nodes": "nodes", "match_us": "match", "publish_us": "publish",
            "evict_1_us": "evict 1 page", "evict_64_us": "evict 64 pages",
        },
    ),
    "long_prompt": (
        "A prompt of 131,072 tokens: µs (medians)",
        {
            "nodes": "nodes", "memcmp_us": "memcmp of its bytes", "match_us": "hit whole",
            "republish_us": "publish again", "twin_us": "publish what a twin published first",
        },
    ),
    "stalls": (
        "The slowest single call, garbage collector on",
        {
            "nodes": "nodes", "growing_ms": "while growing, ms", "steady_ms": "while evicting, ms",
            "steady": "requests that evict", "collections": "automatic collections",
            "full_collections": "of them full", "pause_ms": "longest of them, ms",
            "collect_ms": "gc.collect(), ms", "bytes_per_node": "resident bytes per node",
            "empty_bytes_per_page": "of them before the first request",
        },
    ),
    "memory": (
        "Memory after the chats",
        {"tokens": "cached tokens", "bytes_per_token": "resident bytes per token"},
    ),
    "explanations": (
        "What an explanation costs: µs (medians)",
        {"prompt": "prompt", "match_us": "match", "explain_us": "explain"},
    ),
}  # fmt: skip


def scaling_table(name: str, rows: Sequence[tuple[Entry, Mapping[str, Any]]]) -> str:
    """Format one kind of scaling rows, for the cores that have them."""
    title, columns = COLUMNS[name]
    lines = [
        f"### {title}",
        "",
        "| | " + " | ".join(columns.values()) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for entry, row in rows:
        shown = (_shown(row.get(column)) for column in columns)
        lines.append(f"| {entry.title} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def policy_table(trace: str, results: Sequence[HitRates], infinite: float) -> str:
    """Hit rates by policy and capacity; the best of each column in bold."""
    best = {size: max(result.rates[size] for result in results) for size in CAPACITIES}
    lines = [
        f"### {trace}",
        "",
        "| policy | " + " | ".join(f"{size // 1_000_000} M tokens" for size in CAPACITIES) + " |",
        "|---|" + "---:|" * len(CAPACITIES),
    ]
    for result in results:
        rates = (
            f"**{result.rates[size]:.2%}**"
            if result.rates[size] == best[size]
            else f"{result.rates[size]:.2%}"
            for size in CAPACITIES
        )
        lines.append(f"| {result.policy} | " + " | ".join(rates) + " |")
    if any(result.policy == "auto" for result in results) and len(results) > 1:
        fixed = {
            size: max(result.rates[size] for result in results if result.policy != "auto")
            for size in CAPACITIES
        }
        auto = next(result.rates for result in results if result.policy == "auto")
        points = (f"{100 * (auto[size] - fixed[size]):+.2f} points" for size in CAPACITIES)
        lines.append("| auto beside the best fixed one | " + " | ".join(points) + " |")
    lines.append(f"| infinite cache | {infinite:.2%}" + " |" * len(CAPACITIES))
    return "\n".join(lines)
