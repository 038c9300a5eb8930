"""Every `ramify` command in a block of the documentation is one that the command line takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ramify.cli import app
from tests.pure.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
GROUP: Any = typer.main.get_command(app)
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"),
]
# Ends a command inside a line of shell.
AFTER = {"|", "||", "&&", ";", "&", ">", "2>", "<"}


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
