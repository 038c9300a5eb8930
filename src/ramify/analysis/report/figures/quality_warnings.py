"""What makes the numbers of a report unsure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ramify.analysis.files.rows import TRUNCATED
from ramify.analysis.linting import MAX_NAMED
from ramify.analysis.report.wording.numbers import percent
from ramify.analysis.verdicts import LintReport
from ramify.counts import counted

POOR_SHARE = 0.9  # of requests that should have text
BAD_SHARE = 0.01


def warnings_of(
    quality: dict[str, Any], lint: LintReport, *, is_partial: bool = False
) -> Iterator[str]:
    """What a reader should know before the first number."""
    if lint.interrupted:
        yield f"The analysis was interrupted: {lint.interrupted}."
    elif is_partial:
        yield "The analysis was interrupted: the rest of the log, or parts of the report, are missing."
    num, num_bad = lint.num_requests, len(quality.get("bad_lines", ()))
    if not num:
        yield "The log has no requests."
        return
    if num_bad > BAD_SHARE * (num + num_bad):
        yield f"{counted(num_bad, 'bad line')} left out; the first is line {quality['bad_lines'][0][1]:,}."
    if TRUNCATED in quality.get("bad_reasons", {}):
        yield "A compressed file of the log ends early: what came after is missing."
    num_text = quality.get("num_with_full_text", num)
    if not num_text:
        yield (
            "No request has its whole prompt in the log (system prompt, tools or parts of the text are "
            "missing): nothing says what a rule predicts or what was possible, and what the findings "
            "and charts say is about the logged parts."
        )
    elif num_text < POOR_SHARE * num:
        yield (
            f"Only {percent(num_text / num)} of the requests have their whole prompt in the log: the "
            "hit rates are over these."
        )
    if num_unknown := quality.get("num_of_unknown_order", 0):
        yield (
            f"Unknown order in {counted(num_unknown, 'request')}: the model's chat template decides whether "
            "tools or system prompt come first, and how calls and headers are written. They are compared as "
            "tools, system, messages; a record of the server (ramify serve --record) has its own order."
        )
    if not quality.get("num_with_times", 0):
        yield "No times are logged: lifetimes and parallel requests cannot be judged."
    if num_empty := quality.get("num_without_tokens", 0):
        lines = ", ".join(
            f"{file}:{line}" for file, line in quality.get("lines_without_tokens", ())
        )
        yield (
            f"{counted(num_empty, 'request')} without tokens: neither a prompt nor counts are logged "
            f"({lines}{' …' if num_empty > MAX_NAMED else ''})."
        )
    if not lint.tables.get("billed"):
        yield "No cached tokens are logged: nothing says what was read; see the bars by rule."
