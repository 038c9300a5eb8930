"""Two runs of `ramify analyze --json` compared: before and after a change, or last week and this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify.analysis.report.document import KIND, SCHEMA
from ramify.analysis.report.wording.numbers import count, percent
from ramify.errors import ConfigError
from ramify.reasons import reason_of

SAME_SHARE = 0.0005  # shares that differ less are equal


def read_earlier(path: Path) -> dict[str, Any]:
    """The document of an earlier run.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be compared with: {reason_of(error, path)}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigError(f"{path} is no report; write one with `ramify analyze LOG --json FILE`")
    if document.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path} has schema {document.get('schema')!r}, this version reads {SCHEMA}; write it "
            "again with this version"
        )
    return document


def print_comparison(before: Mapping[str, Any], after: Mapping[str, Any], console: Console) -> None:
    """A table of what changed from one run to the other, then the findings that came and went.

    Losses are shares of the input, since the logs differ in size.
    """
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for key, words in (("num_requests", "requests"), ("num_input", "input tokens")):
        table.add_row(words, count(before[key]), count(after[key]), "")
    for name in ("reported", "by_rule", "possible"):
        rates = [run["rates"][name]["share"] for run in (before, after) if name in run["rates"]]
        if len(rates) == 2:  # a rate of one run alone says nothing
            table.add_row(
                f"hit rate, {name.replace('_', ' ')}", *map(percent, rates), _verdict(*rates)
            )
    lost, lost_after = _lost_shares(before), _lost_shares(after)
    for name in (name for name in lost if name in lost_after):
        verdict = _verdict(-lost[name], -lost_after[name])
        table.add_row(name, percent(lost[name]), percent(lost_after[name]), verdict)
    console.print()
    console.print(Text(f"Compared with {before['title']}:", style="bold"))
    console.print(table)
    for words, names in (
        ("gone", lost.keys() - lost_after.keys()),
        ("new", lost_after.keys() - lost.keys()),
    ):
        for name in sorted(names):
            console.print(Text(f"{words}: {name}"))


def _lost_shares(document: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the input that are lost, in all and by finding."""
    total = max(1, document["num_input"])
    shares = {"lost, of the input": document["tokens_lost"] / total}
    for item in document["findings"]:
        name = f"{item['cause']} in {item['segment'] or 'the log'}"
        shares[name] = shares.get(name, 0.0) + item["tokens_lost"] / total
    return shares


def _verdict(before: float, after: float) -> str:
    """In a word, what became of a share of which more is better."""
    if abs(after - before) < SAME_SHARE:
        return "same"
    return "better" if after > before else "worse"
