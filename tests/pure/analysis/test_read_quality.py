"""Errors name the way out; what was not read is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ramify.analysis.linting import lint
from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.transcripts.claude_code import HISTORY_ONLY
from ramify.analysis.simulation.calls import simulate
from ramify.errors import LogError
from tests.pure.analysis.test_format_claude_code import session


def test_a_log_without_prompts_names_the_way_out(tmp_path: Path) -> None:
    """The reader's note is in the error of the command, and the most frequent reasons."""
    line = "INFO 11-20 08:15:01 [logger.py:56] Received request r: params: SamplingParams(n=1)."
    path = tmp_path / "server.log"
    path.write_text(f"{line}\n{line}\n", "utf-8")

    with pytest.raises(LogError, match=r"VLLM_LOGGING_LEVEL=DEBUG.*2 × request without a prompt"):
        simulate(path)
    assert ReadQuality().why_empty() == "it is empty"


def test_quality_is_json() -> None:
    """Counters as objects, places of bad lines as arrays."""
    quality = ReadQuality(num_rows=3)
    quality.notes["cut"] += 2
    quality.add_bad_line("log", 7, "torn")

    written = json.loads(json.dumps(quality.as_json()))

    assert written["notes"] == {"cut": 2}
    assert written["bad_lines"] == [["log", 7]]
    assert written["bad_reasons"] == {"torn": 1}
    assert written["num_rows"] == 3


def test_lint_writes_the_notes_of_readers(tmp_path: Path) -> None:
    """A transcript has notes and skipped lines, which `--json` holds by name."""
    path = tmp_path / "session.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in session().lines), "utf-8")

    quality = json.loads(json.dumps(lint(path).quality))

    assert quality["skipped"]["line of type summary"] == 1
    assert quality["notes"][HISTORY_ONLY] == 2
