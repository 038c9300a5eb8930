"""Commands in the blocks of the documentation: `ramify` takes those that are its own, a server those of curl."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ramify.cli import app
from tests.pure.live_server import live
from tests.pure.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
GROUP: Any = typer.main.get_command(app)
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"),
]
# Ends a command inside a line of shell.
AFTER = {"|", "||", "&&", ";", "&", ">", "2>", "<"}
SERVER = "http://127.0.0.1:8000"
NOT_RUN = {"cluster.md"}  # replaces the weights of a cluster


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each `ramify` command in the shell blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for language in ("sh", "bash", "console"):
        for block in blocks(text, language):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                if re.match(r"(\$ |\.venv/bin/)?ramify ", line):
                    words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
                    stop = next((at for at, word in enumerate(words) if word in AFTER), len(words))
                    yield words[:stop]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_exists(page: Path) -> None:
    """Name, options and values are parsed; nothing is run."""
    for name, *args in commands(page):
        assert name in GROUP.commands, name
        if "--help" not in args:
            GROUP.commands[name].make_context(name, [*args])


def test_the_pages_have_commands() -> None:
    """The blocks are read at all."""
    assert sum(len(list(commands(page))) for page in PAGES) > 30


def calls(page: Path) -> list[str]:
    """Shell blocks of a page that call a server with curl, and nothing else."""
    text = page.read_text(encoding="utf-8")
    shell = [block for language in ("sh", "bash") for block in blocks(text, language)]
    return [block for block in shell if block.startswith("curl ") and SERVER in block]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if calls(page) and page.name not in NOT_RUN],
    ids=lambda page: page.name,
)
def test_a_server_answers_the_calls_of_a_page(page: Path) -> None:
    """With curl, as they stand there; a status of 400 or more fails."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    with live(model="ramify-tiny") as server:
        for block in calls(page):
            here = block.replace(SERVER, server.url)
            command = re.sub(r"^curl ", "curl -sS --fail-with-body ", here, flags=re.MULTILINE)
            done = subprocess.run(
                ["sh", "-e", "-c", command], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
