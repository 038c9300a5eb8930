"""Ctrl-C in `ramify lint`: what was judged so far, a line that says what is missing, exit code 130."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.analysis import linting
from ramify.analysis.log_files import read_log
from ramify.analysis.predecessor import PredecessorFinder
from ramify.analysis.savings.measure import FixReplay
from ramify.cli import app

NUM_REQUESTS = 90
HEAD = "You answer questions about parcels briefly. " * 200


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Requests with a clock in the system prompt."""
    path = tmp_path / "log.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for n in range(NUM_REQUESTS):
            clock = f"It is 2026-03-04 10:{n // 60:02d}:{n % 60:02d}. {HEAD}"
            messages = [
                {"role": "system", "content": clock},
                {"role": "user", "content": f"Question {n}?"},
            ]
            file.write(json.dumps({"model": "gpt-4o", "messages": messages}) + "\n")
    return path


def stop_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a step of `lint` be interrupted when it begins."""

    def stopped(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(linting, name, stopped)


def stop_replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first replay of a fix be interrupted."""

    def stopped(*_args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FixReplay, "saving", stopped)


def stop_comparing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the comparison of a request be interrupted."""
    match = PredecessorFinder._match

    def cut(matcher: Any, request: Any) -> Any:
        if request.number == number:
            raise KeyboardInterrupt
        return match(matcher, request)

    monkeypatch.setattr(PredecessorFinder, "_match", cut)


def run(log: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and JSON of the command."""
    out = log.with_suffix(".json")
    done = CliRunner().invoke(app, ["lint", str(log), "--json", str(out)])
    report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return done.exit_code, done.output, report


def test_interrupted_reading_judges_what_was_read(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict for each request that was read."""

    def cut(*args: Any, **options: Any) -> Any:
        for number, request in enumerate(read_log(*args, **options)):
            if number == 60:
                raise KeyboardInterrupt
            yield request

    monkeypatch.setattr(linting, "read_log", cut)
    code, output, report = run(log)

    assert code == 130
    assert "interrupted: the log was read up to request 60" in output
    assert report["interrupted"] == "the log was read up to request 60"
    assert report["num_requests"] == len(report["verdicts"]) == 60
    assert [finding["cause"] for finding in report["findings"]] == ["clock"]


def test_interrupted_comparing_keeps_the_verdicts_so_far(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the whole log, findings and savings are of these requests alone."""
    whole = run(log)[2]
    stop_comparing(monkeypatch, 64)
    code, output, report = run(log)

    assert code == 130
    assert "interrupted: 64 of 90 requests were compared" in output
    assert report["verdicts"] == whole["verdicts"][:64]
    assert report["num_requests"] == 64
    assert 0 < report["saving_all"]["tokens"] < whole["saving_all"]["tokens"]


def test_interrupted_replays_leave_findings_without_savings(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdicts are whole, and the line says that savings are missing."""
    whole = run(log)[2]
    stop_replaying(monkeypatch)
    code, output, report = run(log)

    assert code == 130
    assert "interrupted: savings were not measured" in output
    assert report["verdicts"] == whole["verdicts"]
    assert report["findings"][0]["saving"] == {"tokens": 0, "low": 0, "high": 0, "money": None}
    assert "interrupted" not in whole


def test_an_interrupt_before_any_verdict_says_so(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No JSON, one line, exit code 130."""
    stop_at(monkeypatch, "learn_templates")

    code, output, report = run(log)

    assert (code, report) == (130, {})
    assert output.strip() == "interrupted before there was a result to keep"


@pytest.mark.parametrize("command", ["lint", "simulate", "analyze"])
def test_a_log_is_not_written_over(log: Path, command: str) -> None:
    """JSON to the place of the log is refused before anything is written."""
    before = log.read_bytes()

    done = CliRunner().invoke(app, [command, str(log), "--json", str(log)])

    assert done.exit_code == 2 and "it is the log" in done.output
    assert log.read_bytes() == before


def analyze(log: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and JSON of `ramify analyze`."""
    out = log.with_suffix(".json")
    done = CliRunner().invoke(app, ["analyze", str(log), "--json", str(out)])
    report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return done.exit_code, done.output, report


def test_interrupted_analysis_without_savings_keeps_its_other_parts(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings without savings, and the curves; one warning says what is missing."""
    stop_replaying(monkeypatch)

    code, output, report = analyze(log)

    assert code == 130
    assert output.strip().endswith("interrupted: savings were not measured and are 0")
    assert report["is_partial"] and report["findings"] and report["curves"]["by_capacity"]
    assert report["saving_all"]["tokens"] == 0
    assert any("savings were not measured" in warning for warning in report["warnings"])


@pytest.mark.parametrize("step", ["learn_templates", "PredecessorFinder", "report_tables"])
def test_an_interrupted_analysis_without_a_result_ends_with_one_line(
    log: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """No JSON, one line, exit code 130."""
    stop_at(monkeypatch, step)

    code, output, report = analyze(log)

    assert (code, report) == (130, {})
    assert output.strip() == "interrupted before there was a result to keep"


def test_interrupted_comparing_leaves_an_analysis_of_the_requests_so_far(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of a log that ends there; a warning says how many are missing."""
    rows = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(rows[:64]), encoding="utf-8")
    expected = analyze(log)[2]
    log.write_text("".join(rows), encoding="utf-8")
    stop_comparing(monkeypatch, 64)

    code, output, report = analyze(log)

    assert code == 130
    assert output.strip().endswith("interrupted: 64 of 90 requests were compared")
    (warning,) = set(report["warnings"]) - set(expected["warnings"])
    assert "64 of 90 requests" in warning
    for part in ("findings", "sessions", "curves", "waterfall", "rates", "tree", "num_input"):
        assert report[part], part
        assert report[part] == expected[part], part


def test_requests_out_of_order_are_kept_by_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests compared are the first to start: the last lines of this log."""
    path = tmp_path / "log.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": HEAD}], "model": "m", "startTime": 200.0 - line,
         "endTime": 200.5 - line, "call_type": "completion", "response": {}}
        for line in range(6)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stop_comparing(monkeypatch, 2)

    code, _, report = run(path)

    assert code == 130
    lines = [(verdict["line"], verdict["best_match_line"]) for verdict in report["verdicts"]]
    assert lines == [(4, 5), (5, 6), (6, None)]


def test_interrupted_pairs_leave_the_savings(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before stays; nothing says which causes save together."""
    stop_at(monkeypatch, "find_partners")
    code, output, report = run(log)

    missing = "causes that save nothing alone were not tried together with others"
    assert code == 130 and f"interrupted: {missing}" in output
    [finding] = report["findings"]
    assert finding["saving"]["tokens"] == report["saving_all"]["tokens"] > 0
    assert finding["partner"] is None
