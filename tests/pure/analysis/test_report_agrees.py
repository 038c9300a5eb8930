"""A report does not contradict itself, in any of its forms."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ramify.analysis import lint, linting
from ramify.analysis.findings import FoundCause
from ramify.analysis.lint_json import report_as_json
from ramify.analysis.reader import ReadQuality
from ramify.analysis.report.analyze import analyze, read_corpus
from ramify.analysis.report.document import Analysis
from ramify.analysis.report.page.html import analysis_as_html
from ramify.analysis.report.wording.numbers import count, money
from ramify.analysis.report.writers.as_json import analysis_as_json
from ramify.analysis.report.writers.markdown import analysis_as_markdown
from ramify.analysis.report.writers.terminal import print_summary
from ramify.analysis.savings.fixing import Fix
from ramify.analysis.verdicts import OBSERVED, CauseName, Example, Partner

PROSE = "The harbour of Genoa is deep and its masters know every ship that came from the south. "
TOGETHER = "Saves nothing alone; mended together with clock in messages[0] it saves"


def _text(analysis: Analysis) -> str:
    """The summary of the terminal, without line breaks."""
    out = StringIO()
    print_summary(analysis, Console(file=out, width=80))
    return " ".join(out.getvalue().split())


def _forms(analysis: Analysis) -> dict[str, str]:
    return {
        "terminal": _text(analysis),
        "html": analysis_as_html(analysis).partition('<script type="application/json"')[0],
        "json": json.dumps(analysis_as_json(analysis)),
        "markdown": analysis_as_markdown(analysis).replace("\\", ""),
    }


def _analysis(path: Path, rows: list[dict[str, Any]]) -> Analysis:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quality = ReadQuality()
    return analyze(read_corpus(path, quality), title=path.name, quality=quality)


def _row(number: int, tools: list[Any], text: str, num_read: int = 0) -> dict[str, Any]:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"Q{number}"}]
    details = {"cached_tokens": num_read}
    return {
        "timestamp": 1_764_000_000 + 60 * number,
        "request": {"model": "gpt-4.1", "tools": tools, "messages": messages},
        "response": {"usage": {"prompt_tokens": 1500, "prompt_tokens_details": details}},
    }


@pytest.fixture
def hidden(tmp_path: Path) -> Analysis:
    """Tools below the provider's minimum in changing order, and a clock behind them."""
    rng = random.Random(1)
    names = [f"tool_{number}" for number in range(4)]
    tools = [{"type": "function", "function": {"name": n, "description": PROSE * 3}} for n in names]
    return _analysis(
        tmp_path / "hidden.jsonl",
        [
            _row(n, rng.sample(tools, 4), f"Now: 2026-11-27 10:{n:02d}:{7 * n % 60:02d}.\n{PROSE * 60}")
            for n in range(20)
        ],
    )  # fmt: skip


def test_a_cause_that_saves_nothing_alone_is_shown_with_its_partner(hidden: Analysis) -> None:
    """The pair is replayed: the order of tools saves with the clock, which stands behind them."""
    findings = {str(item.cause): item for item in hidden.lint.findings}
    order, clock = findings["tool_order"], findings["clock"]

    assert order.saving.tokens == 0 and order.partner is not None
    assert (order.partner.cause, order.partner.segment) == ("clock", "messages[0]")
    assert order.partner.saving == hidden.lint.saving_all
    assert order.partner.saving.tokens > clock.saving.tokens > 0
    for name, text in _forms(hidden).items():
        assert f"{TOGETHER} {order.partner.saving.tokens:,} tokens." in text, name


def test_a_saving_above_the_loss_is_explained(hidden: Analysis) -> None:
    """Lost tokens count for the first cause, by the bill; a replay counts what later requests read."""
    [clock] = [item for item in hidden.lint.findings if item.cause == "clock"]

    assert clock.saving.tokens > clock.tokens_lost
    for name, text in _forms(hidden).items():
        assert "Saves more than is lost: lost tokens count once, as billed" in text, name


def test_a_cause_without_a_change_is_no_finding(tmp_path: Path) -> None:
    """A miss that the log does not explain is an observation: no card, no result, no saving."""
    analysis = _analysis(tmp_path / "log.jsonl", [_row(n, [], PROSE * 200) for n in range(12)])

    assert analysis.lint.findings == ()
    assert [str(item.cause) for item in analysis.lint.observations] == ["outside_prompt"]
    forms = _forms(analysis)
    for name in ("terminal", "html", "markdown"):
        assert "No finding, " in forms[name] and "outside_prompt" in forms[name], name
    assert "All findings mended together" not in forms["terminal"]
    assert json.loads(forms["json"])["findings"] == []
    assert len(json.loads(forms["json"])["observations"]) == 1


def test_lint_has_the_same_findings_as_analyze(tmp_path: Path, hidden: Analysis) -> None:
    """With partner and note, and with the observations apart."""
    document = report_as_json(lint(tmp_path / "hidden.jsonl", provider="openai"))

    assert document["findings"] == analysis_as_json(hidden)["findings"]
    assert all(item["note"] or item["saving"]["tokens"] for item in document["findings"])
    assert {item["cause"] for item in document["observations"]} <= OBSERVED


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0.0, "$0.00"), (5.6e-06, "< $0.0001"), (-5.6e-06, "> -$0.0001"), (0.00046, "$0.00046"),
        (0.0001, "$0.0001"), (1.234, "$1.23"), (12_345.6, "$12,346"),
    ],
)  # fmt: skip
def test_money_has_no_exponent(dollars: float, text: str) -> None:
    """A fraction of a cent is written out, or is less than the least that is."""
    assert money(dollars) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (99_999, "99,999"), (123_456, "123 K"), (999_499, "999 K"), (999_500, "1 M"),
        (1_234_567, "1.23 M"), (999.5e6, "1 G"), (4.56e9, "4.56 G"), (1.2345e12, "1,234 G"),
        (-123_456, "-123 K"),
    ],
)  # fmt: skip
def test_great_counts_have_three_digits_and_a_unit(value: float, text: str) -> None:
    """From 100,000 on; beyond a thousand G all digits of the G."""
    assert count(value) == text


def test_what_was_read_is_possible(tmp_path: Path) -> None:
    """A log that begins in the middle of the traffic reports reads of requests that it does not hold."""
    analysis = _analysis(tmp_path / "log.jsonl", [_row(0, [], PROSE * 60, num_read=1024)])

    reported, possible = analysis.rate("reported"), analysis.rate("possible")
    assert reported is not None and possible is not None
    assert possible.share >= reported.share > 0


def test_what_a_cause_saves_with_its_partner_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair may save more than all causes together, and more than any set of the page."""
    rows = [_row(n, [], f"Now: 2026-11-27 10:{n:02d}:00.\n{PROSE * 60}") for n in range(12)]
    plain = _analysis(tmp_path / "log.jsonl", rows)
    before = plain.rate("possible")
    assert before is not None and before.num_read < before.num_input
    saving = replace(plain.lint.saving_all, tokens=plain.num_counted)

    def all_is_saved(causes: Sequence[FoundCause], *_: Any) -> dict[Fix, Partner]:
        return {item.fix: Partner(CauseName.CLOCK, "messages[0]", saving) for item in causes}

    monkeypatch.setattr(linting, "find_partners", all_is_saved)
    possible = _analysis(tmp_path / "log.jsonl", rows).rate("possible")

    assert possible is not None and possible.num_read == possible.num_input


HOSTILE = (
    "`<img src=x onerror=alert(1)>`\n| [a](http://evil.example) ![b](c) **x** | www.evil.example"
)


def test_markdown_shows_texts_of_the_log_as_they_are(hidden: Analysis) -> None:
    """Names, places and quotes stay in code: no link, no HTML, no row of a table, no end of a fence."""
    finding = replace(
        hidden.lint.findings[0],
        segment=HOSTILE,
        example=Example(1, "````\n<script>", f"~~~\n{HOSTILE}\x1b[2J\u202e", "log"),
    )
    warnings = (f"{HOSTILE} is odd.",)
    hostile = replace(
        hidden, title=HOSTILE, warnings=warnings, lint=replace(hidden.lint, findings=(finding,))
    )

    lines = analysis_as_markdown(hostile).splitlines()

    in_line = HOSTILE.replace("\n", "\\n")
    assert lines[0] == f"## Cache analysis of `` {in_line} ``"
    [heading] = [line for line in lines if line.startswith("### ")]
    assert f"in `` {in_line} `` (proved)" in heading
    [warning] = [line for line in lines if line.startswith("> ")]
    for sign in ("`", "<", "[", "|", "*"):
        assert sign not in warning[2:].replace(f"\\{sign}", "")
    assert "http://" not in warning and "www." not in warning
    begin = lines.index("`````diff")
    end = lines.index("`````", begin)
    assert all(line[:2] in ("- ", "+ ") for line in lines[begin + 1 : end])
    assert "\x1b" not in "".join(lines) and "\u202e" not in "".join(lines)
    assert not any(line.startswith("|") and "evil" in line for line in lines)
