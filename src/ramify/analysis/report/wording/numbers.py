"""Numbers as people read them, and what a finding loses and saves."""

from __future__ import annotations

from ramify.analysis.report.wording.causes import CAUSES
from ramify.analysis.verdicts import Finding, Saving
from ramify.counts import counted

RATE_NAMES = {"reported": "reported", "by_rule": "by rule", "possible": "possible"}


def count(value: float) -> str:
    """`12,345`; from 100,000 on `123 K`, `1.23 M`, `4.56 G`, `1,234 G`."""
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    unit, size = next(
        (unit for unit in (("K", 1e3), ("M", 1e6)) if abs(value) < 999.5 * unit[1]), ("G", 1e9)
    )
    number = value / size
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:,.0f} {unit}"


def percent(share: float) -> str:
    """`37.3 %`; more digits where it would read as 0 or 100."""
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "< 0.1 %" if value > 0 else "> -0.1 %"
    if 99.95 <= value < 100:
        return "> 99.9 %"
    return f"{value:.1f} %"


def money(dollars: float) -> str:
    """`$1.23`; fractions of a cent with two digits, down to a hundredth."""
    sign = "-" if dollars < 0 else ""
    size = abs(dollars)
    if size >= 1000:
        return f"{sign}${size:,.0f}"
    if size >= 0.01 or size == 0:
        return f"{sign}${size:.2f}"
    return f"{sign}${size:.2g}" if size >= 0.0001 else f"{'>' if sign else '<'} {sign}$0.0001"


def duration(seconds: float) -> str:
    """`45 s`, `5 min`, `2.5 h`, `3 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def lost_words(finding: Finding) -> str:
    """`2 requests, 1,234 tokens lost`."""
    requests = counted(finding.num_requests, "request")
    return f"{requests}, {count(finding.tokens_lost)} tokens lost"


def observed_words(finding: Finding) -> str:
    """`37 requests: The texts are equal and …`, of a cause that no change mends."""
    return f"{counted(finding.num_requests, 'request')}: {CAUSES[finding.cause].what}"


def saving_words(finding: Finding) -> str:
    """`mending saves 1,234 (1,000 to 1,400, $1.23)`, or that no replay shows a saving."""
    saving = finding.saving
    if not (saving.tokens or saving.low or saving.high or saving.money):
        return "no replay shows what mending saves"
    alone = "" if saving.tokens else " alone"  # it may hide behind another finding
    return f"mending saves {count(saving.tokens)}{alone} {range_words(saving)}"


def range_words(saving: Saving) -> str:
    """`(1,000 to 1,400, $1.23)`: the range of the tokens, and the money where prices are known."""
    dollars = "" if saving.money is None else f", {money(saving.money)}"
    return f"({count(saving.low)} to {count(saving.high)}{dollars})"
