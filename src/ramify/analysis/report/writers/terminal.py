"""The summary in the terminal, readable at 80 columns and without colour."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ramify.analysis.report.document import Analysis, HitRate
from ramify.analysis.report.wording.headline import headline
from ramify.analysis.report.wording.numbers import (
    RATE_NAMES,
    count,
    lost_words,
    observed_words,
    percent,
    range_words,
    saving_words,
)
from ramify.analysis.report.wording.quotes import Piece, mark_quotes
from ramify.analysis.verdicts import Finding
from ramify.counts import counted

BAR_CELLS = 32
MAX_QUOTE = 60
MAX_FINDINGS = 5


def print_summary(analysis: Analysis, console: Console) -> None:
    """Print headline, hit rates and the findings that save most."""
    for warning in analysis.warnings:
        console.print(Text("! " + warning, style="yellow"))
    if analysis.warnings:
        console.print()
    console.print(Text(headline(analysis), style="bold"))
    console.print()
    for rate in analysis.rates:
        console.print(_bar(rate, analysis.lint.num_requests))
    findings = analysis.lint.findings
    for number, finding in enumerate(findings[:MAX_FINDINGS], 1):
        console.print()
        _print_finding(console, finding, number)
    for item in analysis.lint.observations:
        console.print()
        console.print(Text(f"No finding, {item.cause} ({item.certainty}): {observed_words(item)}"))
    console.print()
    if len(findings) > MAX_FINDINGS:
        rest = counted(len(findings) - MAX_FINDINGS, "more finding")
        console.print(f"{rest}: see --html or --json.")
    if findings:
        everything = analysis.lint.saving_all
        console.print(
            f"All findings mended together: {count(everything.tokens)} tokens saved "
            f"{range_words(everything)}."
        )
    else:
        console.print("No cause of lost hits in this log.")


def _bar(rate: HitRate, num_requests: int) -> Text:
    filled = round(BAR_CELLS * min(1.0, max(0.0, rate.share)))
    line = Text(f"{RATE_NAMES.get(rate.name, rate.name):<9}")
    line.append("█" * filled, style="blue")
    line.append("·" * (BAR_CELLS - filled))
    line.append(f" {percent(rate.share):>8}  ", style="bold")
    line.append(f"of {count(rate.num_input)} tokens")
    if rate.num_requests < num_requests:
        line.append(f", {counted(rate.num_requests, 'request')}")
    return line


def _print_finding(console: Console, finding: Finding, number: int) -> None:
    place = f" in {finding.segment}" if finding.segment else ""
    console.print(Text(f"{number}. {finding.cause}{place} ({finding.certainty})", style="bold"))
    console.print(f"   {lost_words(finding)}; {saving_words(finding)}")
    example = finding.example
    if example.had or example.got:
        before, after = mark_quotes(example.had, example.got, finding.segment)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("   - had", _quote(before, "red"))
        grid.add_row("   + got", _quote(after, "green"))
        console.print(grid)
    if finding.note:
        console.print(Padding(Text(finding.note), (0, 0, 0, 3)))
    console.print(Padding(Text(f"→ {finding.change}", style="italic"), (0, 0, 0, 3)))


def _quote(pieces: tuple[Piece, ...], style: str) -> Text:
    """A quote around its first change; changes in brackets too, for who sees no colour."""
    line = Text()
    for piece in pieces:
        shown = printable(piece.text)
        if piece.is_changed:
            line.append(f"[{shown}]", style=f"bold {style}")
        else:
            line.append(shown)
    first = max(0, line.plain.find("["))
    start = max(0, min(first - MAX_QUOTE // 3, len(line) - MAX_QUOTE))
    cut = line[start : start + MAX_QUOTE]
    return Text.assemble("…" if start else "", cut, "…" if start + MAX_QUOTE < len(line) else "")


def printable(text: str) -> str:
    """A text that cannot move the cursor or set colours: control characters escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
