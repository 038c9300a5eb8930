"""Format measured cells as Markdown."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from machine import commit, cpu_model

from engines.registry import OURS, REFERENCE
from engines.run import Cell, ratios


def setting(target: str, threads: int) -> dict[str, str]:
    """Command, commit, machine and versions to publish with a figure."""
    import torch

    return {
        "command": f'make {target} ARGS="{" ".join(sys.argv[1:])}"',
        "commit": commit(),
        "cpu": f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": f"{os.cpu_count()}, {threads} threads used",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


HEAD = (
    "| engine | s: median (min–max; n) | × roofline | best peer / this: median (min–max) "
    "| out tokens/s | TTFT ms | between tokens ms | hit rate | answers as transformers |"
)


def table(cells: Sequence[Cell], roofline_s: float) -> str:
    """One workload: every engine; ratios of paired repetitions against the best peer."""
    workload = cells[0].workload
    best = best_peer(cells)
    reference = next((cell for cell in cells if cell.entry.name == REFERENCE), None)
    lines = [
        f"#### {workload.name}: {workload.title}; roofline {roofline_s:.2f} s",
        "",
        HEAD,
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        if not cell.measured:
            lines.append(f"| {cell.entry.title} | {cell.failed or 'not run'} |" + " |" * 7)
            continue
        total = cell.total()
        equal = None if reference is None else cell.equal_answers(reference)
        lines.append(
            f"| {cell.entry.title} | {total.mid:.2f} ({total.low:.2f}–{total.high:.2f}; "
            f"{total.count}{', then ' + cell.failed if cell.failed else ''}) "
            f"| {total.mid / roofline_s:.2f} | {_ratio(cell, best)} | {cell.tokens_per_s():,.0f} "
            f"| {_ms(cell.mid('ttft_s'))} | {_ms(cell.mid('between_s'))} "
            f"| {_share(cell.hit_rate())} | {'' if equal is None else f'{equal[0]}/{equal[1]}'} |"
        )
    return "\n".join(lines)


def best_peer(cells: Sequence[Cell]) -> Cell | None:
    """The fastest engine that is not ours, by its median."""
    peers = [cell for cell in cells if cell.measured and not cell.entry.name.startswith(OURS)]
    return min(peers, key=lambda cell: cell.total().mid, default=None)


def _ratio(cell: Cell, best: Cell | None) -> str:
    """How many times faster than the best peer; below 1 is slower."""
    if best is None:
        return ""
    if cell is best:
        return "best peer"
    speedups = ratios(best, cell)
    return f"{median(speedups):.2f} ({min(speedups):.2f}–{max(speedups):.2f})"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:,.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def notes(versions: Mapping[str, str], remarks: Mapping[str, str]) -> str:
    """Versions of the engines, and a line for each remark on an engine."""
    version_texts = [f"{name} {version}" for name, version in versions.items()]
    remark_lines = [f"- {name}: {remark}" for name, remark in remarks.items() if remark]
    return "\n".join(["Versions: " + ", ".join(version_texts), *remark_lines])
