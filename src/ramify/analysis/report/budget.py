"""Limits for CI: a TOML file with what a log may lose at most."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ramify.analysis.report.document import Analysis
from ramify.analysis.report.wording.numbers import money, percent
from ramify.analysis.verdicts import OBSERVED, CauseName, Certainty
from ramify.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits; None: no limit. Shares are of all input tokens, from 0 to 1."""

    max_lost_share: float | None = None  # tokens lost to causes that can be mended
    max_saving_share: float | None = None  # tokens that mending all findings saves
    max_saving_money: float | None = None  # US dollars
    min_hit_rate: float | None = None  # reported where usage is logged, else by rule
    min_possible_hit_rate: float | None = None
    max_bad_lines: int | None = None
    max_findings: int | None = None  # of `certainty` or surer
    certainty: Certainty = Certainty.PROVED  # of findings that count for causes
    forbidden_causes: tuple[CauseName, ...] = ()


_SHARES = ("max_lost_share", "max_saving_share", "min_hit_rate", "min_possible_hit_rate")
_COUNTS = ("max_bad_lines", "max_findings")


def read_budget(path: Path) -> Budget:
    """The limits of a file.

    Raises:
        ConfigError: the file cannot be read, or has a key or a value that cannot be.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the budget {path} cannot be read: {error}") from error
    known = [field.name for field in fields(Budget)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"the budget {path} has the unknown key {name!r}; the keys are {', '.join(known)}"
            )
    return Budget(**{name: _value(path, name, value) for name, value in values.items()})


def _value(path: Path, name: str, value: Any) -> Any:
    if name == "certainty":
        return _name_of(path, name, value, Certainty)
    if name == "forbidden_causes":
        if not isinstance(value, list):
            raise ConfigError(f"the budget {path} has {name} = {value!r}; it must be a list")
        return tuple(_name_of(path, name, item, CauseName) for item in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _COUNTS and (not isinstance(value, int) or not is_number or value < 0):
        raise ConfigError(f"the budget {path} has {name} = {value!r}; it must be a whole number")
    if name in _SHARES and (not is_number or not 0 <= value <= 1):
        raise ConfigError(
            f"the budget {path} has {name} = {value!r}; it must be a share from 0 to 1"
        )
    if not is_number:
        raise ConfigError(f"the budget {path} has {name} = {value!r}; it must be a number")
    return value


def _name_of(
    path: Path, key: str, value: Any, names: type[Certainty | CauseName]
) -> Certainty | CauseName:
    if value not in [str(name) for name in names]:
        raise ConfigError(
            f"the budget {path} has {key} = {value!r}; choose from {', '.join(names)}"
        )
    return names(value)


def check_budget(budget: Budget, analysis: Analysis) -> tuple[str, ...]:
    """Why the log is over its budget; empty if it is not."""
    num_input = max(1, analysis.num_input)
    saving = analysis.lint.saving_all
    num_counted = max(1, analysis.num_counted)
    order = list(Certainty)
    findings = [
        finding
        for finding in (*analysis.lint.findings, *analysis.lint.observations)
        if order.index(finding.certainty) <= order.index(budget.certainty)
    ]
    base = analysis.rate("reported") or analysis.rate("by_rule")
    possible = analysis.rate("possible")
    reasons = [
        _above("tokens lost", analysis.tokens_lost / num_input, budget.max_lost_share),
        _above("tokens that mending saves", saving.tokens / num_counted, budget.max_saving_share),
        _below("hit rate", None if base is None else base.share, budget.min_hit_rate),
        _below(
            "possible hit rate",
            None if possible is None else possible.share,
            budget.min_possible_hit_rate,
        ),
    ]
    limit = budget.max_saving_money
    if limit is not None and saving.money is not None and saving.money > limit:
        reasons.append(f"mending saves {money(saving.money)}; the budget is {money(limit)}")
    num_bad = len(analysis.lint.quality.get("bad_lines", ()))
    if budget.max_bad_lines is not None and num_bad > budget.max_bad_lines:
        reasons.append(f"{num_bad:,} bad lines; the budget is {budget.max_bad_lines:,}")
    num_findings = sum(finding.cause not in OBSERVED for finding in findings)
    if budget.max_findings is not None and num_findings > budget.max_findings:
        reasons.append(f"{num_findings:,} findings; the budget is {budget.max_findings:,}")
    reasons += [
        f"{finding.cause} in {finding.segment or 'the log'} is forbidden: "
        f"{finding.num_requests:,} requests, e.g. line {finding.example.line}"
        for finding in findings
        if finding.cause in budget.forbidden_causes
    ]
    return tuple(reason for reason in reasons if reason)


def _above(name: str, share: float, limit: float | None) -> str:
    if limit is None or share <= limit:
        return ""
    return f"{name}: {percent(share)} of the input; the budget is {percent(limit)}"


def _below(name: str, share: float | None, limit: float | None) -> str:
    if limit is None or share is None or share >= limit:
        return ""
    return f"{name}: {percent(share)}; the budget is at least {percent(limit)}"
