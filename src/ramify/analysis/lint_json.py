"""The JSON of `ramify lint`, schema 1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ramify.analysis.verdicts import SCHEMA, Cause, Finding, LintReport, Verdict


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
    out["causes"] = [cause_as_json(cause) for cause in verdict.causes]
    out["tokens"] = asdict(verdict.tokens)
    return out


def cause_as_json(cause: Cause) -> dict[str, Any]:
    """A cause; `kind` only of a value that changes, `rule` only where one takes it out."""
    return _without_unset(asdict(cause))


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """A finding; `kind` only of a value that changes, `rule` only where one takes it out."""
    return {**_without_unset(asdict(finding)), "note": finding.note}


def _without_unset(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a cause with plain texts, without a kind that is None and a rule that is empty."""
    for name in ("cause", "certainty", "kind"):
        values[name] = None if values[name] is None else str(values[name])
    if values["kind"] is None:
        del values["kind"]
    if not values["rule"]:
        del values["rule"]
    return values
