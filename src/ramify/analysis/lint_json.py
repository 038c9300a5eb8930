"""The JSON of `ramify lint`, schema 1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ramify.analysis.verdicts import SCHEMA, Finding, LintReport, Verdict


def report_as_json(report: LintReport) -> dict[str, Any]:
    """A report with the keys of the contract; `interrupted` only if Ctrl-C has cut it short."""
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "num_requests": report.num_requests,
        "provider": report.provider,
        "capacity": report.capacity_tokens,
        "verdicts": [verdict_as_json(verdict) for verdict in report.verdicts],
        "findings": [finding_as_json(finding) for finding in report.findings],
        "observations": [finding_as_json(item) for item in report.observations],
        "saving_all": asdict(report.saving_all),
        "quality": report.quality,
        "tables": report.tables,
    }
    if report.interrupted:
        out["interrupted"] = report.interrupted
    return out


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict; `index` only where a line has several requests."""
    out: dict[str, Any] = {"file": verdict.file, "line": verdict.line}
    if verdict.index is not None:
        out["index"] = verdict.index
    out["best_match_file"] = verdict.best_match_file
    out["best_match_line"] = verdict.best_match_line
    if verdict.best_match_index is not None:
        out["best_match_index"] = verdict.best_match_index
    out["divergence"] = None if verdict.divergence is None else asdict(verdict.divergence)
    out["causes"] = [
        {**asdict(cause), "cause": str(cause.cause), "certainty": str(cause.certainty)}
        for cause in verdict.causes
    ]
    out["tokens"] = asdict(verdict.tokens)
    return out


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """A finding."""
    return {
        **asdict(finding),
        "cause": str(finding.cause),
        "certainty": str(finding.certainty),
        "note": finding.note,
    }
