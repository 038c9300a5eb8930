"""Limits for CI: a TOML file with what a log may lose at most."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from ramify.analysis.report.document import Analysis
from ramify.analysis.report.wording.numbers import money, percent
from ramify.analysis.verdicts import OBSERVED, CauseName, Certainty
from ramify.counts import counted
from ramify.errors import ConfigError
from ramify.reasons import reason_of

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Dollars = Annotated[float, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits; None: no limit. Shares are of all input tokens, from 0 to 1."""

    max_lost_share: Share | None = None  # tokens lost to causes that can be mended
    max_saving_share: Share | None = None  # tokens that mending all findings saves
    max_saving_money: Dollars | None = None  # US dollars
    min_hit_rate: Share | None = None  # reported where usage is logged, else by rule
    min_possible_hit_rate: Share | None = None
    max_bad_lines: Count | None = None
    max_findings: Count | None = None  # of `certainty` or surer
    certainty: Certainty = Certainty.PROVED  # of findings that count for causes
    forbidden_causes: tuple[CauseName, ...] = ()


A_SHARE, A_COUNT = "a share, from 0 to 1", "a whole number, 0 or more"
# What each key takes.
LIMITS = {
    "max_lost_share": A_SHARE,
    "max_saving_share": A_SHARE,
    "max_saving_money": "US dollars, 0 or more",
    "min_hit_rate": A_SHARE,
    "min_possible_hit_rate": A_SHARE,
    "max_bad_lines": A_COUNT,
    "max_findings": A_COUNT,
    "certainty": f"one of {', '.join(Certainty)}",
    "forbidden_causes": "a list of causes",
}


def read_budget(path: Path) -> Budget:
    """The limits of a file.

    Raises:
        ConfigError: the file cannot be read, or has a key or a value that cannot be.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the budget {path} cannot be read: {reason_of(error, path)}") from error
    for name, value in values.items():
        if name not in LIMITS:
            raise ConfigError(
                f"the budget {path} has the unknown key {name}; the keys are {', '.join(LIMITS)}"
            )
        try:
            msgspec.convert({name: value}, Budget)
        except msgspec.ValidationError as error:
            wrong, allowed = _refused(name, value)
            raise ConfigError(
                f"the budget {path} has {name} = {wrong!r} but it must be {allowed}"
            ) from error
    return msgspec.convert(values, Budget)


def _refused(name: str, value: object) -> tuple[object, str]:
    """The value that cannot be, the first of a list of causes, and what is possible."""
    if name != "forbidden_causes":
        return value, LIMITS[name]
    causes = list(CauseName)
    if not isinstance(value, list):
        return value, f"a list of causes: {', '.join(causes)}"
    unknown = [cause for cause in value if cause not in causes]
    return unknown[0], f"a list of causes: {', '.join(causes)}"


def check_budget(budget: Budget, analysis: Analysis) -> tuple[str, ...]:
    """Why the log is over its budget; empty if it is not."""
    lint, order = analysis.lint, list(Certainty)
    saving, num_bad = lint.saving_all, len(lint.quality.get("bad_lines", ()))
    findings = [
        finding
        for finding in (*lint.findings, *lint.observations)
        if order.index(finding.certainty) <= order.index(budget.certainty)
    ]
    num_findings = sum(finding.cause not in OBSERVED for finding in findings)
    base = analysis.rate("reported") or analysis.rate("by_rule")
    possible = analysis.rate("possible")
    lost = analysis.tokens_lost / max(1, analysis.num_input)
    saved = saving.tokens / max(1, analysis.num_counted)
    upper: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("of the input lost", lost, budget.max_lost_share, percent),
        ("of the input saved by mending", saved, budget.max_saving_share, percent),
        ("saved by mending", saving.money, budget.max_saving_money, money),
        ("bad lines", num_bad, budget.max_bad_lines, "{:,}".format),
        ("findings", num_findings, budget.max_findings, "{:,}".format),
    ]
    lower = [
        ("hit rate", base, budget.min_hit_rate),
        ("possible hit rate", possible, budget.min_possible_hit_rate),
    ]
    return (
        *(
            f"{as_text(value)} {name}; the budget is {as_text(limit)}"
            for name, value, limit, as_text in upper
            if limit is not None and value is not None and value > limit
        ),
        *(
            f"{name} {percent(rate.share)}; the budget is at least {percent(limit)}"
            for name, rate, limit in lower
            if limit is not None and rate is not None and rate.share < limit
        ),
        *(
            f"{finding.cause} in {finding.segment or 'the log'} is forbidden: "
            f"{counted(finding.num_requests, 'request')}, e.g. line {finding.example.line}"
            for finding in findings
            if finding.cause in budget.forbidden_causes
        ),
    )
