"""Where each number comes from, and what makes the numbers unsure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ramify.analysis.files.rows import TRUNCATED
from ramify.analysis.linting import MAX_NAMED
from ramify.analysis.report.document import Curves, Figure
from ramify.analysis.report.wording.numbers import count, percent, plural
from ramify.analysis.verdicts import LintReport

POOR_SHARE = 0.9  # of requests that should have text
BAD_SHARE = 0.01
RULE_NOTE = "note of a rule"  # names a model


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
        yield f"{num_bad:,} bad lines were left out; the first is line {quality['bad_lines'][0][1]:,}."
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
            f"Unknown order in {plural(num_unknown, 'request')}: the model's chat template decides whether "
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
            f"{plural(num_empty, 'request')} without tokens: neither a prompt nor counts are logged "
            f"({lines}{' …' if num_empty > MAX_NAMED else ''})."
        )
    if not lint.tables.get("billed"):
        yield "No cached tokens are logged: nothing says what was read; see the bars by rule."


def figures_of(lint: LintReport, curves: Curves | None, num_input: int) -> Iterator[Figure]:
    """The formula and denominator of each figure; a hit rate has its own."""
    quality, num = lint.quality, lint.num_requests
    yield Figure("input tokens", f"{num_input:,}", "usage where logged, else counted in the prompt")
    exact = "exact" if quality.get("is_exact") else "estimated, ± 15 % for prose and code"
    yield Figure("tokenizer", str(quality.get("tokenizer", "")), exact)
    rules = lint.tables.get("rules", {})
    sources = "; ".join(map(str, rules.get("sources", ())))
    yield Figure("cache rules and prices", str(rules.get("date", "")), sources)
    for note in rules.get("notes", ()):
        yield Figure(RULE_NOTE, "", str(note))
    yield Figure("bad lines", f"{len(quality.get('bad_lines', ())):,}", "left out, never fatal")
    for name in ("usage", "times", "conversation", "full_text"):
        value = quality.get(f"num_with_{name}", 0)
        words = f"requests with {name.replace('_', ' ')}"
        yield Figure(words, percent(value / num) if num else "0", f"{value:,} of {num:,}")
    yield Figure(
        "savings",
        count(lint.saving_all.tokens),
        "tokens read in a replay of the mended log less those read in a replay of the log as it is; "
        "range: both ends of the lifetime, error of the token count",
    )
    if curves is not None:
        yield Figure(
            "capacity curve",
            f"pages of {curves.page_size}",
            "LRU exactly from stack distances, whole pages, answers not inserted, cold start, hits "
            "over all input tokens",
        )
