"""The engine guide is true: its code runs and prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from ramify.engine.cache_admin.view import CacheView
from tests.cpu.engine_cases import assert_idle
from tests.pure.test_docs import blocks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")


def test_every_block_of_code_runs() -> None:
    """All code blocks run in order in a shared namespace and leave nothing held."""
    names: dict[str, Any] = {}
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(blocks(PAGE, "python")):
            exec(compile(code, f"engine, block {number}", "exec"), names)

    assert printed.getvalue() == blocks(PAGE, "text")[0]
    assert_idle(names["llm"])


def test_the_table_has_every_call_of_the_cache() -> None:
    """The guide's table lists exactly the public calls of CacheView."""
    part = PAGE.partition("## The cache")[2].partition("## Serving")[0]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row)}

    assert documented == {name for name in vars(CacheView) if name[0] != "_"}
