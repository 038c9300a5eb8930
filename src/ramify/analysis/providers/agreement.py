"""Tables for the report: what the rule predicts, what was billed, and what vendors say themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ramify.analysis.corpus import StoredRequest
from ramify.analysis.providers.money import billed_usage
from ramify.analysis.providers.prompts import Billed, Prediction, ReplayPrompt
from ramify.analysis.providers.replay import CacheModel
from ramify.analysis.providers.rules import ModelRule, Rules
from ramify.analysis.records import LoggedRequest
from ramify.analysis.verdicts import Verdict

MAX_OUTLIERS = 20
OUTLIER_SHARE = 0.1  # of a request's input, between predicted and billed reads
NO_DIFFERENCE = "no_difference"
OTHER_SETTING = "setting_changed"

# Vendors' reasons in the words of the confusion matrix; what is absent keeps its name.
_PLAIN_REASONS = {
    "cache_hit": NO_DIFFERENCE,
    "hit": NO_DIFFERENCE,
    "none": NO_DIFFERENCE,
    "input_changed": "messages_changed",
    "context_compacted": "messages_changed",
    "text_format_changed": OTHER_SETTING,
    "reasoning_effort_changed": OTHER_SETTING,
    "verbosity_changed": OTHER_SETTING,
    "service_tier_changed": OTHER_SETTING,
}
_NO_REASONS = frozenset({"unavailable", "previous_message_not_found", "pending", "null"})


@dataclass(frozen=True, slots=True)
class Judged:
    """A request as the report has it: the prediction, and where the text differs, if it does."""

    info: LoggedRequest
    prediction: Prediction
    rule: ModelRule
    divergence: str | None = None  # segment of the first difference from the best match
    causes: tuple[str, ...] = ()


def judged_tables(judged: Sequence[Judged]) -> dict[str, Any]:
    """Tokens and money by the rule and as billed, and how far the two, and the reasons, agree."""
    predicted = [item.prediction.billed for item in judged]
    billed = [billed_usage(item.info.usage, item.rule, item.info) for item in judged]
    known = [bill for bill in billed if bill is not None]
    models: dict[str, list[Billed]] = {}
    for item in judged:
        models.setdefault(item.info.model or "", []).append(item.prediction.billed)
    by_model = {name: _totals(bills) for name, bills in sorted(models.items())}
    return {
        "predicted": {**_totals(predicted), "by_model": by_model},
        "billed": _totals(known) if known else None,
        "agreement": {
            "reads": _compare(judged, "num_read"),
            "writes": _compare(judged, "num_written"),
            "verdicts": _confusion(judged),
        },
    }


def _totals(bills: Sequence[Billed]) -> dict[str, Any]:
    num_input = sum(bill.num_input for bill in bills)
    num_read = sum(bill.num_read for bill in bills)
    prices = [bill.money for bill in bills]
    return {
        "num_requests": len(bills),
        "num_input": num_input,
        "num_read": num_read,
        "num_written": sum(bill.num_written for bill in bills),
        "num_written_1h": sum(bill.num_written_1h for bill in bills),
        "num_ordinary": sum(bill.num_ordinary for bill in bills),
        "hit_rate": num_read / num_input if num_input else None,
        "money": None if None in prices else sum(price for price in prices if price is not None),
    }


def _compare(judged: Sequence[Judged], counter: str) -> dict[str, Any] | None:
    """Errors as shares of each request's input, predicted less billed; None without usage.

    Predicted counts are in the tokens of the bill: the share of the counted prompt times the billed input.
    """
    rows = []
    for item in judged:
        usage, predicted = item.info.usage, item.prediction.billed
        billed = getattr(usage, counter)
        if billed is None or not usage.num_input or not predicted.num_input:
            continue
        share = getattr(predicted, counter) / predicted.num_input
        ours = round(share * usage.num_input)
        rows.append((share - billed / usage.num_input, ours, billed, item))
    if not rows:
        return None
    errors = np.array([row[0] for row in rows])
    worst = sorted(rows, key=lambda row: -abs(row[0]))[:MAX_OUTLIERS]
    return {
        "num_compared": len(rows),
        "predicted": sum(row[1] for row in rows),
        "billed": sum(row[2] for row in rows),
        "mean_error": float(errors.mean()),
        "mean_absolute_error": float(np.abs(errors).mean()),
        "share_within_0.1": float((np.abs(errors) <= OUTLIER_SHARE).mean()),
        "outliers": [
            {
                "file": item.info.file,
                "line": item.info.line,
                "index": item.info.index,
                "predicted": ours,
                "billed": billed,
                "num_input": item.info.usage.num_input,
                "error": error,
                "causes": list(item.causes),
            }
            for error, ours, billed, item in worst
            if abs(error) > OUTLIER_SHARE
        ],
    }


def _confusion(judged: Iterable[Judged]) -> dict[str, Any] | None:
    """Counts by the vendor's reason, then by ours; None if the vendor gives no reasons.

    With a single reason in the log, agreement says nothing: `num_reasons` tells.
    """
    matrix: dict[str, Counter[str]] = {}
    for item in judged:
        verdict = item.info.verdict
        if verdict is None or verdict.reason in _NO_REASONS:
            continue
        reason = _PLAIN_REASONS.get(verdict.reason, verdict.reason)
        matrix.setdefault(reason, Counter())[our_reason(item.divergence, item.causes)] += 1
    if not matrix:
        return None
    total = sum(counts.total() for counts in matrix.values())
    equal = sum(counts[reason] for reason, counts in matrix.items())
    return {
        "num_compared": total,
        "num_equal": equal,
        "num_reasons": len(matrix),
        "matrix": {
            reason: dict(sorted(counts.items())) for reason, counts in sorted(matrix.items())
        },
    }


def our_reason(divergence: str | None, causes: Sequence[str] = ()) -> str:
    """The reason of a vendor's that our comparison of texts amounts to."""
    if "cache_key_scattered" in causes:
        return "prompt_cache_key_changed"
    if "model_changed" in causes or divergence == "settings.model":
        return "model_changed"
    if divergence is None:
        return NO_DIFFERENCE
    if divergence.startswith("settings."):
        return OTHER_SETTING
    head = divergence.partition("[")[0].partition(".")[0]
    return {"tools": "tools_changed", "system": "system_changed"}.get(head, "messages_changed")


def rules_table(rules: Rules, used: Iterable[tuple[str, str | None]]) -> dict[str, Any]:
    """Date and sources of the rules, and those of the providers and models in the log.

    Args:
        rules: of all providers.
        used: provider and model of each request.
    """
    models, notes, sources = [], [], list(rules.sources)
    requests = Counter(used)
    providers: Counter[str] = Counter()
    for (provider, _), number in requests.items():
        providers[provider] += number
    for provider, model in sorted(requests, key=str):
        rule = rules.priced_rule_of(provider, model)
        models.append({"provider": provider, "model": model, "rule": msgspec.to_builtins(rule)})
        name = f"{provider}: {model or 'no model'}"
        if len(rules.providers[provider]) > 1 and rules.is_default(provider, model):
            notes.append(f"{name}: no rule of its own, the provider's default is taken")
        if rule.note:
            notes.append(f"{name}: {rule.note}")
        if rules.prices is not None and rule is not rules.rule_of(provider, model):
            notes.append(f"{name}: no price in the file of rules, that of a library is taken")
            if rules.prices.source not in sources:
                sources.append(rules.prices.source)
    return {
        "date": rules.date,
        "sources": sources,
        "providers": dict(providers.most_common()),  # requests under the rules of each
        "models": models,
        "notes": notes,
    }


def report_tables(
    model: CacheModel,
    requests: Sequence[StoredRequest],
    predictions: Mapping[int, Prediction],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    """`LintReport.tables`: `predicted`, `billed`, `agreement` and `rules`.

    Args:
        model: the cache rules.
        requests: those of the verdicts, in the same order.
        predictions: by the request's number.
        verdicts: what the comparison of texts says.
    """
    judged = [
        Judged(
            request.info,
            predictions[request.number],
            model.rule_of(ReplayPrompt.of(request)),
            verdict.divergence.segment if verdict.divergence else None,
            tuple(str(cause.cause) for cause in verdict.causes),
        )
        for request, verdict in zip(requests, verdicts, strict=True)
    ]
    used = ((model.provider_of(item.info), item.info.model) for item in judged)
    return {**judged_tables(judged), "rules": rules_table(model.rules, used)}
