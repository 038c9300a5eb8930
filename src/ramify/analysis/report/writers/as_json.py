"""`ramify analyze --json`: the analysis without verdicts, which `ramify lint --json` has."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ramify.analysis.lint_json import finding_as_json
from ramify.analysis.report.document import KIND, SCHEMA, Analysis


def analysis_as_json(analysis: Analysis) -> dict[str, Any]:
    """A document of schema 1; see docs/analysis.md for its keys."""
    lint = analysis.lint
    document = asdict(analysis)
    del document["lint"]
    document |= {
        "schema": SCHEMA,
        "kind": KIND,
        "rates": {rate.name: asdict(rate) | {"share": rate.share} for rate in analysis.rates},
        "num_requests": lint.num_requests,
        "tokens_lost": analysis.tokens_lost,
        "provider": lint.provider,
        "capacity": lint.capacity_tokens,
        "findings": [finding_as_json(finding) for finding in lint.findings],
        "observations": [finding_as_json(item) for item in lint.observations],
        "saving_all": asdict(lint.saving_all),
        "quality": lint.quality,
        "tables": lint.tables,
    }
    head = ("schema", "kind", "title", "created", "version", "num_requests", "num_input")
    ordered = {name: document.pop(name) for name in head}
    # Enums become strings, as a reader of the file gets them.
    plain: dict[str, Any] = json.loads(json.dumps(ordered | document))
    return plain
