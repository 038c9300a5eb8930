"""The analyser's commands on a record that the real server has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramify.analysis import lint
from ramify.cli import app
from ramify.server.operations.request_log import LineFile, trace_line
from tests.pure.live_server import PAGE_SIZE, live

SYSTEM = "You look after the harbour of Genoa and know every ship that has ever been there. " * 8
QUESTIONS = ("Which ship is the oldest?", "Which ship is the fastest?", "Which ship is red?")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chats with one system prompt and different questions, and the first one again."""
    path = tmp_path_factory.mktemp("record") / "record.jsonl"
    file = LineFile(path)
    with live() as server:
        server.server.service.listeners.append(lambda done: file.write(trace_line(done)))
        for question in (*QUESTIONS, QUESTIONS[0]):
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ]
            body = {"model": "fake", "messages": messages, "max_tokens": 2}
            assert server.post("/v1/chat/completions", body).status_code == 200
        server.until_idle()
    return path


def _json_of(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json", "-"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def _lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def _in_whole_pages(num_tokens: int) -> int:
    """Hashes are of whole pages: the record does not say what prompts share inside one."""
    return num_tokens // PAGE_SIZE * PAGE_SIZE


def test_a_record_has_ids_of_64_bits_and_the_order_of_the_prompt(record: Path) -> None:
    """Among a few hundred hashes some have the highest bit; segments have paths and no text."""
    first = _lines(record)[0]

    assert max(first["hash_ids"]) >= 1 << 63
    assert [path for _, path in first["segments"]] == ["messages[0].content", "messages[1].content"]
    assert "Genoa" not in record.read_text()


@pytest.mark.parametrize("options", [(), ("--provider", "ramify")])
def test_analyze_reports_what_the_server_read(record: Path, options: tuple[str, ...]) -> None:
    """The reported rate is that of the record; the rule of our own cache reads the same whole pages."""
    lines = _lines(record)
    num_read = sum(line["hit"] for line in lines)

    report = _json_of("analyze", record, *options)

    rates = {name: rate["num_read"] for name, rate in report["rates"].items()}
    assert num_read > 0
    assert rates["reported"] == num_read
    assert rates["by_rule"] == sum(_in_whole_pages(line["hit"]) for line in lines)
    assert report["findings"] == []


def test_lint_names_the_field_in_which_prompts_diverge(record: Path) -> None:
    """New questions are new content in the second message, at the page where the match ends."""
    lines = _lines(record)

    verdicts = _json_of("lint", record, "--provider", "ramify")["verdicts"]

    assert verdicts[0]["divergence"] is None and verdicts[0]["causes"] == []
    assert verdicts[1]["divergence"]["segment"] == "messages[1].content"
    assert verdicts[1]["divergence"]["token"] == _in_whole_pages(lines[1]["hit"])
    assert [cause["cause"] for cause in verdicts[1]["causes"]] == ["new_content"]
    assert verdicts[3]["tokens"]["reusable"] == len(lines[3]["hash_ids"]) * PAGE_SIZE


def test_explain_compares_two_lines_of_a_record(record: Path) -> None:
    """Shared are the pages with equal hashes, and the first difference has its field."""
    lines = _lines(record)

    explanation = _json_of("explain", f"{record}:1", f"{record}:2")

    assert explanation["shared_as_sent"] == lines[1]["hit"] == explanation["shared_if_mended"]
    assert explanation["divergence"]["segment"] == "messages[1].content"
    assert explanation["is_exact"] is True


def test_simulate_replays_a_record(record: Path) -> None:
    """With room for everything, the cache reads the whole pages that the server did."""
    lines = _lines(record)

    result = _json_of("simulate", record, "--capacity", "100K")

    num_computed = sum(line["input_length"] - _in_whole_pages(line["hit"]) for line in lines)
    assert result["computed_tokens"] == {
        "lru": {"100000": num_computed},
        "auto": {"100000": num_computed},
    }


def test_the_record_says_why_a_prefix_was_missed(tmp_path: Path) -> None:
    """Evicted, in flight and other namespaces are causes; that a prompt is cold or new is none."""
    reasons = {"evicted": ["evicted"], "in_flight": ["parallel_cold"], "cold": [], "new_turn": []}
    reasons["other_namespace"] = ["namespace_split"]
    rows = [
        {
            "timestamp": 1000 * number, "total_ms": 1, "id": str(number), "input_length": 160,
            "output_length": 1, "page_size": 16, "hit": 0, "hash_ids": list(range(100 * number, 100 * number + 10)),
            "segments": [[0, "tools[0]"], [96, "messages[0].content"]],
            "miss": {"reason": reason, "at_token": 0, "segment": "tools[0]"},
        }
        for number, reason in enumerate(reasons)
    ]  # fmt: skip
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    report = lint(path)

    names = [[str(cause.cause) for cause in verdict.causes] for verdict in report.verdicts]
    assert names == list(reasons.values())
    assert {item.segment for item in report.findings} == {"tools[*]"}


@pytest.mark.parametrize(("provider", "is_unknown"), [("ramify", True), ("openai", False)])
def test_bodies_do_not_say_the_order_of_a_template(
    tmp_path: Path, provider: str, *, is_unknown: bool
) -> None:
    """Under the rule of an engine with chat templates, bodies with tools have an unknown order."""
    body = {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "sail"}}],
        "messages": [{"role": "user", "content": "Sail."}],
    }
    path = tmp_path / "bodies.jsonl"
    path.write_text(json.dumps(body) + "\n")

    warnings = _json_of("analyze", path, "--provider", provider)["warnings"]

    assert any("Unknown order in 1 request:" in warning for warning in warnings) is is_unknown
