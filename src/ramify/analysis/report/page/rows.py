"""Rows of the HTML report: what its templates draw and a filter cannot say.

The page is bounded: at most MAX_FINDINGS findings, MAX_SESSIONS sessions of MAX_ROWS requests,
MAX_NODES boxes, and texts of MAX_TEXT characters, whatever the size of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.analysis.report.document import PrefixNode, WaterfallStep

MAX_FINDINGS = 100
MAX_SESSIONS = 20
MAX_ROWS = 60
MAX_NODES = 5000
MAX_TEXT = 2000
MAX_OUTLIERS = 50


@dataclass(frozen=True, slots=True)
class WaterfallBar:
    """A bar from a level to the next, in percent of the chart."""

    step: WaterfallStep
    kind: str  # level, gain, loss or unexplained
    x: float
    width: float


def waterfall_bars(steps: Sequence[WaterfallStep]) -> list[WaterfallBar]:
    """Bars on a scale that ends at the highest level."""
    starts = [0.0 if step.is_level else step.level - step.change for step in steps]
    levels = [step.level for step in steps]
    most = max([*levels, *(step.level - step.change for step in steps), 1e-9])
    bars = []
    for step, start in zip(steps, starts, strict=True):
        low, high = sorted((max(0.0, start), max(0.0, step.level)))
        kind = "level" if step.is_level else "gain" if step.change > 0 else "loss"
        if step.name.startswith("unexplained"):
            kind = "unexplained"
        bars.append(WaterfallBar(step, kind, width(low, most), max(0.3, width(high - low, most))))
    return bars


def node_rows(tree: Sequence[PrefixNode]) -> list[list[Any]]:
    """The boxes of the sharing tree, as arrays; a node follows its parent."""
    return [_node_row(node) for node in tree[:MAX_NODES]]


def _node_row(node: PrefixNode) -> list[Any]:
    worst = max(node.lost, key=lambda cause: node.lost[cause], default=None)
    return [
        node.parent,
        cut(node.label, 200),
        cut(node.text, 200),
        node.first,
        node.num_requests,
        node.num_tokens,
        node.prefix_tokens,
        node.total,
        node.num_own,
        node.num_read,
        "" if worst is None else str(worst),
        sum(node.lost.values()),
        node.num_merged,
    ]


def agreement_rows(tables: Mapping[str, Any]) -> dict[str, Any] | None:
    """Predicted against billed tokens, verdicts of both, and outliers."""
    agreement = tables.get("agreement") or {}
    compared = [(name, agreement[name]) for name in ("reads", "writes") if agreement.get(name)]
    verdicts = agreement.get("verdicts") or {}
    matrix: Mapping[str, Mapping[str, int]] = verdicts.get("matrix") or {}
    columns = sorted({*matrix, *(name for row in matrix.values() for name in row)})
    if not compared and not matrix:
        return None
    outliers = [(name, row) for name, table in compared for row in table.get("outliers", ())]
    return {
        "counts": compared,
        "verdicts": verdicts,
        "columns": columns,
        "matrix": [
            (name, [(column, row.get(column, 0)) for column in columns])
            for name, row in sorted(matrix.items())
        ],
        "outliers": outliers[:MAX_OUTLIERS],
    }


def quality_rows(quality: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was read and what was not, as text; the counts of requests are figures already."""
    return [
        (name.removeprefix("num_").removeprefix("is_").replace("_", " "), _listed(value))
        for name, value in quality.items()
        if name != "num_requests" and not name.startswith("num_with_")
    ]


def _listed(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{key}: {_plain(item)}" for key, item in list(value.items())[:20]) or "none"
        )
    if isinstance(value, list | tuple):
        more = f", … {len(value) - 20} more" if len(value) > 20 else ""
        return (", ".join(map(_place, value[:20])) + more) or "none"
    return _plain(value)


def _place(value: object) -> str:
    """A file and its line, or a word."""
    return " line ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return cut(str(value), 200)


def cut(text: str, length: int) -> str:
    """The start of a text, with an ellipsis where something is left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


def width(value: float, most: float) -> float:
    """A bar in percent of the longest."""
    return round(100 * max(0.0, min(1.0, value / most)), 2) if most else 0.0
