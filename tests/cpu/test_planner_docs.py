"""The page about planner and attention is true: its code runs, and its tables have every name."""

import contextlib
import io
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ramify.attention import AttentionBatch, RadixAttentionPlanner
from tests.pure.test_docs import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "planner-and-attention.md").read_text(encoding="utf-8")
MAX_ENGINE_LINES = 50


def names_in_table(heading: str) -> set[str]:
    """Every name in code in the first column of the tables below a heading."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_every_block_of_code_runs() -> None:
    """All code blocks run in order in one namespace, and leave no lease and no private page."""
    names: dict[str, Any] = {}
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(blocks(PAGE, "python")):
            exec(compile(code, f"planner-and-attention, block {number}", "exec"), names)

    cache = names["planner"].cache
    cache.check()
    assert printed.getvalue() == blocks(PAGE, "text")[0]
    assert cache.stats().num_leases == cache.stats().private_pages == 0


def test_the_engine_is_as_short_as_its_heading_says() -> None:
    """The class has at most fifty lines of code."""
    code = blocks(PAGE, "python")[0].partition("class Engine")[2].partition("\nengine, ")[0]

    assert len([line for line in code.splitlines() if line.strip()]) <= MAX_ENGINE_LINES


def test_the_table_has_every_call_of_the_planner() -> None:
    """The table lists exactly the public calls."""
    public = {name for name in vars(RadixAttentionPlanner) if name[0] != "_"}

    assert names_in_table("The life of a sequence") == public


def test_the_table_has_every_array_of_a_batch() -> None:
    """The other fields of a batch are three numbers."""
    numbers = {"page_size", "max_q_len", "max_kv_len"}
    arrays = {field.name for field in fields(AttentionBatch)} - numbers

    assert names_in_table("The arrays of a step") == arrays


def test_links_lead_somewhere() -> None:
    """Every link of the page names an existing file."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", PAGE)]

    assert len(targets) > 3
    assert [target for target in targets if not (DOCS / target).exists()] == []
