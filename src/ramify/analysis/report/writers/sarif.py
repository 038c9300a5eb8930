"""Findings as SARIF 2.1.0, which code-scanning services annotate logs and prompts with."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ramify.analysis.report.document import Analysis
from ramify.analysis.report.wording.causes import CAUSES
from ramify.analysis.report.wording.numbers import count, lost_words
from ramify.analysis.verdicts import CauseName, Certainty, Finding

SCHEMA_URI = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Certainty.PROVED: "warning", Certainty.LIKELY: "warning", Certainty.SUSPECTED: "note"}


def analysis_as_sarif(analysis: Analysis) -> dict[str, Any]:
    """A log with one run; a result for each finding, at the line of its example."""
    causes = list(dict.fromkeys(finding.cause for finding in analysis.lint.findings))
    return {
        "$schema": SCHEMA_URI,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "ramify analyze",
                        "version": analysis.version,
                        "rules": [_rule(cause) for cause in causes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [
                    _result(finding, causes.index(finding.cause))
                    for finding in analysis.lint.findings
                ],
            }
        ],
    }


def _rule(cause: CauseName) -> dict[str, Any]:
    return {
        "id": str(cause),
        "shortDescription": {"text": CAUSES[cause].title},
        "defaultConfiguration": {"level": "warning"},
    }


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    place = f" in {finding.segment}" if finding.segment else ""
    example, saving, partner = finding.example, finding.saving, finding.partner
    quotes = f" Had {example.had!r}, got {example.got!r}." if example.had or example.got else ""
    text = (
        f"{CAUSES[finding.cause].title}{place} ({finding.certainty}): "
        f"{lost_words(finding)}; mending saves {count(saving.tokens)}.{quotes} "
        f"{finding.note}{' ' if finding.note else ''}{finding.change}"
    )
    # The place, not the quotes: they differ in every log.
    identity = blake2b(f"{finding.cause} {finding.segment}".encode(), digest_size=16).hexdigest()
    result: dict[str, Any] = {
        "ruleId": str(finding.cause),
        "ruleIndex": rule,
        "level": LEVELS[finding.certainty],
        "message": {"text": text},
        "partialFingerprints": {"causeAndSegment/v1": identity},
        "properties": {
            "certainty": str(finding.certainty),
            "segment": finding.segment,
            "tokensLost": finding.tokens_lost,
            "savingTokens": saving.tokens,
            "savingTokensWithPartner": None if partner is None else partner.saving.tokens,
        },
    }
    if example.file:
        result["locations"] = [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(example.file)},
                    "region": {"startLine": max(1, example.line)},
                },
                "logicalLocations": [{"fullyQualifiedName": finding.segment or "log"}],
            }
        ]
    return result


def _uri(file: str) -> str:
    """A file's name as a relative reference, or as an absolute file URI."""
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
