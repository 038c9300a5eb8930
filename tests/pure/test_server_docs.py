"""The server's documentation is true: its code runs and the names in it exist."""

import re
from pathlib import Path
from typing import Any

import typer.main

from ramify.cli import app
from tests.pure.live_server import live
from tests.pure.test_docs import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "server.md").read_text(encoding="utf-8")
APIS = (DOCS / "api.md").read_text(encoding="utf-8")


def test_every_block_of_python_runs() -> None:
    """The page's Python blocks run in order, with the official clients, against a server."""
    names: dict[str, Any] = {}
    with live(model="ramify-tiny") as server:
        for number, code in enumerate(blocks(PAGE, "python")):
            here = code.replace("http://127.0.0.1:8000", server.url)
            exec(compile(here, f"server, block {number}", "exec"), names)
        server.until_idle()
        for client in (names["client"], names["claude"]):
            client.close()


def test_the_table_has_every_metric() -> None:
    """The table lists every `ramify_` metric and every `vllm:` alias that the server exports."""
    with live() as server:
        server.ask()
        server.ask(temperature="hot")
        families = re.findall(r"^# TYPE (\S+) (\S+)", server.get("/metrics").text, re.MULTILINE)
    metrics = {name for name, _ in families if not name.endswith("_created")}
    ours = set(re.findall(r"^\| `(ramify_\w+)`", PAGE, re.MULTILINE))
    theirs = {
        f"vllm:{name}" for name in re.findall(r"^\| `ramify_\w+` \| `(\w+)`", PAGE, re.MULTILINE)
    }

    assert ours == {name for name in metrics if name.startswith("ramify_")}
    assert theirs == {name for name in metrics if name.startswith("vllm:")}


def test_options_and_routes_exist() -> None:
    """Every command-line option that the pages name exists."""
    group: Any = typer.main.get_command(app)
    known = {
        option
        for name in ("serve", "chat", "top")
        for parameter in group.commands[name].params
        for option in parameter.opts
    }
    named = set(re.findall(r"`(?:ramify \w+ )?(--[a-z-]+)", PAGE + APIS)) - {"--help"}
    assert named <= known
    assert len(named) > 8
