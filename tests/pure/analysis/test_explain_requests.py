"""`ramify explain` and `ramify lint` as a user calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ramify.cli import app

RULES = "You answer politely, in the language of the user, and you never guess. " * 12


def body(tools: str, clock: str, question: str) -> str:
    return json.dumps(
        {
            "model": "gpt-5",
            "tools": [{"type": "function", "function": {"name": name}} for name in tools],
            "messages": [
                {"role": "system", "content": f"Time: {clock}\n{RULES}"},
                {"role": "user", "content": question},
            ],
        }
    )


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output or repr(result.exception)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{body('ab', '10:01:02', 'Hi')}\n{body('ba', '10:07:08', 'Good day')}\n")
    return path


def test_explain_names_all_differences_of_two_lines(log: Path, tmp_path: Path) -> None:
    """Requests of a log are named by line; what stands behind the first difference is listed too."""
    target = tmp_path / "out.json"

    code, output = run("explain", f"{log}:1", f"{log}:2", "--json", target)

    assert code == 0, output
    report = json.loads(target.read_text())
    assert [item["cause"] for item in report["differences"]] == [
        "tool_order",
        "clock",
        "new_content",
    ]
    assert report["divergence"]["segment"] == "tools[0]"
    assert report["shared_if_mended"] > report["shared_as_sent"]


@pytest.mark.parametrize(
    ("line", "later", "rule"),
    [
        ("Today's date: 2026-06-05", "Today's date: 2026-06-06", "date-line"),
        ("Current time: 2026-06-05 15:04", "Current time: 2026-06-05 16:11", "clock-line"),
        ("Session ID: 9f1c33a7e141", "Session ID: 41aa07b3c9f8", "session-id"),
        ("Request ID: req_01J8ZQ", "Request ID: req_77KPM2", "request-id"),
        (
            "<env>\n  Working directory: /home/ann\n  Platform: linux\n</env>",
            "<env>\n  Working directory: /srv/run-7\n  Platform: linux\n</env>",
            "env-block",
        ),
        (
            "# Environment\nYou have been invoked in the following environment: \n - Directory: /home/ann",
            "# Environment\nYou have been invoked in the following environment: \n - Directory: /srv/r7",
            "env-block",
        ),
        ("It is 15:04 now.", "It is 16:11 now.", ""),
    ],
)
def test_a_rule_that_mends_the_prompt_is_recommended(
    tmp_path: Path, line: str, later: str, rule: str
) -> None:
    """By its name, in `explain` and in the finding; none where no rule takes the value out."""
    log, target = tmp_path / "log.jsonl", tmp_path / "out.json"
    systems = [f"You help.\n{text}\n{RULES}" for text in (line, later)]
    log.write_text("".join(json.dumps(chat(system)) + "\n" for system in systems))

    code, output = run("explain", f"{log}:1", f"{log}:2")
    assert code == 0, output
    assert (f"`ramify serve --prompt-rules {rule}`" in output) == bool(rule)
    assert ("--prompt-rules" in output) == bool(rule)
    assert "Or let" not in output

    code, output = run("lint", log, "--json", target)
    assert code == 0, output
    [finding] = json.loads(target.read_text())["findings"]
    assert finding.get("rule", "") == rule
    assert (f"`ramify serve --prompt-rules {rule}`" in finding["change"]) == bool(rule)


def test_a_value_that_no_rule_sees_has_no_rule(tmp_path: Path) -> None:
    """Rules look at the system prompt before the first message: a later one keeps its date."""
    log = tmp_path / "log.jsonl"
    rows = []
    for day in "56":
        note = {"role": "system", "content": f"Today's date: 2026-06-0{day}\n{RULES}"}
        question = {"role": "user", "content": "Hi"}
        messages = [question, note, {"role": "user", "content": "And now?"}]
        rows.append(json.dumps({"model": "gpt-5", "messages": messages}) + "\n")
    log.write_text("".join(rows))

    code, output = run("explain", f"{log}:1", f"{log}:2")

    assert code == 0, output
    assert "clock" in output
    assert "--prompt-rules" not in output


def chat(system: str) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
    return {"model": "gpt-5", "messages": messages}


def test_explain_counts_token_ids_of_the_log_exactly(tmp_path: Path) -> None:
    log, target = tmp_path / "log.jsonl", tmp_path / "out.json"
    prompts = [[*range(40), 7], [*range(40), 8, 9]]
    log.write_text("".join(json.dumps({"model": "m", "prompt": ids}) + "\n" for ids in prompts))

    code, output = run("explain", f"{log}:1", f"{log}:2")
    assert code == 0, output
    assert output.startswith("40 of 42 tokens are shared as sent")

    code, output = run("explain", f"{log}:1", f"{log}:2", "--json", target)
    assert code == 0, output
    assert json.loads(target.read_text())["is_exact"] is True


@pytest.mark.parametrize("num_later", [0, 2])
def test_content_behind_a_value_is_named_in_its_own_message(tmp_path: Path, num_later: int) -> None:
    """A question behind a clock and equal text is new content of that message, not of the next."""
    log, target = tmp_path / "log.jsonl", tmp_path / "out.json"
    later = (
        [("assistant", "They do."), ("user", "Which?")],
        [("assistant", "No."), ("user", "Why?")],
    )
    bodies = [
        {
            "model": "gpt-5",
            "messages": [
                {"role": role, "content": content}
                for role, content in [
                    ("system", RULES),
                    ("user", f"Time now: {clock}\n{RULES}\n{question}"),
                    *answers[:num_later],
                ]
            ],
        }
        for clock, question, answers in (
            ("10:01:02", "Do rivers flow north?", later[0]),
            ("10:07:08", "Can whales sing loudly?", later[1]),
        )
    ]
    log.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))

    code, output = run("explain", f"{log}:1", f"{log}:2", "--json", target)

    assert code == 0, output
    differences = json.loads(target.read_text())["differences"]
    assert [(item["cause"], item["segment"]) for item in differences] == [
        ("clock", "messages[1]"),
        ("new_content", "messages[1]"),
    ]


def test_lint_writes_what_it_prints(log: Path, tmp_path: Path) -> None:
    """The JSON has a verdict for each line; the summary names the causes."""
    target = tmp_path / "lint.json"

    code, output = run("lint", log, "--json", target)

    assert code == 0, output
    assert [item["line"] for item in json.loads(target.read_text())["verdicts"]] == [1, 2]
    assert "tool_order" in output
    assert "clock" in output


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("lint", "none.jsonl"), "none.jsonl"),
        (("explain", "none.json", "none.json"), "none.json"),
        (("lint", "LOG", "--provider", "nobody"), "nobody"),
        (("lint", "LOG", "--format", "nothing"), "nothing"),
        (("explain", "LOG:9", "LOG:1"), "line 9"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: tuple[str, ...], part: str, log: Path) -> None:
    """Missing files, unknown names and lines without a request end with code 2 and no traceback."""
    code, output = run(*(argument.replace("LOG", str(log)) for argument in arguments))

    assert code == 2
    assert "error:" in output
    assert part in output


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "empty file"), ('{"a": 1}\n', "1 × row of no known format"), ("x\ny\n", "2 × no JSON")],
)
def test_lint_of_a_log_without_requests_is_one_warning(
    tmp_path: Path, content: str, reason: str
) -> None:
    """JSON is written and the exit code is 0, as bad lines are not fatal; `--strict` makes it 2."""
    log, target = tmp_path / "log.jsonl", tmp_path / "lint.json"
    log.write_text(content)

    code, output = run("lint", log, "--json", target)

    assert code == 0
    assert output.startswith(f"warning: the log has no requests: {reason}")
    assert "input tokens" not in output
    assert json.loads(target.read_text())["num_requests"] == 0
    code, output = run("lint", log, "--strict")
    assert (code, output.startswith("error: ")) == (2, True)
