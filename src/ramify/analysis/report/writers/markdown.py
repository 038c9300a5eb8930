"""The report as Markdown, for issues and reviews."""

from __future__ import annotations

import re

from ramify.analysis.report.document import Analysis
from ramify.analysis.report.wording.headline import headline
from ramify.analysis.report.wording.numbers import (
    lost_words,
    observed_words,
    percent,
    saving_words,
)
from ramify.analysis.report.writers.terminal import printable
from ramify.analysis.verdicts import Finding
from ramify.counts import counted

MAX_FINDINGS = 20
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~&@]|:(?=//)|(?<=www)\.")


def analysis_as_markdown(analysis: Analysis) -> str:
    """Headline, hit rates and findings."""
    lines = [f"## Cache analysis of {_code(analysis.title)}", "", headline(analysis), ""]
    for warning in analysis.warnings:
        lines += [f"> {_escaped(warning)}", ""]
    if analysis.rates:
        lines += ["| hit rate | share | of input tokens | of requests |", "|---|---|---|---|"]
        lines += [
            f"| {rate.name.replace('_', ' ')} | {percent(rate.share)} | {rate.num_input:,} | "
            f"{rate.num_requests:,} |"
            for rate in analysis.rates
        ]
        lines.append("")
    for number, finding in enumerate(analysis.lint.findings[:MAX_FINDINGS]):
        lines += [finding_as_markdown(finding, number), ""]
    more = len(analysis.lint.findings) - MAX_FINDINGS
    if more > 0:
        lines += [f"{counted(more, 'more finding')} left out.", ""]
    for item in analysis.lint.observations:
        lines += [f"No finding, `{item.cause}` ({item.certainty}): {observed_words(item)}", ""]
    lines.append(f"Made with `ramify analyze`, Ramify {analysis.version}.")
    return "\n".join(lines) + "\n"


def finding_as_markdown(finding: Finding, number: int) -> str:
    """A finding with its quotes."""
    place = f" in {_code(finding.segment)}" if finding.segment else ""
    facts = f"{lost_words(finding)}; {saving_words(finding)}."
    lines = [
        f"### {number + 1}. `{finding.cause}`{place} ({finding.certainty})",
        "",
        facts,
        "",
        *([_escaped(finding.note), ""] if finding.note else ()),
        f"**Change:** {finding.change}",
    ]
    example = finding.example
    if example.had or example.got:
        fence = "`" * max(3, 1 + _longest_run(example.had + "\n" + example.got))
        lines += ["", fence + "diff", *_diff("-", example.had), *_diff("+", example.got), fence]
    return "\n".join(lines)


def _diff(sign: str, text: str) -> list[str]:
    return [f"{sign} {printable(line)}" for line in text.splitlines() or [""]]


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _code(text: str) -> str:
    """A text of the log as a code span: no character of it is markup."""
    fence = "`" * (1 + _longest_run(text))
    pad = " " if "`" in text[:1] + text[-1:] else ""
    return f"{fence}{pad}{printable(text)}{pad}{fence}"


def _escaped(text: str) -> str:
    """A sentence that may name parts of the log, without links, HTML and other markup."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))
