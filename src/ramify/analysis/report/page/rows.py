"""Rows of the HTML report: an analysis cut and scaled for its template.

The page is bounded: at most MAX_FINDINGS findings, MAX_SESSIONS sessions of MAX_ROWS requests,
MAX_NODES boxes, and texts of MAX_TEXT characters, whatever the size of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.analysis.report.document import (
    Analysis,
    PrefixNode,
    Session,
    TimelineRequest,
    WaterfallStep,
    finding_anchor,
)
from ramify.analysis.report.wording.causes import CAUSES, CauseText
from ramify.analysis.report.wording.numbers import count, duration, percent
from ramify.analysis.report.wording.quotes import Marks, mark_changes, mark_quotes
from ramify.analysis.verdicts import Finding

MAX_FINDINGS = 100
MAX_SESSIONS = 20
MAX_ROWS = 60
MAX_NODES = 5000
MAX_TEXT = 2000
MAX_OUTLIERS = 50
MIN_GAP_S = 60.0  # a shorter gap is not drawn


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding with its explanation; widths in percent of the greatest saving."""

    finding: Finding
    anchor: str
    about: CauseText
    marks: Marks
    width: float
    high_width: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A bar of a timeline; widths in percent of the session's longest prompt."""

    request: TimelineRequest
    width: float
    read: float
    written: float
    label: str
    gap: str  # empty where none is drawn
    gap_s: float
    marks: Marks | None


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session with its first requests."""

    name: str
    is_inferred: bool
    num_requests: int
    tokens_lost: int
    rows: tuple[RequestRow, ...]
    num_left_out: int


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """A bar from a level to the next, in percent of the chart."""

    name: str
    kind: str  # level, gain, loss or unexplained
    x: float
    width: float
    text: str
    detail: str

    @property
    def is_unexplained(self) -> bool:
        """Whether the step is what no other step accounts for."""
        return self.kind == "unexplained"


def finding_rows(findings: Sequence[Finding]) -> list[FindingRow]:
    """The findings that the page shows."""
    most = max((max(finding.saving.high, 1) for finding in findings), default=1)
    return [
        FindingRow(
            finding=finding,
            anchor=finding_anchor(finding, number),
            about=CAUSES[finding.cause],
            marks=mark_quotes(
                cut(finding.example.had, MAX_TEXT),
                cut(finding.example.got, MAX_TEXT),
                finding.segment,
            ),
            width=_width(finding.saving.tokens, most),
            high_width=_width(finding.saving.high, most),
        )
        for number, finding in enumerate(findings[:MAX_FINDINGS])
    ]


def session_rows(sessions: Sequence[Session]) -> list[SessionRow]:
    """The sessions that the page shows."""
    out = []
    for session in sessions[:MAX_SESSIONS]:
        requests = session.requests[:MAX_ROWS]
        longest = max((request.num_input for request in requests), default=0)
        out.append(
            SessionRow(
                name=session.name,
                is_inferred=session.is_inferred,
                num_requests=session.num_requests,
                tokens_lost=session.tokens_lost,
                rows=tuple(_request_row(request, longest) for request in requests),
                num_left_out=session.num_requests - len(requests),
            )
        )
    return out


def _request_row(request: TimelineRequest, longest: int) -> RequestRow:
    share = request.num_read / request.num_input if request.num_input else 0.0
    label = f"{count(request.num_input)} tokens, {percent(share)} read"
    if request.source != "usage":
        label += f" ({request.source})"
    has_gap = request.gap_s is not None and request.gap_s >= MIN_GAP_S
    return RequestRow(
        request=request,
        width=_width(request.num_input, longest),
        read=_width(request.num_read, longest),
        written=_width(request.num_written or 0, longest),
        label=label,
        gap=duration(request.gap_s or 0.0) if has_gap else "",
        gap_s=request.gap_s or 0.0,
        marks=mark_changes(cut(request.had, MAX_TEXT), cut(request.got, MAX_TEXT))
        if request.had or request.got
        else None,
    )


def waterfall_rows(steps: Sequence[WaterfallStep]) -> list[WaterfallRow]:
    """Bars on a scale that ends at the highest level."""
    levels = [step.level for step in steps] + [step.level - step.change for step in steps]
    most = max([*levels, 1e-9])
    out = []
    for step in steps:
        before = 0.0 if step.is_level else step.level - step.change
        low, high = sorted((max(0.0, before), max(0.0, step.level)))
        kind = "level" if step.is_level else "gain" if step.change > 0 else "loss"
        if step.name.startswith("unexplained"):
            kind = "unexplained"
        points = f"{100 * step.change:+.1f} points"
        out.append(
            WaterfallRow(
                name=step.name,
                kind=kind,
                x=_width(low, most),
                width=max(0.3, _width(high - low, most)),
                text=percent(step.level) if step.is_level else points,
                detail=step.detail,
            )
        )
    return out


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


def what_if_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """Fixes to tick: the bit in the mask, and how the finding is called."""
    if analysis.what_if is None:
        return []
    out = []
    for bit, number in enumerate(analysis.what_if.findings):
        finding = analysis.lint.findings[number]
        title = CAUSES[finding.cause].title
        out.append({"bit": bit, "title": title, "segment": finding.segment})
    return out


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
    out = []
    for name, value in quality.items():
        if name == "num_requests" or name.startswith("num_with_"):
            continue
        shown = name.removeprefix("num_").removeprefix("is_").replace("_", " ")
        if isinstance(value, Mapping):
            parts = [f"{key}: {_plain(item)}" for key, item in list(value.items())[:20]]
            out.append((shown, ", ".join(parts) or "none"))
        elif isinstance(value, list | tuple):
            parts = [
                " line ".join(str(part) for part in item)
                if isinstance(item, list | tuple)
                else str(item)
                for item in value[:20]
            ]
            more = f", … {len(value) - 20} more" if len(value) > 20 else ""
            out.append((shown, (", ".join(parts) + more) or "none"))
        else:
            out.append((shown, _plain(value)))
    return out


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


def _width(value: float, most: float) -> float:
    return round(100 * max(0.0, min(1.0, value / most)), 2) if most else 0.0
