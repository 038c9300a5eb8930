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

SAME_SHARE = 0.0005  # shares that differ less are equal


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and what not; values are None where a run lacks them."""

    before: str  # title
    sizes: tuple[tuple[str, float, float], ...]
    rates: tuple[tuple[str, float | None, float | None], ...]  # the higher, the better
    lost: tuple[tuple[str, float, float], ...]  # shares of the input, in all and by finding
    gone: tuple[str, ...]  # findings, as `clock in system`
    new: tuple[str, ...]


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
    lost, again = _lost_by_finding(before), _lost_by_finding(after)
    rates = (
        (name, _rate(before, name), _rate(after, name))
        for name in ("reported", "by_rule", "possible")
    )
    return Comparison(
        before=before["title"],
        sizes=(
            ("requests", before["num_requests"], after["num_requests"]),
            ("input tokens", before["num_input"], after["num_input"]),
        ),
        rates=tuple(rate for rate in rates if rate[1:] != (None, None)),
        lost=(
            (
                "lost, of the input",
                _share(before, before["tokens_lost"]),
                _share(after, after["tokens_lost"]),
            ),
            *((name, share, again[name]) for name, share in lost.items() if name in again),
        ),
        gone=tuple(name for name in lost if name not in again),
        new=tuple(name for name in again if name not in lost),
    )


def _lost_by_finding(document: Mapping[str, Any]) -> Mapping[str, float]:
    shares: dict[str, float] = {}
    for item in document["findings"]:
        name = f"{item['cause']} in {item['segment'] or 'the log'}"
        shares[name] = shares.get(name, 0.0) + _share(document, item["tokens_lost"])
    return shares


def _share(document: Mapping[str, Any], num_tokens: int) -> float:
    return num_tokens / float(max(1, document["num_input"]))


def _rate(document: Mapping[str, Any], name: str) -> float | None:
    return document["rates"][name]["share"] if name in document["rates"] else None


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table of the numbers, then the findings that came and went."""
    console.print()
    console.print(Text(f"Compared with {comparison.before}:", style="bold"))
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for name, *sizes in comparison.sizes:
        table.add_row(name, *map(count, sizes), "")
    for name, *rates in comparison.rates:
        shown = ("-" if rate is None else percent(rate) for rate in rates)
        table.add_row(f"hit rate, {name.replace('_', ' ')}", *shown, _verdict(*rates))
    for name, earlier, later in comparison.lost:
        table.add_row(name, percent(earlier), percent(later), _verdict(later, earlier))
    console.print(table)
    for words, names in (("gone", comparison.gone), ("new", comparison.new)):
        for name in names:
            console.print(Text(f"{words}: {name}"))


def _verdict(worse: float | None, better: float | None) -> str:
    """Whether the second share is above the first."""
    if worse is None or better is None:
        return ""
    if abs(better - worse) < SAME_SHARE:
        return "same"
    return "better" if better > worse else "worse"
