"""Two runs of `ramify analyze --json` compared: before and after a change, or last week and this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify.analysis.report.document import KIND, SCHEMA
from ramify.analysis.report.wording.numbers import count, percent
from ramify.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Change:
    """A number in both runs; None where a run lacks it."""

    name: str
    before: float | None
    after: float | None
    is_share: bool
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and what not."""

    before: str  # title
    after: str
    changes: tuple[Change, ...]
    gone: tuple[str, ...]  # findings, as `clock in system`
    new: tuple[str, ...]
    kept: tuple[Change, ...]  # findings of both runs, by share of the input that is lost


def read_earlier(path: Path) -> dict[str, Any]:
    """The document of an earlier run.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be compared with: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigError(f"{path} is no report; write one with `ramify analyze LOG --json FILE`")
    if document.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {document.get('schema')!r}, this version reads {SCHEMA}; write it "
            "again with this version"
        )
    return document


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """What changed from one run to the other; shares, since the logs differ in size."""
    rates = [
        Change(
            f"hit rate, {name.replace('_', ' ')}",
            _share(before, name),
            _share(after, name),
            is_share=True,
            higher_is_better=True,
        )
        for name in ("reported", "by_rule", "possible")
    ]
    lost, again = _lost_by_finding(before), _lost_by_finding(after)
    changes = (
        Change("requests", _get(before, "num_requests"), _get(after, "num_requests"), False, True),
        Change("input tokens", _get(before, "num_input"), _get(after, "num_input"), False, True),
        *rates,
        Change("lost, of the input", _part(before), _part(after), True, False),
    )
    return Comparison(
        before=str(before.get("title", "")),
        after=str(after.get("title", "")),
        changes=tuple(each for each in changes if (each.before, each.after) != (None, None)),
        gone=tuple(name for name in lost if name not in again),
        new=tuple(name for name in again if name not in lost),
        kept=tuple(
            Change(name, lost[name], again[name], is_share=True, higher_is_better=False)
            for name in lost
            if name in again
        ),
    )


def _get(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    return value if isinstance(value, int | float) else None


def _share(document: Mapping[str, Any], name: str) -> float | None:
    rates = document.get("rates")
    rate = rates.get(name) if isinstance(rates, dict) else None
    return _get(rate, "share") if isinstance(rate, dict) else None


def _part(document: Mapping[str, Any]) -> float | None:
    lost, total = _get(document, "tokens_lost"), _get(document, "num_input")
    return None if lost is None or not total else lost / total


def _lost_by_finding(document: Mapping[str, Any]) -> dict[str, float]:
    total = _get(document, "num_input") or 1
    shares: dict[str, float] = {}
    for item in document.get("findings") or ():
        if isinstance(item, dict):
            name = f"{item.get('cause')} in {item.get('segment') or 'the log'}"
            shares[name] = shares.get(name, 0.0) + (_get(item, "tokens_lost") or 0.0) / total
    return shares


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table of the numbers, then the findings that came and went."""
    console.print()
    console.print(Text(f"Compared with {comparison.before}:", style="bold"))
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for change in (*comparison.changes, *comparison.kept):
        table.add_row(
            change.name,
            _number(change, change.before),
            _number(change, change.after),
            _sign(change),
        )
    console.print(table)
    for words, names in (("gone", comparison.gone), ("new", comparison.new)):
        for name in names:
            console.print(Text(f"{words}: {name}"))


def _number(change: Change, value: float | None) -> str:
    if value is None:
        return "-"
    return percent(value) if change.is_share else count(value)


def _sign(change: Change) -> str:
    if change.before is None or change.after is None or not change.is_share:
        return ""
    difference = change.after - change.before
    if abs(difference) < 0.0005:
        return "same"
    return "better" if (difference > 0) is change.higher_is_better else "worse"
