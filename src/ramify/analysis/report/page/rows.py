"""Rows of the HTML report: what its templates draw and a filter cannot say.

The page is bounded as the analysis is; of findings it has MAX_FINDINGS, of a text MAX_TEXT characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.analysis.report.document import PrefixNode, WaterfallStep
from ramify.analysis.verdicts import LintReport

MAX_FINDINGS = 100
MAX_TEXT = 2000
NUM_LEADERS = 10
MAX_LABEL = 200
MAX_LISTED = 20  # of a list of places or a table of counts


def waterfall_bars(steps: Sequence[WaterfallStep]) -> list[dict[str, Any]]:
    """Bars from a level to the next, in percent of the highest level."""
    starts = [0.0 if step.is_level else step.level - step.change for step in steps]
    most = max([*starts, *(step.level for step in steps), 1e-9])
    bars = []
    for step, start in zip(steps, starts, strict=True):
        low, high = sorted((max(0.0, start), max(0.0, step.level)))
        kind = "level" if step.is_level else "gain" if step.change > 0 else "loss"
        if step.name == "unexplained":
            kind = step.name
        size = max(0.3, width(high - low, most))
        bars.append({"step": step, "kind": kind, "x": width(low, most), "width": size})
    return bars


def node_row(node: PrefixNode) -> list[Any]:
    """A box of the sharing tree, as the script reads it."""
    worst = max(node.lost, key=lambda cause: node.lost[cause], default="")
    return [
        node.parent,
        cut(node.label, MAX_LABEL),
        cut(node.text, MAX_LABEL),
        node.first,
        node.num_requests,
        node.num_tokens,
        node.prefix_tokens,
        node.total,
        node.num_own,
        node.num_read,
        str(worst),
        sum(node.lost.values()),
        node.num_merged,
    ]


def leaders(tree: Sequence[PrefixNode]) -> list[PrefixNode]:
    """The prefixes whose sharing saves most tokens."""
    shared = [node for node in tree if node.tokens_saved and not node.label.startswith("settings")]
    return sorted(shared, key=lambda node: -node.tokens_saved)[:NUM_LEADERS]


def provenance_rows(lint: LintReport) -> list[tuple[str, str]]:
    """Where the numbers come from: what was read and what was not, and the rules, as text."""
    rules = lint.tables.get("rules", {})
    rows = [
        (name.replace("num_with_", "requests with ").removeprefix("num_"), value)
        for name, value in lint.quality.items()
    ]
    rows += [(f"{name} of the rules", rules.get(name)) for name in ("date", "sources", "notes")]
    return [(name.replace("_", " "), _listed(value)) for name, value in rows if value is not None]


def _listed(value: object) -> str:
    items = [str(value)]
    if isinstance(value, Mapping):
        items = [f"{key}: {item}" for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [item if isinstance(item, str) else " line ".join(map(str, item)) for item in value]
    more = [f"… {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return ", ".join([*(cut(item, MAX_LABEL) for item in items[:MAX_LISTED]), *more]) or "none"


def cut(text: str, length: int) -> str:
    """The start of a text, with an ellipsis where something is left out."""
    return text if len(text) <= length else text[: length - 1] + "…"


def width(value: float, most: float) -> float:
    """A bar in percent of the longest."""
    return round(100 * max(0.0, min(1.0, value / most)), 2) if most else 0.0
