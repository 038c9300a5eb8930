"""`lint`: verdicts, findings and JSON of small logs."""

from typing import Any

import pytest

from ramify.analysis import lint
from ramify.analysis.lint_json import report_as_json
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind

SYSTEM = (
    "You are a careful assistant of a shipping company. " + "Answer briefly and politely. " * 250
)


def request(line: int, system: str, *messages: str, **info: Any) -> LoggedRequest:
    """A request with a system prompt and messages of user and assistant in turn."""
    segments = [Segment("system", SegmentKind.SYSTEM, system)]
    segments += [
        Segment(f"messages[{at}]", SegmentKind.MESSAGE, text, label=("user", "assistant")[at % 2])
        for at, text in enumerate(messages)
    ]
    return LoggedRequest("log.jsonl", line, segments=tuple(segments), **info)


def test_a_next_turn_has_no_divergence_and_no_cause() -> None:
    """A prompt that extends an earlier one is no loss."""
    report = lint(
        [
            request(1, SYSTEM, "Where is my parcel?"),
            request(2, SYSTEM, "Where is my parcel?", "In Bremen.", "And when does it arrive?"),
        ]
    )

    verdict = report.verdicts[1]
    assert (verdict.best_match_line, verdict.divergence, verdict.causes) == (1, None, ())
    assert verdict.tokens.reusable > 0
    assert verdict.tokens.lost == 0


def test_a_clock_in_the_system_prompt_is_proved_with_its_place() -> None:
    """The divergence is the first differing character, the cause quotes both times."""
    report = lint(
        [
            request(n + 1, f"Time: 2026-03-04 10:{n:02d}:07.\n{SYSTEM}", f"Question {n}?")
            for n in range(4)
        ]
    )

    verdict = report.verdicts[1]
    assert verdict.divergence is not None
    assert (verdict.divergence.segment, verdict.divergence.char) == ("system", 21)
    (cause,) = verdict.causes
    assert (cause.cause, cause.certainty, cause.segment) == ("clock", "proved", "system")
    assert "10:01:07" in cause.got
    assert verdict.tokens.lost > 100
    assert [finding.cause for finding in report.findings] == ["clock"]
    assert report.findings[0].saving.tokens >= 0


@pytest.mark.parametrize("num_requests", [0, 1])
def test_small_logs_have_no_match(num_requests: int) -> None:
    """An empty log and a single request are reported without a match."""
    report = lint([request(1, SYSTEM, "Hello")][:num_requests])

    assert report.num_requests == num_requests == len(report.verdicts)
    assert all(verdict.best_match_line is None for verdict in report.verdicts)


def test_json_has_the_keys_of_the_contract() -> None:
    """Keys of report, verdict, cause and finding are those that readers rely on."""
    report = report_as_json(
        lint([request(n, f"Session id: 9f{n}c33a7e{n}41\n{SYSTEM}", "Hi") for n in range(1, 5)])
    )

    assert report["schema"] == 1
    assert report["num_requests"] == 4
    assert {"verdicts", "findings", "quality", "saving_all"} <= report.keys()
    verdict = report["verdicts"][2]
    assert verdict.keys() == {
        "file", "line", "best_match_file", "best_match_line", "divergence", "causes", "tokens",
    }  # fmt: skip
    assert verdict["divergence"].keys() == {"segment", "char", "token", "had", "got"}
    assert verdict["causes"][0].keys() == {
        "cause", "certainty", "segment", "had", "got", "kind", "rule",
    }  # fmt: skip
    assert (verdict["causes"][0]["cause"], verdict["causes"][0]["kind"]) == ("random_id", "id")
    assert verdict["tokens"].keys() == {"total", "reusable", "lost"}
    finding = report["findings"][0]
    assert finding.keys() == {
        "cause", "certainty", "segment", "num_requests", "tokens_lost", "example", "change", "saving",
        "partner", "note", "kind", "rule",
    }  # fmt: skip
    assert finding["saving"].keys() == {"tokens", "low", "high", "money"}
