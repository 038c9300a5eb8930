"""Analyses made by hand: every part of the report has something to show."""

from __future__ import annotations

from ramify.analysis.report.document import (
    Analysis,
    Curve,
    CurvePoint,
    Curves,
    HitRate,
    PrefixNode,
    Session,
    TimelineRequest,
    WaterfallStep,
)
from ramify.analysis.verdicts import (
    CauseName,
    Certainty,
    Example,
    Finding,
    LintReport,
    Saving,
)

CLOCK = ("Today is 2026-11-02 09:14:07.", "Today is 2026-11-02 09:15:31.")
TOOLS = ('{"name":"search"}', '{"name":"open_file"}')


def sample_analysis(had: str = CLOCK[0], got: str = CLOCK[1]) -> Analysis:
    """An analysis of 4,800 requests; the two texts are quoted wherever quotes are."""
    findings = (
        _finding(
            CauseName.CLOCK, Certainty.PROVED, "system[0]", 3100, 9_400_000, 8_900_000, had, got
        ),
        _finding(
            CauseName.TOOL_ORDER, Certainty.PROVED, "tools[*]", 900, 4_100_000, 3_950_000, *TOOLS
        ),
        _finding(CauseName.TTL_EXPIRED, Certainty.LIKELY, "", 220, 700_000, 610_000, "", ""),
        _finding(CauseName.ROUTING, Certainty.SUSPECTED, "", 90, 210_000, 180_000, "", ""),
    )
    return Analysis(
        title="gateway.jsonl",
        created="2026-11-25T06:00:00Z",
        version="0.1.0",
        lint=LintReport(
            num_requests=4800,
            verdicts=(),
            findings=findings,
            saving_all=Saving(12_900_000, 11_800_000, 13_400_000, 34.83),
            quality={"num_lines": 4812, "num_bad_lines": 12, "bad_lines": [["gateway.jsonl", 17]]},
            provider="anthropic",
            tables=_tables(),
        ),
        num_input=24_300_000,
        num_counted=24_300_000,
        rates=(
            HitRate("reported", 6_200_000, 22_900_000, 4610, "usage's tokens read / input tokens"),
            HitRate("by_rule", 6_500_000, 22_900_000, 4610, "replay under the provider's rule"),
            HitRate("possible", 18_660_000, 22_900_000, 4610, "all causes mended, infinite cache"),
        ),
        duration_s=4.2 * 3600,
        tree=_tree(had),
        sessions=_sessions(had, got),
        curves=_curves(),
        waterfall=(
            WaterfallStep(
                "infinite cache, all mended", 0.815, 0.0, "possible reads", is_level=True
            ),
            WaterfallStep("capacity", 0.79, -0.025, "replay at 5 M tokens"),
            WaterfallStep("lifetime", 0.765, -0.025, "entries of 5 minutes"),
            WaterfallStep("changes of prompts", 0.31, -0.455, "texts as sent"),
            WaterfallStep("rule", 0.284, -0.026, "breakpoints and minimum", is_level=False),
            WaterfallStep("unexplained", 0.271, -0.013, "what no step accounts for"),
            WaterfallStep("reported", 0.271, 0.0, "usage of the log", is_level=True),
        ),
    )


def _finding(
    cause: CauseName,
    certainty: Certainty,
    segment: str,
    num_requests: int,
    lost: int,
    tokens: int,
    had: str,
    got: str,
) -> Finding:
    saving = Saving(tokens, int(tokens * 0.92), int(tokens * 1.05), tokens * 2.7e-6)
    change = "Move what changes to the end of the newest user message."
    example = Example(line=41, had=had, got=got, file="gateway.jsonl")
    return Finding(cause, certainty, segment, num_requests, lost, example, change, saving)


def _tree(text: str) -> tuple[PrefixNode, ...]:
    total = 24_300_000
    rows: list[PrefixNode] = [PrefixNode(-1, "all requests", "", 0, 0, 4800, 0, 0, total, 0)]

    def add(parent: int, label: str, share: float, num_requests: int, read: float) -> int:
        above = rows[parent]
        of_node = int(above.total * share)
        num_tokens = of_node // (2 * num_requests)
        lost = {CauseName.CLOCK: of_node // 4} if read < 0.3 else {}
        if label.startswith("tools"):
            lost = {CauseName.TOOL_ORDER: of_node // 9}
        rows.append(
            PrefixNode(
                parent=parent,
                label=label,
                text=text,
                depth=above.depth + 1,
                first=len(rows),
                num_requests=num_requests,
                num_tokens=num_tokens,
                prefix_tokens=above.prefix_tokens + num_tokens,
                total=of_node,
                num_read=int(read * num_tokens * num_requests),
                lost=lost,
            )
        )
        return len(rows) - 1

    for app, share in enumerate((0.55, 0.3, 0.1)):
        tools = add(0, f"tools[0] app {app}", share, 4000 // (app + 1), 0.9 - 0.3 * app)
        for prompt, part in enumerate((0.6, 0.25)):
            system = add(tools, "system[0]", part, 1000 // (prompt + 1), 0.7 - 0.4 * prompt)
            for message in range(6):
                add(system, f"messages[{message}]", 0.3 / (message + 1), 100, 0.15 * message)
    return tuple(rows)


def _sessions(had: str, got: str) -> tuple[Session, ...]:
    requests = tuple(
        TimelineRequest(
            file="gateway.jsonl",
            line=10 + 3 * at,
            start_s=60.0 * at,
            gap_s=None if at == 0 else (700.0 if at == 4 else 25.0),
            num_input=4000 + 900 * at,
            num_read=0 if at in {0, 4} else 3000 + 900 * (at - 1),
            num_written=900,
            source="usage" if at % 2 else "rule",
            tokens_lost=4000 if at == 4 else 0,
            causes=("clock", "ttl_expired") if at == 4 else (),
            segment="system[0]" if at == 4 else "",
            had=had if at == 4 else "",
            got=got if at == 4 else "",
        )
        for at in range(9)
    )
    return (
        Session("conversation-7f", False, 14, 4000, requests),
        Session("conversation-a2", True, 9, 1200, requests[:3]),
    )


def _curves() -> Curves:
    sizes = (250_000, 500_000, 1e6, 2e6, 5e6, 1e7, 2e7)
    lru = (0.04, 0.09, 0.16, 0.24, 0.31, 0.34, 0.36)
    points = tuple(CurvePoint(at, share) for at, share in zip(sizes, lru, strict=True))
    belady = tuple(
        CurvePoint(at, min(0.37, share + 0.08)) for at, share in zip(sizes, lru, strict=True)
    )
    lifetimes = (
        (60.0, 0.1),
        (300.0, 0.26),
        (600.0, 0.3),
        (1800.0, 0.34),
        (3600.0, 0.36),
        (86400.0, 0.37),
    )
    return Curves(
        by_capacity=(Curve("LRU", points), Curve("Belady", belady)),
        by_lifetime=Curve("lifetime", tuple(CurvePoint(at, share) for at, share in lifetimes)),
        infinite=0.372,
        page_size=16,
        here_share=0.271,
        here_tokens=3.1e6,
        here_lifetime_s=320.0,
        knee_tokens=5e6,
    )


def _tables() -> dict[str, object]:
    compared = {
        "num_compared": 4610,
        "predicted": 6_500_000,
        "billed": 6_200_000,
        "mean_error": 0.013,
        "mean_absolute_error": 0.021,
        "share_within_0.1": 0.94,
        "outliers": [
            {
                "file": "gateway.jsonl",
                "line": 77,
                "index": None,
                "predicted": 4000,
                "billed": 0,
                "num_input": 4090,
                "error": 0.98,
                "causes": ["outside_prompt"],
            }
        ],
    }
    matrix = {
        "system_changed": {"system_changed": 40, "no change": 1},
        "tools_changed": {"tools_changed": 9},
    }
    verdicts = {"num_compared": 50, "num_equal": 49, "num_reasons": 2, "matrix": matrix}
    return {"agreement": {"reads": compared, "writes": None, "verdicts": verdicts}}
