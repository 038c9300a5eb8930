"""docs/coming-from: every option of another server has an answer, and what the pages name here exists."""

import re
from pathlib import Path
from typing import Any

import coming_from
import pytest
import typer.main
from peer_options import PEERS, Peer

import ramify
from ramify.cli import app
from ramify.server.routes import ENDPOINTS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "coming-from"
PAGES = sorted(FOLDER.glob("*.md"))
SERVER = (FOLDER.parent / "server.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)


def answers(page: Path) -> str:
    """The last column of every table: what is used here."""
    rows = re.findall(r"^\|.*\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return "\n".join(re.split(r"(?<!\\)\|", row)[-2] for row in rows)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.page)
def test_the_tables_of_options_are_up_to_date(peer: Peer) -> None:
    """`make options` changes nothing; an option without an answer raises."""
    page = (FOLDER / peer.page).read_text(encoding="utf-8")

    assert coming_from.with_table(page, peer) == page, "run `make options`"


def test_an_option_without_an_answer_is_an_error() -> None:
    """So that a new name in the list gets an answer of the command line too."""
    with pytest.raises(LookupError, match="no answer to --flux-capacitor"):
        coming_from.answer("--flux-capacitor")


@pytest.mark.parametrize(
    ("flag", "cell"),
    [
        ("--max-model-len", "the same"),
        ("--max-num-batched-tokens", "`--max-batch-tokens`"),
        ("--data-parallel-size", "`--replicas N` starts N engines behind one address"),
        ("--temp", "per request: `temperature`"),
        ("--trust-remote-code", "leave it out: code of a checkpoint is never run"),
    ],
)
def test_an_answer_says_what_to_use(flag: str, cell: str) -> None:
    """The error's text, shorter, with names in code font."""
    assert coming_from.answer(flag) == cell


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_commands_of_the_answers_exist(page: Path) -> None:
    """Every `--flag` and `ramify command` in the last column of a table."""
    known = {
        flag
        for command in GROUP.commands.values()
        for option in command.params
        for flag in (*option.opts, *option.secondary_opts)
    }
    code = " ".join(re.findall(r"`([^`]+)`", answers(page)))

    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) <= known
    assert set(re.findall(r"\bramify (\w+)", code)) <= set(GROUP.commands)
    assert len(re.findall(r"--[a-z]", code)) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_metrics_of_the_answers_exist(page: Path) -> None:
    """Every path of the server and every metric in the last column of a table."""
    paths = {
        path.partition("/{")[0]
        for endpoint in ENDPOINTS
        for path in (endpoint.path, *endpoint.aliases)
    }
    metrics = set(re.findall(r"^\| `(ramify_\w+)`", SERVER, re.MULTILINE))
    code = re.findall(r"`([^`]+)`", answers(page))

    named = {path for text in code for path in re.findall(r"(?:^|\s)(/[a-z]\S*)", text)}
    named_metrics = {name for text in code for name in re.findall(r"\bramify_\w+", text)}

    assert {re.sub(r"/[A-Z]+$", "", path) for path in named} <= paths
    assert named_metrics - {"ramify_cache"} <= metrics


def test_names_in_python_exist() -> None:
    """`LLM`, `AsyncLLM` and `session` calls in the answers of the pages."""
    from ramify.engine.sessions.session import Session

    owners = {"llm": ramify.LLM, "AsyncLLM": ramify.AsyncLLM, "session": Session}
    text = "\n".join(map(answers, PAGES))

    called = re.findall(r"`(llm|AsyncLLM|session)\.(\w+)", text)

    assert len(called) > 15
    assert [(owner, name) for owner, name in called if not hasattr(owners[owner], name)] == []
