"""Predicted savings beside a replay of the log that its generator has mended, in seeds no rule was tuned on.

A finding saves where it is found: the generator mends the cells in which `lint` names the cause. How
many it finds is the matter of `test_planted_logs`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ramify.analysis.verdicts import Saving
from tests.pure.analysis.mended_logs import MIXED, LintedLog, causes_of, error, linted_log
from tests.pure.analysis.planted_logs import HIDING

GOAL = 0.01  # of the true saving
FORMATS = ("openai_chat", "openai_responses", "anthropic", "litellm", "otlp")
CAUSES = [(name, cause) for name in FORMATS for cause in causes_of(name)]
FEW = [(FORMATS[number % 4], cause) for number, cause in enumerate(causes_of(FORMATS[0]))]


def named(log: LintedLog, causes: Sequence[str]) -> tuple[Saving, int]:
    """Predicted saving of all findings of these causes, and the true one as far as the log shows."""
    return log.predicted_saving(causes), log.true_saving(log.named(causes), as_shown=True)


def savings(
    format_name: str, cause: str, folder: Path, seeds: Sequence[int], num_requests: int
) -> Iterator[tuple[Saving, int]]:
    for seed in seeds:
        log = linted_log(seed, format_name, cause, folder, num_requests)
        yield named(log, [cause] if cause != MIXED else causes_of(format_name))


@pytest.mark.parametrize(("format_name", "cause"), FEW)
def test_a_finding_saves_what_mending_its_cause_saves(
    tmp_path: Path, format_name: str, cause: str
) -> None:
    """Within 1 % of a replay of the log without the cause, whose text the generator knows."""
    ((predicted, true),) = savings(format_name, cause, tmp_path, [61], 100)

    assert true > 0
    assert abs(error(predicted, true)) <= GOAL


@pytest.mark.parametrize("cause", sorted(HIDING))
@pytest.mark.parametrize("format_name", FORMATS)
def test_the_range_holds_what_the_log_shows(tmp_path: Path, format_name: str, cause: str) -> None:
    """A tool result cleared at once and reasoning never sent back are in no prompt of the log.

    The range holds what a replay of the prompts as far as the log shows them reads, which is no more than
    what the client would read.
    """
    log = linted_log(61, format_name, cause, tmp_path, 100)
    cells = log.named([cause])

    saving = log.predicted_saving([cause])

    true, shown = log.true_saving(cells), log.true_saving(cells, as_shown=True)
    assert saving.low <= shown <= saving.high
    assert shown <= true


@pytest.mark.parametrize("format_name", ["openai_chat", "anthropic"])
def test_all_findings_together_save_what_mending_all_causes_saves(
    tmp_path: Path, format_name: str
) -> None:
    """Within 1 %, with up to three causes in a request, and breakpoints that nobody reads dropped.

    What a planted block of context loses because it stands behind a document, no plant mends.
    """
    log = linted_log(61, format_name, MIXED, tmp_path, 200)

    _, true = named(log, causes_of(format_name))
    causes = {finding.cause for finding in log.linted.report.findings}
    predicted = log.predicted_saving(causes - {"context_order"})
    everything = log.linted.report.saving_all

    assert abs(error(predicted, true)) <= GOAL
    assert everything.tokens == predicted.tokens or "context_order" in causes
    assert 0 <= everything.tokens - predicted.tokens <= 0.03 * true


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "cause"), CAUSES)
def test_findings_save_what_mending_saves_in_every_format(
    tmp_path: Path, format_name: str, cause: str
) -> None:
    """Each cause in each format: within 1 % of the true saving of three logs of 300 requests."""
    pairs = list(savings(format_name, cause, tmp_path, [81, 82, 83], 300))

    true = sum(true for _, true in pairs)
    assert abs(sum(predicted.tokens for predicted, _ in pairs) - true) <= GOAL * true


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
def test_all_findings_together_in_every_format(tmp_path: Path, format_name: str) -> None:
    """All causes and decoys: findings of what was planted within 1 % in four logs of 300 requests.

    `saving_all` is that of all findings: a breakpoint too many blocks back is nobody's plan.
    """
    predicted = true = 0
    for seed in (6, 81, 82, 83):
        log = linted_log(seed, format_name, MIXED, tmp_path, 300)
        report = log.linted.report
        every = sorted({finding.cause for finding in report.findings})
        assert report.saving_all.tokens == log.predicted_saving(every).tokens
        saving, mended = named(log, causes_of(format_name))
        predicted += saving.tokens
        true += mended

    assert abs(predicted - true) <= GOAL * true
