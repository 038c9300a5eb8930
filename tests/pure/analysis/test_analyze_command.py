"""`ramify analyze`: every output is written, exit codes are kept, bad input gets one message."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.cli import app
from tests.pure.analysis.report_logs import write_clock_log


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def test_all_outputs_are_written(tmp_path: Path) -> None:
    """A run writes summary, HTML, JSON, Markdown and trace, and they name the clock."""
    log = write_clock_log(tmp_path / "log.jsonl")
    names = {name: tmp_path / f"out.{name}" for name in ("html", "json", "markdown")}

    result = run(
        log, *(item for name, path in names.items() for item in (f"--{name}", path)),
        "--export-trace", tmp_path / "trace.jsonl",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "clock in system" in result.stdout or "clock in messages[0]" in result.stdout
    for path in names.values():
        assert "clock" in path.read_text("utf-8")
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 12


def test_the_summary_fits_80_columns_without_colour(tmp_path: Path) -> None:
    """No line is longer than 80 characters, and nothing is an escape sequence."""
    log = write_clock_log(tmp_path / "log.jsonl")

    result = run(log)

    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


def test_json_on_standard_output_is_json_only(tmp_path: Path) -> None:
    """With `--json -`, standard output is a document and nothing else."""
    log = write_clock_log(tmp_path / "log.jsonl")

    result = run(log, "--json", "-")

    document = json.loads(result.stdout)
    assert document["schema"] == 1 and document["num_requests"] == 12
    assert document["findings"][0]["cause"] == "clock"


@pytest.mark.parametrize(
    ("budget", "code", "reason"),
    [
        ("max_lost_share = 1.0\nmin_hit_rate = 0.0", 0, ""),
        ("max_lost_share = 0.01", 1, "of the input lost"),
        ("min_hit_rate = 0.5", 1, "hit rate 0.0 %"),
        ('forbidden_causes = ["clock"]', 1, "clock in"),
        ('forbidden_causes = ["tool_order"]', 0, ""),
        ("max_findings = 0", 1, "findings"),
        ("max_lost_share = 7", 2, "max_lost_share = 7 but it must be a share, from 0 to 1"),
        ("max_saving_money = -1", 2, "max_saving_money = -1 but it must be US dollars, 0 or more"),
        ("max_lost = 0.1", 2, "the unknown key max_lost; the keys are max_lost_share, "),
        ('certainty = "sure"', 2, "'sure' but it must be one of proved, likely, suspected"),
        (
            'forbidden_causes = ["clock", "moon"]',
            2,
            "'moon' but it must be a list of causes: clock,",
        ),
        ("forbidden_causes = [[]]", 2, "forbidden_causes = [] but"),
        ('forbidden_causes = "clock"', 2, "'clock' but it must be a list of causes: clock,"),
        ("max_findings = true", 2, "True but it must be a whole number, 0 or more"),
        ("= 1", 2, "budget.toml cannot be read: it is not TOML: Invalid statement"),
    ],
)
def test_a_budget_decides_the_exit_code(
    tmp_path: Path, budget: str, code: int, reason: str
) -> None:
    """0 within the budget, 1 with the reason over it, 2 for a budget that cannot be."""
    log = write_clock_log(tmp_path / "log.jsonl")
    (tmp_path / "budget.toml").write_text(budget)

    result = run(log, "--budget", tmp_path / "budget.toml")

    assert result.exit_code == code, result.output
    assert reason in result.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "no requests"),
        ("other.jsonl", '{"a": 1}\n', "no requests"),
    ],
)
def test_a_log_without_requests_is_one_message(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    """The exit code is 2, and the message says what was wrong with the log."""
    if content is not None:
        (tmp_path / name).write_text(content)

    result = run(tmp_path / name)

    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


def test_an_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    """A directory that does not exist: exit code 2 and its name."""
    log = write_clock_log(tmp_path / "log.jsonl")

    result = run(log, "--html", tmp_path / "nowhere" / "report.html")

    assert result.exit_code == 2 and "nowhere" in result.output


def test_no_output_overwrites_the_log_or_another(tmp_path: Path) -> None:
    """An output in the log's place, or in that of another output, is one message; nothing is written."""
    log = write_clock_log(tmp_path / "log.jsonl")
    before = log.read_bytes()
    over_log = run(log, "--export-trace", tmp_path / "." / "log.jsonl")
    twice = run(log, "--html", tmp_path / "out", "--json", tmp_path / "out")
    both = run(log, "--json", "-", "--markdown", "-")

    for result in (over_log, twice, both):
        assert result.exit_code == 2
        assert "it is the log or another output" in result.stderr
        assert result.stdout == ""
    assert log.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_a_second_run_compares_with_the_first(tmp_path: Path) -> None:
    """`--diff` of a log with itself says "same", and a mended log says what is gone."""
    log = write_clock_log(tmp_path / "log.jsonl")
    run(log, "--json", tmp_path / "old.json")
    mended = tmp_path / "mended.jsonl"
    text = log.read_text()
    for number in range(12):
        text = text.replace(f"10:{number:02d}:17", "10:00:17")
    mended.write_text(text)

    same, better = (run(path, "--diff", tmp_path / "old.json") for path in (log, mended))

    assert "same" in same.stdout and "better" not in same.stdout
    assert "gone: clock in" in better.stdout and "better" in better.stdout


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "ramify-analysis", "schema": 9}'])
def test_a_comparison_with_something_else_is_one_message(tmp_path: Path, content: str) -> None:
    """Exit code 2 for what is no report of this schema."""
    log = write_clock_log(tmp_path / "log.jsonl")
    (tmp_path / "old.json").write_text(content)

    result = run(log, "--diff", tmp_path / "old.json")

    assert result.exit_code == 2 and "old.json" in result.output
